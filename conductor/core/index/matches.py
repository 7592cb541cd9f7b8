"""How much of one prompt each store holds: what `PrefixIndex.match` answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from conductor._native import spread
from springtide.ids import NodeId

Numbers = npt.NDArray[np.int64]
_FEW = 4
"""So many bits are sooner picked out one by one."""


class Matches(Mapping[NodeId, int]):
    """Store -> blocks of the prompt that it holds; stores that hold none are left out. Valid until the index takes in the next event.

    A prompt's holders drop out at few depths, however many they are, so the answer is kept as those: `ends` are pairs of a number of
    blocks and the holders of exactly so many, a bit each, the longest first. As a mapping it costs time with the number of holders, and is
    for those who want to see all of them; decisions look at `blocks_by_bit` and `longest`.
    """

    __slots__ = ("_by_bit", "_by_node_id", "ends", "node_of_bit")

    def __init__(self, ends: Sequence[tuple[int, int]], node_of_bit: Sequence[NodeId]) -> None:
        self.ends = ends
        self.node_of_bit = node_of_bit
        self._by_bit: Numbers | None = None
        self._by_node_id: dict[NodeId, int] | None = None

    def blocks_by_bit(self) -> Numbers:
        """[bits of the index] blocks that each view's store holds, 0 for none."""
        if self._by_bit is not None:
            return self._by_bit
        blocks = self._by_bit = np.zeros(len(self.node_of_bit), np.int64)
        for num_blocks, holders in self.ends:
            if holders & (holders - 1):
                spread(blocks, num_blocks, holders.to_bytes((holders.bit_length() + 7) // 8, "little"))
            else:
                blocks[holders.bit_length() - 1] = num_blocks
        return blocks

    def longest(self, at_most: int) -> tuple[int, int]:
        """The longest match, cut at `at_most` blocks, and a bit for everybody who holds that much: FindBestPrefixMatch of Algorithm 1
        (arXiv 2407.00079, section 6). (0, 0) when nobody holds anything that counts."""
        if not self.ends or at_most < 1:
            return 0, 0
        best = min(self.ends[0][0], at_most)
        holders = 0
        for num_blocks, of_so_many in self.ends:
            if num_blocks < best:
                break
            holders |= of_so_many
        return best, holders

    def __getitem__(self, node_id: NodeId) -> int:
        return self._by_node()[node_id]

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._by_node())

    def __len__(self) -> int:
        return sum(holders.bit_count() for _, holders in self.ends)

    def _by_node(self) -> dict[NodeId, int]:
        if self._by_node_id is None:
            names = self.node_of_bit
            self._by_node_id = {names[bit]: num_blocks for num_blocks, holders in self.ends for bit in bits(holders)}
        return self._by_node_id


def bits(mask: int) -> Sequence[int] | Numbers:
    """Which bits are set, lowest first."""
    if mask.bit_count() > _FEW:
        held = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
        found: Numbers = np.unpackbits(held, bitorder="little").nonzero()[0]
        return found
    few = []
    while mask:
        lowest = mask & -mask
        few.append(lowest.bit_length() - 1)
        mask ^= lowest
    return few
