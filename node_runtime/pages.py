"""How much of a step or a pass an engine's device has pages for at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def within(chosen: Sequence[T], slots_of: Callable[[T], Sequence[int]], most_blocks: int | None) -> Sequence[T]:
    """The first of `chosen` whose slots, those that several have counted once, are at most `most_blocks` together (None: no matter how
    many); one of them in any case."""
    if most_blocks is None or sum(len(slots_of(one)) for one in chosen) <= most_blocks:
        return chosen
    held: set[int] = set()
    for count, one in enumerate(chosen):
        held.update(slots_of(one))
        if len(held) > most_blocks:
            return chosen[: max(count, 1)]
    return chosen
