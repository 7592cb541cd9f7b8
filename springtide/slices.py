"""Long sequences, some at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def slices(rows: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    """Those of at most `count` that come to all, in order."""
    return (rows[first : first + count] for first in range(0, len(rows), count))
