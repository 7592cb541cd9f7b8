"""Which prefixes are asked for again and again, in bounded memory and constant time a request.

A prompt is counted at the depths where the stores' holdings part from it: that is where prompts branch, so a document is one prefix
however many questions follow it. Two generations of counts are kept. When the younger is full it becomes the older, and the older is
dropped: a prefix that is asked for now and then moves to the younger generation each time, one that is not is forgotten.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

from springtide.ids import BlockKey
from springtide.slices import slices

TIME_CONSTANT_S = 60.0
_GENERATION = 8192
"""Prefixes a generation, some 2 MiB."""
_MOST_BLOCKS = 1 << 18
"""Keys kept of all the prefixes that may be copied, some 16 MiB."""
_AT_ONCE = 256
"""Of these prefixes, those that a part of a look is at."""


@dataclass(slots=True)
class _Count:
    asks: float
    rest_blocks: float
    """That come after it, of all these asks together."""
    at: float
    tenant: str


@dataclass(frozen=True, slots=True)
class PopularPrefix:
    keys: tuple[BlockKey, ...]
    """From the first block of a prompt on."""
    asks: float
    """Of late: each counts less by a factor of e in every `TIME_CONSTANT_S`. At a steady rate, as many as come in that time."""
    rest_blocks: float
    """Mean of the full blocks that come after it in the prompts that ask for it."""
    tenant: str = ""
    """Whose it is: tenants share no blocks."""


class Popularity:
    """Counts of what was asked for. `keep_from`: a prefix that was asked for so often is kept with its keys, and may be among the most
    popular."""

    def __init__(self, keep_from: float, generation: int = _GENERATION, most_blocks: int = _MOST_BLOCKS) -> None:
        self._keep_from = keep_from
        self._generation = generation
        self._most_blocks = most_blocks
        self._young: dict[BlockKey, _Count] = {}
        self._old: dict[BlockKey, _Count] = {}
        self._prefixes: dict[BlockKey, tuple[BlockKey, ...]] = {}
        """By their last key."""
        self._blocks = 0

    def ask(self, keys: Sequence[BlockKey], depths: Iterable[int], now: float, tenant: str = "") -> None:
        """Takes in that somebody asks for the first so many blocks of a prompt, at each of the depths (each at least 1)."""
        for depth in depths:
            end = keys[depth - 1]
            count = self._young.get(end) or self._old.pop(end, None) or _Count(0.0, 0.0, now, tenant)
            kept = _kept(count, now)
            count.asks = count.asks * kept + 1.0
            count.rest_blocks = count.rest_blocks * kept + (len(keys) - depth)
            count.at = now
            self._young[end] = count
            if count.asks >= self._keep_from and end not in self._prefixes and self._blocks + depth <= self._most_blocks:
                self._prefixes[end] = tuple(keys[:depth])
                self._blocks += depth
        if len(self._young) >= self._generation:
            self._young, self._old = {}, self._young

    def most_popular(self, at_most: int, now: float) -> Generator[None, None, list[PopularPrefix]]:
        """Returns, in parts, the most popular prefixes, in that order."""
        leading: list[tuple[float, BlockKey]] = []
        for ends in slices(list(self._prefixes), _AT_ONCE):
            found = ((self._asks(end, now), end) for end in ends)
            leading = heapq.nlargest(at_most, [*leading, *(entry for entry in found if entry[0] >= self._keep_from)])
            yield
        # Between two parts some may be forgotten.
        counts = [(asks, end, count) for asks, end in leading if (count := self._count(end)) is not None and end in self._prefixes]
        return [PopularPrefix(self._prefixes[end], asks, count.rest_blocks / count.asks, count.tenant) for asks, end, count in counts]

    def forget_unpopular(self, now: float) -> Generator[None, None, None]:
        """Takes the keys, in parts, of those that are asked for no more."""
        for ends in slices(list(self._prefixes), _AT_ONCE):
            for end in ends:
                if self._asks(end, now) < self._keep_from / 2:
                    self._blocks -= len(self._prefixes.pop(end))
            yield

    def _asks(self, end: BlockKey, now: float) -> float:
        """Of late, for the prefix that ends with this block."""
        count = self._count(end)
        return count.asks * _kept(count, now) if count is not None else 0.0

    def _count(self, end: BlockKey) -> _Count | None:
        return self._young.get(end) or self._old.get(end)

    def validate(self) -> None:
        """Asserts the bounds."""
        assert len(self._young) <= self._generation + 1, "the younger generation has outgrown its bound"
        assert self._blocks == sum(map(len, self._prefixes.values())) <= self._most_blocks, "the kept keys are miscounted"


def _kept(count: _Count, now: float) -> float:
    """Of what was counted."""
    return math.exp((count.at - now) / TIME_CONSTANT_S)
