"""Sends traces by OTLP, from a thread of its own: never in the way of a request. What its queue has no room for is dropped and counted."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway import metrics
from gateway.collector import destination, opentelemetry_for
from gateway.tracing.record import RequestTrace
from gateway.tracing.spans import Span, spans_of
from gateway.tracing.tracer import Kept
from springtide.config import TracingConfig
from springtide.errors import ConfigError
from springtide.telemetry import FewWarnings

logger = logging.getLogger(__name__)

DEFAULT_RATIO = 0.1
MOST_WAITING = 512
"""Traces. One is dropped when there are more."""
MOST_AT_ONCE = 16
"""Traces in one message: to make one holds up the event loop as little as that takes."""
CLOSE_S = 0.5
"""The end of the process waits so long for what is not sent yet, and half of that for either of what is around it."""
_ALWAYS = {"always_on": 1.0, "parentbased_always_on": 1.0, "always_off": 0.0, "parentbased_always_off": 0.0}


@dataclass(frozen=True, slots=True)
class Destination:
    """Where traces go, and the share of them that does in any case."""

    url: str
    ratio: float

    @classmethod
    def of(cls, config: TracingConfig, environ: Mapping[str, str]) -> Destination | None:
        """As the configuration says and, where it does not, OpenTelemetry's own variables; None: nowhere. Raises ConfigError, naming the
        setting or the variable."""
        url = destination("traces", "tracing.endpoint", config.endpoint, environ)
        return None if url is None else cls(url, _ratio(config, environ))


def _ratio(config: TracingConfig, environ: Mapping[str, str]) -> float:
    if config.ratio is not None:
        return config.ratio
    if (sampler := environ.get("OTEL_TRACES_SAMPLER", "")) in _ALWAYS:
        return _ALWAYS[sampler]
    said = environ.get("OTEL_TRACES_SAMPLER_ARG")
    if not said:
        return DEFAULT_RATIO
    with contextlib.suppress(ValueError):
        if 0 <= (ratio := float(said)) <= 1:
            return ratio
    raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG must be between 0 and 1, not {said!r}")


class TraceExporter:
    """The thread that makes the spans of traces that are kept, and sends them."""

    def __init__(self, url: str, instance_id: str) -> None:
        """Raises ConfigError without OpenTelemetry's packages."""
        with opentelemetry_for("traces"):
            from gateway.tracing.sdk import Sdk
        self._sdk = Sdk(url, instance_id)
        self._url = url
        self._warnings = FewWarnings(logger)
        self._waiting: queue.Queue[tuple[RequestTrace, Kept] | None] = queue.Queue(MOST_WAITING)
        """None: there will be no more."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def put(self, trace: RequestTrace, why: Kept) -> None:
        """Has it sent, some time. Nobody changes it any more."""
        metrics.TRACES.labels(why.value).inc()
        try:
            self._waiting.put_nowait((trace, why))
        except queue.Full:
            metrics.DROPPED_TRACES.inc()

    def close(self) -> None:
        """Sends what waits, as far as that can be done soon. Blocks meanwhile."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_S / 2)
        self._thread.join(CLOSE_S)
        self._closing.set()
        self._sdk.close()
        self._thread.join(CLOSE_S / 2)

    def _run(self) -> None:
        more = True
        while more and not self._closing.is_set():
            batch, more = self._next()
            try:
                spans = [(trace, spans_of(trace, why)) for trace, why in batch]
            except Exception:
                logger.exception("the spans of a trace cannot be made")
                metrics.DROPPED_TRACES.inc(len(batch))
            else:
                self._send(spans)

    def _next(self) -> tuple[list[tuple[RequestTrace, Kept]], bool]:
        """What waits, at least one if there will be one; and whether there will be more."""
        batch = []
        waiting = self._waiting.get()
        while waiting is not None:
            batch.append(waiting)
            if len(batch) == MOST_AT_ONCE:
                return batch, True
            try:
                waiting = self._waiting.get_nowait()
            except queue.Empty:
                return batch, True
        return batch, False

    def _send(self, traces: Sequence[tuple[RequestTrace, Sequence[Span]]]) -> None:
        num_spans = sum(len(spans) for _, spans in traces)
        if not num_spans:
            return
        if self._sdk.sent(traces):
            metrics.SENT_SPANS.inc(num_spans)
        else:
            metrics.DROPPED_TRACES.inc(len(traces))
            if not self._closing.is_set():
                self._warnings.warn("%d spans of %d traces could not be sent to %s", num_spans, len(traces), self._url)
