"""The policy that learns how blocks are used again: by how often they were used, and how long ago.

After LHD (Beckmann, Chen and Cidon, NSDI 2018): a place in the cache is worth the hits that it brings for the time that it is taken, so the
block goes first whose expected hits per tick of further stay are fewest. Blocks are classed by their uses, a table says for each class
and age what is to be expected, and it is learnt from a sample of keys whose use is observed, after they have been evicted too.
Within a class the longest unused goes first, so that a victim is found among the heads of a few heaps.
"""

from __future__ import annotations

import math

import numpy as np

from kvstore._native import Block, BlockHeap
from springtide.ids import BlockKey

CLASSES = 4
"""Used once, twice, thrice, and more often."""
AGES = 64
"""Ages are told apart by their octave: [0, 1), [1, 2), [2, 4), [4, 8) and so on. An age's is its bit length."""
HORIZON = 8
"""A sampled block that has not been used for as long as it takes to fill the cache so many times will not be."""
SAMPLE = 1024
"""Keys observed at a time, about."""
DECAY = 0.98
"""The share of what was learnt before that is kept at each learning."""
LEARNINGS = 4
"""The learnings in the time that it takes to fill the cache; but there are MIN_TICKS_BETWEEN them at least."""
MIN_TICKS_BETWEEN = 4096

_WIDTHS = np.array([1.0, *(2.0**octave for octave in range(AGES - 1))])


class HitDensity:
    """The policy of a tier that holds `capacity` blocks."""

    def __init__(self, capacity: int) -> None:
        self._horizon = HORIZON * capacity
        self._sampled_below = min(1 << 16, (SAMPLE << 16) // self._horizon + 1)
        self._resting: dict[BlockKey, tuple[int, int]] = {}
        """The sample: when each was last used, and its class. The longest ago comes first."""
        self._hits = [[0.0] * AGES for _ in range(CLASSES)]
        """The uses of the sample, by class and age."""
        self._ends = [[0.0] * AGES for _ in range(CLASSES)]
        """The observations that ended at an age, by a use or at the horizon, likewise."""
        self._learn_every = max(capacity // LEARNINGS, MIN_TICKS_BETWEEN)
        self._learn_at = self._learn_every
        self.density: list[list[float]] = [(2.0**uses / np.cumsum(_WIDTHS)).tolist() for uses in range(CLASSES)]
        """The expected hits for each tick of a block's further stay, by class and age. Until something was learnt, like LRU with a favour
        for what was used often."""

    @property
    def observer(self) -> HitDensity:
        return self

    def new_queue(self, lane: int) -> DensityQueue:
        return DensityQueue(self, lane)

    def observes(self, block: Block) -> bool:
        return block.key_bits >> 32 & 0xFFFF < self._sampled_below

    def used(self, block: Block, now: int) -> None:
        last = self._resting.pop(block.key, None)
        if last is not None:
            tick, uses = last
            age = (now - tick).bit_length()
            self._hits[uses][age] += 1
            self._ends[uses][age] += 1

    def rested(self, block: Block, now: int) -> None:
        self._resting[block.key] = now, class_of(block)  # the last of all, for `used` has removed it
        if now >= self._learn_at:
            self._learn_at = now + self._learn_every
            self._learn(now)

    def _learn(self, now: int) -> None:
        self._give_up_old(now)
        still_resting = np.zeros((CLASSES, AGES))
        for tick, uses in self._resting.values():
            still_resting[uses, (now - tick).bit_length()] += 1
        hits, ends = np.array(self._hits), np.array(self._ends)
        reached = _and_later(ends) + _and_later(still_resting) - still_resting / 2
        observed = (2 * self._horizon).bit_length()  # nothing is expected of what is older
        density = hit_density(hits[:, :observed] / (reached[:, :observed] + 1), _WIDTHS[:observed])
        self.density = np.pad(density, ((0, 0), (0, AGES - observed))).tolist()
        self._hits, self._ends = (hits * DECAY).tolist(), (ends * DECAY).tolist()

    def _give_up_old(self, now: int) -> None:
        while self._resting:
            key = next(iter(self._resting))
            tick, uses = self._resting[key]
            if now - tick <= self._horizon:
                return
            self._ends[uses][(now - tick).bit_length()] += 1
            del self._resting[key]


class DensityQueue:
    """The blocks of one order, in a heap for each class. O(log n) each."""

    def __init__(self, model: HitDensity, lane: int) -> None:
        self._model = model
        self._heaps = [BlockHeap(lane) for _ in range(CLASSES)]

    def add(self, block: Block) -> None:
        self._heaps[class_of(block)].push(block, block.last_used)

    def discard(self, block: Block) -> None:
        self._heaps[class_of(block)].discard(block)

    def pop(self, now: int) -> Block:
        least, worst = math.inf, self._heaps[0]
        for density, heap in zip(self._model.density, self._heaps, strict=True):
            oldest = heap.peek()
            if oldest is not None and (expected := density[(now - oldest.last_used).bit_length()]) < least:
                least, worst = expected, heap
        return worst.pop()

    def __contains__(self, block: Block) -> bool:
        return block in self._heaps[class_of(block)]

    def __len__(self) -> int:
        return sum(map(len, self._heaps))


def class_of(block: Block) -> int:
    """The class of a block: by its uses."""
    uses = block.uses
    return (uses if uses < CLASSES else CLASSES) - 1


def hit_density(hazard: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Hits per tick of further stay, [classes, ages], for whoever keeps a block until the age at which that is most.

    `hazard` [classes, ages]: the chance that a block that has reached this age is used before it reaches the next, which is `widths` later.
    """
    density = np.zeros_like(hazard)
    for age in range(hazard.shape[1]):
        ahead = hazard[:, age:]
        survival = np.cumprod(1 - ahead, axis=1) / (1 - ahead)
        hits = np.cumsum(survival * ahead, axis=1)
        ticks = np.cumsum(survival * (1 - ahead / 2) * widths[age:], axis=1)
        density[:, age] = (hits / ticks).max(axis=1)
    return density


def _and_later(counts: np.ndarray) -> np.ndarray:
    return counts[:, ::-1].cumsum(axis=1)[:, ::-1]
