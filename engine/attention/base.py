"""The interface of an attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.base import SequenceChunk
from engine.models.rope import Rotation
from engine.ops.base import Norm


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """By which each head's query and key are normalised before they are rotated."""

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
        """For what is run next. False when there is no room for all the slots of so long contexts. Blocks that begin in the pass are zero
        already."""


class AttentionBackend(ABC):
    """Owns no memory: it reads and writes the slots that each chunk names, which are the caller's until the pass has ended."""

    @abstractmethod
    def plan(self, batch: Sequence[SequenceChunk]) -> AttentionPass:
        """What is the same in all layers is worked out here, once a pass. Raises ValueError when a chunk's slots do not hold its tokens
        or are outside the arena."""

    def fixed_step(self, size: int) -> FixedStep | None:
        """Of `size` sequences; None where the backend has no such thing."""
        return None
