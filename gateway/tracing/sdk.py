"""Spans as OpenTelemetry's SDK has them. Imported where traces are sent, and nowhere else: its packages take time to load."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from gateway.collector import SERVICE_NAME, resource
from gateway.tracing.record import RequestTrace
from gateway.tracing.spans import Kind, Span
from springtide import __version__

_KINDS = {Kind.INTERNAL: SpanKind.INTERNAL, Kind.SERVER: SpanKind.SERVER, Kind.CLIENT: SpanKind.CLIENT}
_SCOPE = InstrumentationScope(SERVICE_NAME, __version__)


class Sdk:
    """An exporter of OTLP over HTTP, and what its spans have in common. Headers, certificates, compression and the time limit are as
    OpenTelemetry's variables say."""

    def __init__(self, url: str, instance_id: str) -> None:
        self._resource = resource(instance_id)
        self._exporter = OTLPSpanExporter(url)

    def sent(self, traces: Sequence[tuple[RequestTrace, Sequence[Span]]]) -> bool:
        """Whether these could be sent. Takes as long as that does, or until it is given up."""
        spans = [self._span(trace, span) for trace, its in traces for span in its]
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()

    def _span(self, trace: RequestTrace, span: Span) -> ReadableSpan:
        trace_id = int(trace.context.trace_id, 16)

        def context(span_id: str, remote: bool = False) -> SpanContext:
            return SpanContext(trace_id, int(span_id, 16), remote, TraceFlags(TraceFlags.SAMPLED))

        def unix_ns(at: float) -> int:
            return trace.began_unix_ns + round((at - trace.began_at) * 1e9)

        own = span.span_id == trace.context.span_id
        return ReadableSpan(
            span.name,
            context(span.span_id),
            context(span.parent_id, own) if span.parent_id else None,
            self._resource,
            span.attributes,
            [Event(name, timestamp=unix_ns(at)) for name, at in span.events],
            [Link(context(linked)) for linked in span.links],
            _KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=unix_ns(span.begin),
            end_time=unix_ns(span.end),
            instrumentation_scope=_SCOPE,
        )
