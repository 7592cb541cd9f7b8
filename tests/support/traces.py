"""Traces as tests look at them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar


class AnySpan(Protocol):
    """A span, of ours or as a collector has received it."""

    @property
    def name(self) -> str: ...

    @property
    def span_id(self) -> str: ...

    @property
    def parent_id(self) -> str: ...

    @property
    def begin(self) -> float: ...

    @property
    def end(self) -> float: ...


SpanT = TypeVar("SpanT", bound=AnySpan)


def named(spans: Sequence[SpanT], name: str) -> list[SpanT]:
    return [span for span in spans if span.name == name]


def children(spans: Sequence[SpanT], parent: AnySpan) -> list[SpanT]:
    return [span for span in spans if span.parent_id == parent.span_id]


def unaccounted_s(spans: Sequence[SpanT]) -> float:
    """How much of the first one's time, the request's, is in no span that has no children: what the trace does not explain."""
    root, parents = spans[0], {span.parent_id for span in spans}
    leaves = sorted((span.begin, span.end) for span in spans if span.span_id not in parents)
    return (root.end - root.begin) - sum(end - begin for begin, end in _joined(leaves, root.begin, root.end))


def _joined(parts: Sequence[tuple[float, float]], begin: float, end: float) -> Iterator[tuple[float, float]]:
    """The same, cut to [begin, end), without what several have."""
    at = begin
    for part_begin, part_end in parts:
        if part_end > at and part_begin < end:
            yield max(at, part_begin), min(part_end, end)
            at = min(part_end, end)
