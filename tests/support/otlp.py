"""A collector for tests: takes traces and metrics by OTLP over HTTP, as any collector does, and keeps them."""

from __future__ import annotations

import gzip
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint


@dataclass(frozen=True)
class ReceivedSpan:
    """A span, with times in seconds by the wall clock of who sent it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin: float
    end: float
    kind: int
    attributes: Mapping[str, Any]
    links: tuple[str, ...]
    error: str
    resource: Mapping[str, Any]


class Collector:
    """`with Collector() as collector:` serves at `collector.url`."""

    def __init__(self) -> None:
        self.headers: list[Mapping[str, str]] = []
        """Of each message with traces."""
        self.resources: list[Mapping[str, Any]] = []
        """Of each message with metrics."""
        self._spans: defaultdict[str, list[ReceivedSpan]] = defaultdict(list)
        self._points: defaultdict[str, list[HistogramDataPoint]] = defaultdict(list)
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.headers["content-type"] == "application/x-protobuf"
                if self.path == "/v1/metrics":
                    collector._take_metrics(ExportMetricsServiceRequest.FromString(body))
                else:
                    assert self.path == "/v1/traces"
                    collector._take(ExportTraceServiceRequest.FromString(body), dict(self.headers))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def histogram(self, name: str, attributes: Mapping[str, Any]) -> HistogramDataPoint | None:
        """What came last of a metric's points with these among their attributes."""
        with self._changed:
            points = self._points.get(name, [])
        return next((point for point in reversed(points) if attributes.items() <= _values(point.attributes).items()), None)

    def _take_metrics(self, request: ExportMetricsServiceRequest) -> None:
        with self._changed:
            for of_resource in request.resource_metrics:
                self.resources.append(_values(of_resource.resource.attributes))
                for metric in (metric for scope in of_resource.scope_metrics for metric in scope.metrics):
                    assert metric.unit == "s"
                    self._points[metric.name] += metric.histogram.data_points
            self._changed.notify_all()

    def trace(self, trace_id: str, timeout_s: float = 30.0) -> list[ReceivedSpan]:
        """The spans of a trace, once it is here, as they were sent. Raises AssertionError when it does not come."""
        with self._changed:
            assert self._changed.wait_for(lambda: trace_id in self._spans, timeout_s), f"no trace {trace_id}, only {list(self._spans)}"
            return list(self._spans[trace_id])

    @property
    def trace_ids(self) -> list[str]:
        with self._changed:
            return list(self._spans)

    def _take(self, message: ExportTraceServiceRequest, headers: Mapping[str, str]) -> None:
        with self._changed:
            self.headers.append({name.lower(): value for name, value in headers.items()})
            for of_resource in message.resource_spans:
                resource = _values(of_resource.resource.attributes)
                for scope in of_resource.scope_spans:
                    for span in scope.spans:
                        received = _received(span, resource)
                        self._spans[received.trace_id].append(received)
            self._changed.notify_all()


def _received(span: Any, resource: Mapping[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        span.kind,
        _values(span.attributes),
        tuple(link.span_id.hex() for link in span.links),
        span.status.message if span.status.code == 2 else "",
        resource,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return tuple(map(_value, value.array_value.values)) if kind == "array_value" else getattr(value, kind)
