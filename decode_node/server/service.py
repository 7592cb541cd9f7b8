"""What is a decode node's own of the gRPC service of engines, and what it counts."""

from __future__ import annotations

import itertools
import logging

from decode_node import metrics
from decode_node.core.actions import RunStep
from decode_node.core.events import StepDone
from node_runtime.metrics import VllmMetrics
from node_runtime.servicer import EngineService
from springtide.protocol import wire
from springtide.protocol.instances import Load, Role
from springtide.protocol.outputs import DecodeUpdate, Failure, FailureCode
from springtide.protocol.starts import DecodeStart
from springtide.rpc import node_pb2_grpc

logger = logging.getLogger(__name__)

DECODE_SERVICE: EngineService[DecodeStart, DecodeUpdate] = EngineService(
    Role.DECODE,
    node_pb2_grpc.add_DecodeNodeServicer_to_server,
    wire.DECODE_COMMAND,
    wire.DECODE_UPDATE,
    failed=lambda failed: DecodeUpdate(failed=(failed,)),
    signs=lambda signs: DecodeUpdate(signs=signs),
)


class OutputCounters:
    """What happens to outputs, for the metrics."""

    def __init__(self, vllm: VllmMetrics) -> None:
        self._vllm = vllm

    def launched(self, run: RunStep) -> None:
        metrics.BATCH_SIZE.observe(len(run.rows))

    def stepped(self, done: StepDone) -> None:
        metrics.STEP_SECONDS.observe(done.elapsed_ms / 1000)
        if done.drafted:
            right = [0 if isinstance(tokens, Failure) else max(0, len(tokens) - 1) for tokens in done.sampled]
            metrics.FORETOLD.inc(sum(itertools.compress(right, done.foretold)))
            guesses = [not foretold for foretold in done.foretold]
            self._vllm.drafted(list(itertools.compress(done.drafted, guesses)), list(itertools.compress(right, guesses)))

    def computed(self, prompt_tokens: int) -> None:
        """So many tokens of prompts that are decoded here."""
        metrics.INLINED_TOKENS.inc(prompt_tokens)

    def doing(self, load: Load, slowdown: float) -> None:
        metrics.RUNNING.set(load.running)
        metrics.IDLE.set(load.idle.running)
        metrics.IDLE_SLOWDOWN.set(slowdown)
        metrics.WAITING.set(load.waiting)
        metrics.CONTEXT_TOKENS.set(load.tokens)

    def update(self, update: DecodeUpdate) -> None:
        """This is about to be sent to a gateway."""
        for done in update.prefilled:
            self._vllm.prefilled(done)
        self._vllm.sampled(update.outputs)
        metrics.INLINED.inc(len(update.prefilled))
        metrics.TOKENS.inc(sum(len(output.tokens) for output in update.outputs))
        for failed in update.failed:
            code = failed.failure.code
            logger.info("%s: %s", code.name, failed.failure.message, extra={"attempt_id": failed.attempt_id})
            metrics.FAILURES.labels(code.value).inc()
            self._vllm.failed(failed.attempt_id, code)
            metrics.PREEMPTIONS.inc(code is FailureCode.PREEMPTED)
            metrics.ADMISSION_REJECTIONS.inc(code is FailureCode.OVERLOADED)
