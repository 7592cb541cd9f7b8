"""What a backend computes a model with: products and norms, attention, and whole layers where it can."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.batch import SequenceChunk
from engine.device.base import Device
from engine.layers.linear import Product
from engine.layers.rope import Rotation
from engine.model_config import Activation


@dataclass(frozen=True, slots=True)
class Norm:
    """A root mean square norm (Zhang and Sennrich, arXiv 1910.07467) over the last dimension: `scale` [size] in the dtype that it is
    computed in, the input's own or float32."""

    scale: torch.Tensor
    eps: float


class Ops(ABC):
    """Rows are tokens. Results have the dtype of the inputs. Weights are laid out once, when a model is loaded."""

    @abstractmethod
    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """`x @ weight.T + bias` with `weight` [outputs, inputs]."""

    @abstractmethod
    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> Product:
        """`activation(gate) * up`, gate and up being the two halves of the product with `weight` [2 * outputs, inputs]."""

    def prepared(self, norm: Norm) -> Norm:
        """The norm as `norm` and `add_norm` want it."""
        return norm

    @abstractmethod
    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """[rows, size] to the same, anew."""

    @abstractmethod
    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Adds `delta` to `residual`, both [rows, size], in place; returns the norm of the sum."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms by which each head's query and key are normalised before they are rotated."""

    query: Norm
    key: Norm


class AttentionPass(ABC):
    """Attention in one forward pass. Rows are the batch's tokens, sequence after sequence."""

    positions: torch.Tensor
    """int64 [rows]: of each token in its sequence."""
    last: LastRows | None = None
    """Who wants anything of the model's last layer but keys and values, where these are so few that it pays to compute it for them alone.
    Backends may leave it at None."""

    @abstractmethod
    def run(self, layer: int, qkv: torch.Tensor, rotation: Rotation, norms: HeadNorms | None) -> torch.Tensor:
        """`qkv` [rows, heads + 2 * kv_heads, head_dim], as projected and the callee's to change, is normalised where the model does that,
        and rotated. Keys and values go into the batch's slots; each query attends to its sequence up to itself, as far back as the
        layer's window reaches. Returns [rows, heads, head_dim], contiguous."""


@dataclass(frozen=True, slots=True)
class LastRows:
    """`rows` of a pass, none or some. `plan`: of these as a pass of their own, which writes their keys and values once more."""

    rows: Sequence[int]
    plan: Callable[[], AttentionPass]


class FixedStep(AttentionPass):
    """A pass of so many sequences with one new token each, whatever they are, in memory that stays where it is: `run` can be recorded and
    replayed."""

    @abstractmethod
    def fill(self, batch: Sequence[SequenceChunk]) -> bool:
        """Takes in the batch that is run next. False when there is no room for all the slots of so long contexts. Blocks that begin in the
        pass are zero already."""


class AttentionBackend(ABC):
    """Attention over paged KV. It owns no memory: it reads and writes the slots that each chunk names, which are the caller's until the
    pass has ended."""

    @abstractmethod
    def plan(self, batch: Sequence[SequenceChunk]) -> AttentionPass:
        """What is the same in all layers is worked out here, once a pass. Raises ValueError when a chunk's slots do not hold its tokens
        or are outside the arena."""

    def fixed_step(self, size: int) -> FixedStep | None:
        """A pass of `size` sequences; None where the backend has no such thing."""
        return None


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A layer with one feed-forward for all tokens, and all of it."""

    attention_norm: Norm
    qkv: Product
    head_norms: HeadNorms | None
    output: Product
    feed_forward_norm: Norm
    gated: Product
    down: Product


class LayersPass(ABC):
    """A pass over consecutive layers, all of them in turn."""

    @abstractmethod
    def run(self, begin: int, end: int, keys_only: bool = False) -> None:
        """Layers [begin, end), counted from the first of them. `keys_only`: of the last one only the keys and values are wanted, and what
        comes in it is left in the memory of the stream. Fused layers can do it."""

    @abstractmethod
    def finish(self) -> torch.Tensor:
        """[rows, hidden] after the last one, or what came in it where only its keys were wanted, in the memory in which the first one's
        came."""


StartLayers = Callable[[torch.Tensor, Rotation, AttentionPass], LayersPass]
"""From [rows, hidden], which is overwritten."""

FuseLayers = Callable[[Sequence[DenseLayer]], StartLayers | None]
"""None where these layers have something that it cannot do."""


SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Decode waits for memory, so that a batch that is filled up to twice its size takes hardly longer."""


def size_for(sequences: int) -> int | None:
    """The least of SIZES that holds them."""
    return next((size for size in SIZES if size >= sequences), None)


def sizes_up_to(most: int) -> tuple[int, ...]:
    """The ones of SIZES that batches of up to `most` sequences are filled up to."""
    return tuple(size for size in SIZES if size < 2 * most)


_CPU = torch.device("cpu")


def _no_workspace(slabs: torch.Tensor, heads: int) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Backend:
    name: str
    kernels: str
    """What it computes with, in words for people."""
    ops: Ops
    attention: Callable[[torch.Tensor, int, Sequence[int | None]], AttentionBackend]
    """From an arena [slots, layers, 2, block_tokens, kv_heads, head_dim], the number of heads, and each layer's window."""
    fuse: FuseLayers | None = None
    """Where it can do several layers in one go."""
    workspace_bytes: Callable[[torch.Tensor, int], int] = _no_workspace
    """That the attention takes on the device beside the pages, for slabs like these and the number of heads."""
    device: Device | None = None
    """None: on the CPU, in the arena itself."""

    @property
    def torch_device(self) -> torch.device:
        return _CPU if self.device is None else self.device.torch_device
