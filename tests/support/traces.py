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


def only(spans: Sequence[SpanT], parent: AnySpan, name: str) -> SpanT:
    """The one child of that name."""
    (child,) = named(children(spans, parent), name)
    return child


def within(spans: Sequence[SpanT], parent: AnySpan) -> list[SpanT]:
    """Its children, theirs, and so on. Parents come before their children."""
    ids, found = {parent.span_id}, []
    for span in spans:
        if span.parent_id in ids:
            ids.add(span.span_id)
            found.append(span)
    return found


def unaccounted_s(spans: Sequence[AnySpan], of: AnySpan | None = None) -> float:
    """How much of a span's time, which is the first one's, the request's, unless another is named, is in no span within it that has no
    children: what the trace does not explain."""
    root, parents = of or spans[0], {span.parent_id for span in spans}
    leaves = [(span.begin, span.end) for span in within(spans, root) if span.span_id not in parents]
    return root.end - root.begin - overlap_s((root.begin, root.end), leaves)
