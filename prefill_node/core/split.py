"""Which layers each stage of a group takes, by what they cost. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

_Add: TypeAlias = "Callable[[float, float], float]"
"""What a split's first ranges are worth with one more of some cost."""


def split(layer_costs: Sequence[float], stages: int, embedding: float = 0.0, head: float = 0.0) -> tuple[range, ...]:
    """The layers of the stages: contiguous ranges, one a stage and none empty, of which the costliest costs as little as possible; of
    several such, those that are most alike. `embedding` is the first stage's, `head` the last one's. Raises ValueError when there are more
    stages than layers.

    Dynamic programming over the ends of the ranges: layers² * stages steps.
    """
    if not 1 <= stages <= len(layer_costs):
        raise ValueError(f"{len(layer_costs)} layers cannot be split among {stages} stages")
    costs = [*layer_costs]
    costs[0] += embedding
    costs[-1] += head
    sums = [0.0, *accumulate(costs)]
    slowest = _best(sums, stages, max)[0]
    # Sums of the same numbers in another order differ in their last digits.
    allowed = slowest * (1 + 1e-9)
    _, ends = _best(sums, stages, lambda so_far, cost: so_far + cost * cost if cost <= allowed else float("inf"))
    return tuple(range(begin, end) for begin, end in zip((0, *ends[:-1]), ends, strict=True))


def _best(sums: Sequence[float], stages: int, add: _Add) -> tuple[float, tuple[int, ...]]:
    """The least value over all splits, and the ends of the ranges of the one that has it."""
    layers = len(sums) - 1
    never: tuple[float, tuple[int, ...]] = (float("inf"), ())
    best = [never] * (layers + 1)
    best[0] = (0.0, ())
    for stage in range(1, stages + 1):
        following = [never] * (layers + 1)
        for end in range(stage, layers - (stages - stage) + 1):
            following[end] = min((add(best[begin][0], sums[end] - sums[begin]), (*best[begin][1], end)) for begin in range(stage - 1, end))
        best = following
    return best[layers]
