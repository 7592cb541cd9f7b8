"""OpenTelemetry's metrics of servers of generative AI (semantic-conventions-genai, `gen_ai.server.*`), sent by OTLP over HTTP from a thread
of its SDK. They are sums since the start: a collector that was away misses nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from gateway import events as ev
from gateway.collector import SERVICE_NAME, destination, forgiving_variables, opentelemetry_for, resource
from gateway.objectives import Latencies
from gateway.tracing.spans import PROVIDER
from springtide import __version__
from springtide.config import MetricsConfig

logger = logging.getLogger(__name__)

# As the conventions want them.
TTFT_BOUNDS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TIME_PER_TOKEN_BOUNDS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_BOUNDS_S = tuple(0.01 * 2**power for power in range(14))
_CLOSE_MS = 500.0


class GenAiMetrics:
    """What is told of each generation that has ended. Used from the event loop."""

    def __init__(self, url: str, model: str, instance_id: str) -> None:
        """Raises ConfigError without OpenTelemetry's packages."""
        with opentelemetry_for("metrics by OTLP"):
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(url))
        self._provider = MeterProvider([reader], resource(instance_id), shutdown_on_exit=False)
        meter = self._provider.get_meter(SERVICE_NAME, __version__)

        def histogram(name: str, description: str, bounds_s: tuple[float, ...]) -> Any:
            return meter.create_histogram(f"gen_ai.server.{name}", "s", description, explicit_bucket_boundaries_advisory=bounds_s)

        self._ttft = histogram("time_to_first_token", "Time to the first token of generations that finished", TTFT_BOUNDS_S)
        self._per_token = histogram("time_per_output_token", "Mean time of each token after the first of these", TIME_PER_TOKEN_BOUNDS_S)
        self._duration = histogram("request.duration", "From a generation's arrival to its end", DURATION_BOUNDS_S)
        self._common = {"gen_ai.provider.name": PROVIDER, "gen_ai.request.model": model, "gen_ai.response.model": model}

    @classmethod
    def of(cls, config: MetricsConfig, environ: Mapping[str, str], model: str, instance_id: str) -> GenAiMetrics | None:
        """None where they go nowhere. Raises ConfigError for the setting."""
        with forgiving_variables(config.otlp_endpoint, "no metrics go out by OTLP"):
            if (url := destination("metrics", "metrics.otlp_endpoint", config.otlp_endpoint, environ)) is not None:
                told = cls(url, model, instance_id)
                logger.info("metrics of generations go to %s", url)
                return told
        return None

    def ended(
        self, operation: str, seen: Latencies, took_s: float, num_output_tokens: int, reply: ev.Finished | ev.Failed | ev.Cancelled
    ) -> None:
        """One of this operation has. One whose client went away tells nothing of the server."""
        if isinstance(reply, ev.Cancelled):
            return
        attributes = {**self._common, "gen_ai.operation.name": operation}
        if isinstance(reply, ev.Failed):
            self._duration.record(took_s, {**attributes, "error.type": reply.error.code or type(reply.error).__name__})
            return
        self._duration.record(took_s, attributes)
        if seen.ttft_s is not None:
            self._ttft.record(seen.ttft_s, attributes)
            if num_output_tokens > 1:
                self._per_token.record((took_s - seen.ttft_s) / (num_output_tokens - 1), attributes)

    def close(self) -> None:
        """Sends the last of them, as far as that can be done soon. Blocks meanwhile."""
        self._provider.shutdown(_CLOSE_MS)
