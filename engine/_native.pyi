"""Kernels for bfloat16 on x86-64 CPUs. Addresses are those of contiguous memory that stays where it is; matrices are
bfloat16, scales, cosines and sines float32."""

from typing import Any

import numpy as np

Buffer = np.ndarray[Any, Any]
Norm = tuple[int, float]
Product = tuple[int, int, int, int, int]
Weights = tuple[Norm, Product, Norm, Norm, Product, Norm, Product, Product]

MOST_HEAD_DIM: int
MOST_QUERIES: int
"""Heads that share a KV head, at most."""

def instruction_sets() -> tuple[str, ...]:
    """Those in which there are kernels that this CPU can run, the best first. Where there is none, nothing that computes may be called."""

def instruction_set() -> str:
    """That of the kernels that are used: the best, until another one is chosen."""

def use(instruction_set: str) -> None:
    """Has all that is computed from now on computed by the kernels in one of `instruction_sets`; ValueError for any other. What has been
    packed stays as it is."""

def norm(x: int, added: int, scale: int, eps: float, out: int, rows: int, size: int) -> None:
    """Into `out` the norm of `x`, to which `added`, unless it is 0, has been added in place; all [rows, size]."""

def max_threads() -> int:
    """That the calling thread's kernels run on: torch.get_num_threads(), as long as both have one OpenMP runtime."""

def prefer_huge_pages(address: int, bytes: int) -> None:
    """Asks for them, where `address` begins a page. Nothing says whether it was heard."""

def pack(weight: int, packed: int, outputs: int, inputs: int, gated: bool) -> None:
    """Lays a weight [outputs, inputs] out for `product`, as whole panels of 64 outputs; `inputs` is even. Gated, the weight has 2 * outputs
    rows, the gates' first, and a panel 32 outputs. `packed` is aligned to 64 bytes."""

def product(x: int, out: int, rows: int, packed: int, bias: int, outputs: int, inputs: int, kind: int) -> None:
    """Into `out` [rows, outputs] the product of `x` [rows, inputs] with what was packed, plus `bias`, unless it is 0: float32, in the order
    of the panels' columns. `kind` 0: as it is; 1, 2: gated, by silu or the tanh form of gelu."""

class Plan:
    """Attention of one pass. Raises ValueError, TypeError, naming what is wrong."""

    def __new__(
        cls,
        arena: Buffer,
        num_slots: int,
        strides: tuple[int, int, int],
        block_tokens: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        chunks: list[tuple[int, int, Buffer]],
        /,
    ) -> Plan:
        """`chunks`: (first position, number of tokens, int32 slots) of each sequence, whose rows are one after another. `strides`
        lead, in elements, from one slot, from a slab's keys to its values, and from one token to the next. head_dim is a multiple of
        32."""

    def positions(self, into: Buffer, /) -> None:
        """Of each row, int64."""

    def run(
        self,
        slab: int,
        qkv: int,
        out: int,
        cos: int,
        sin: int,
        query_scale: int,
        key_scale: int,
        eps: float,
        score_scale: float,
        window: int,
        /,
    ) -> None:
        """One layer, whose slabs begin at element `slab` of a slot: `qkv` [rows, heads + 2 * kv_heads, head_dim], queries rotated in
        place; `out` [rows, heads, head_dim]; `cos`, `sin` [positions, head_dim / 2]; scales of the heads' norms [head_dim], or 0; `window`
        0 for none."""

class Layers:
    """Dense layers, one after another. Norms are (scale, eps), the scale of a head's norm 0 where there is none; products are
    (packed, bias, outputs, inputs, kind), all as above and for as long as this lives."""

    def __new__(cls, hidden_size: int, layers: list[Weights], /) -> Layers:
        """Of each: the norm before attention, Q, K and V's product, the queries' and the keys' norms, the output's product; the norm before
        the feed-forward, its gated product, and the one that follows."""

    def run(
        self,
        begin: int,
        places: list[tuple[int, int]],
        plan: Plan,
        rows: int,
        pending: bool,
        memory: tuple[int, ...],
        score_scale: float,
        keys_only: bool,
        /,
    ) -> None:
        """The layers from `begin` on, at each its (slab, window) of `places`. `memory` is stream, delta, x, qkv, attended, inner, cos, sin:
        of stream and delta [rows, hidden size] the sum is what goes from layer to layer, and `pending` says whether there is anything in
        delta yet; after the last layer of all it has been added. x is as large; qkv, attended and inner have the columns that the products
        yield; cos and sin are as above. `keys_only`: of the last of these layers nothing is computed beyond what goes into the slots."""
