"""Long work, some at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def slices(rows: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    """Those of at most `count` that come to all, in order."""
    return (rows[first : first + count] for first in range(0, len(rows), count))


def at_once(parts: Generator[object, None, T]) -> T:
    """What work in parts comes to, where nobody else is to have a turn between them."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: T = end.value
            return result


def saying(said: S, parts: Generator[object, None, T]) -> Generator[S, None, T]:
    """The same work in as many parts, each of which yields this."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: T = end.value
            return result
        yield said
