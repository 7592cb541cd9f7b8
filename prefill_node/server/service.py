"""What is a prefill node's own of the gRPC service of engines, and what it counts."""

from __future__ import annotations

import logging

from node_runtime.metrics import VllmMetrics
from node_runtime.servicer import EngineService
from prefill_node import metrics
from prefill_node.core.actions import RunPass
from prefill_node.core.layer_stream import LayerGroups
from prefill_node.core.settings import PrefillSettings
from prefill_node.server.transfers import PromptTransfers
from springtide.chunking import Chunking
from springtide.clock import Clock
from springtide.cost import PrefillCost
from springtide.process import ProcessArguments
from springtide.protocol import wire
from springtide.protocol.instances import Load, Role
from springtide.protocol.outputs import AttemptFailed, HandedOver, PrefillDone, PrefillUpdate
from springtide.protocol.starts import PrefillStart, Request
from springtide.rpc import node_pb2_grpc

logger = logging.getLogger(__name__)

PREFILL_SERVICE: EngineService[PrefillStart, PrefillUpdate] = EngineService(
    Role.PREFILL,
    node_pb2_grpc.add_PrefillNodeServicer_to_server,
    wire.PREFILL_COMMAND,
    wire.PREFILL_UPDATE,
    failed=lambda failed: failed,
    signs=lambda signs: signs,
)


def settings_of(arguments: ProcessArguments, cost: PrefillCost) -> PrefillSettings:
    """Of an engine of one stage."""
    config, info = arguments.config, arguments.model_info
    spec = info.kv_spec(config.dtype, config.kv.block_tokens)
    return PrefillSettings(
        chunking=Chunking(cost, config.prefill_node.chunk_tokens, config.prefill_node.chunk_ms),
        layer_groups=LayerGroups(spec.layers, spec.bytes_per_slab, config.kv.layer_group_size),
        block_tokens=spec.block_tokens,
        eos_token_ids=info.eos_token_ids,
        answer_s=config.silence_s,
        idle_slowdown=config.slo.idle_slowdown,
    )


class PromptCounters:
    """What happens to prompts, for the metrics and the log."""

    def __init__(self, vllm: VllmMetrics, clock: Clock) -> None:
        self._vllm = vllm
        self._clock = clock
        self._transfers = PromptTransfers()

    def started(self, request: Request) -> None:
        self._transfers.started(request)

    def launched(self, run: RunPass) -> None:
        metrics.PASS_TOKENS.observe(run.num_tokens)

    def passed(self, run: RunPass, elapsed_ms: float) -> None:
        metrics.PASS_SECONDS.observe(elapsed_ms / 1000)
        metrics.CHUNKS.inc(len(run.rows))
        metrics.TOKENS.inc(run.num_tokens)

    def doing(self, load: Load, slowdown: float) -> None:
        metrics.RUNNING.set(load.running)
        metrics.IDLE.set(load.idle.running)
        metrics.IDLE_SLOWDOWN.set(slowdown)
        metrics.WAITING.set(load.waiting)
        metrics.QUEUED_TOKENS.set(load.tokens)
        metrics.QUEUE_SECONDS.set(load.queue_ms / 1000)
        self._transfers.keep(load.attempt_ids)

    def handed_over(self, handed_over: HandedOver) -> None:
        metrics.HAND_OVER_BYTES.inc(handed_over.num_bytes)
        self._transfers.handed_over(handed_over, self._clock.now())

    def update(self, update: PrefillUpdate) -> None:
        """This is about to be sent to a gateway."""
        match update:
            case AttemptFailed(attempt_id, failure):
                logger.info("%s: %s", failure.code.name, failure.message, extra={"attempt_id": attempt_id})
                metrics.FAILURES.labels(failure.code.value).inc()
                self._vllm.failed(attempt_id, failure.code)
            case PrefillDone():
                self._transfers.computed(update, self._clock.now())
                self._vllm.prefilled(update)
                metrics.QUEUE_WAIT_SECONDS.observe(update.queue_ms / 1000)
                metrics.CACHED_TOKENS.labels("local").inc(update.cached_tokens - update.remote_tokens)
                metrics.CACHED_TOKENS.labels("fetched").inc(update.remote_tokens)
