"""Traces as tests look at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from tests.support.intervals import overlap_s


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
    leaves = [(span.begin, span.end) for span in spans if span.span_id not in parents]
    return root.end - root.begin - overlap_s((root.begin, root.end), leaves)
