"""The eviction policies by name (docs/add-an-eviction-policy.md), and those that rank blocks by a value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from kvstore._native import MAX_USES
from kvstore.core.eviction_policy import EvictionPolicy, Ranking
from kvstore.core.hit_density import HitDensity
from springtide.choices import EvictionName

DEPTH_WEIGHT = 0.1
"""What a doubled depth counts, against doubled uses."""


def lru(capacity: int) -> Ranking:
    """The policy that evicts what was used longest ago."""
    return Ranking(lambda block: block.last_used)


def lfu(capacity: int) -> Ranking:
    """The policy that keeps what is used often: each doubling of its uses makes a block that much younger as it takes to fill the tier
    once. The frequent stay longer, but age wins in the end, which it never does in pure LFU."""
    worth = _worth_of_uses(capacity)
    return Ranking(lambda block: block.last_used + worth[block.uses])


def length_aware(capacity: int) -> Ranking:
    """LFU that gives the later blocks of long prompts a longer stay too, for they cost more to compute (LengthAwareCache of the Mooncake
    paper, arXiv 2407.00079, section 4.2)."""
    worth, per_doubling = _worth_of_uses(capacity), capacity * DEPTH_WEIGHT
    return Ranking(lambda block: block.last_used + worth[block.uses] + per_doubling * block.depth.bit_length())


def _worth_of_uses(capacity: int) -> list[float]:
    """The worth in ticks, by the number of uses."""
    return [0.0, *(capacity * math.log2(uses) for uses in range(1, MAX_USES + 1))]


EVICTION_POLICIES: Mapping[EvictionName, Callable[[int], EvictionPolicy]] = {
    "hit-density": HitDensity,
    "lru": lru,
    "lfu": lfu,
    "length-aware": length_aware,
}
"""What makes the policy of a tier, from the number of blocks that it holds; the default first."""


def new_policy(name: EvictionName, capacity: int) -> EvictionPolicy:
    """The policy of a tier that holds `capacity` blocks."""
    return EVICTION_POLICIES[name](capacity)
