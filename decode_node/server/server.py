"""The server of a decode node."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial

from decode_node import metrics
from decode_node.core import DecodeCore
from decode_node.core.actions import LoadAhead, RunStep
from decode_node.core.events import Event, Loaded, StepDone, StepEvent, StepFailed
from decode_node.core.settings import DecodeSettings
from decode_node.server.loads import LoadsAhead
from decode_node.server.steps import StepRunner
from engine.sampling.grammars import Grammars
from engine.sampling.sampler import Sampler
from node_runtime.events import Start
from node_runtime.held_starts import when_compiled
from node_runtime.loading import Parts
from node_runtime.model_thread import Watchdog, longest_s, stalled_after_s
from node_runtime.server import EngineServer
from node_runtime.servicer import EngineService
from springtide.clock import Tick
from springtide.cost import DecodeCost
from springtide.process import end_process
from springtide.protocol import storage, wire
from springtide.protocol.instances import Role
from springtide.protocol.outputs import DecodeUpdate, FailureCode
from springtide.protocol.starts import DecodeStart
from springtide.rpc import node_pb2_grpc

logger = logging.getLogger(__name__)

INGEST_LEASES = 10
"""A prompt may take so many leases' time from its reservation to its last block: the prefill side's queue, its compute and the transfer."""

SLOT_WAIT_S = 10.0
"""Whoever waits longer for room is scheduled again, with its age: another node may have room by now."""

DECODE_SERVICE: EngineService[DecodeStart, DecodeUpdate] = EngineService(
    Role.DECODE,
    node_pb2_grpc.add_DecodeNodeServicer_to_server,
    wire.DECODE_COMMAND,
    wire.DECODE_UPDATE,
    failed=lambda failed: DecodeUpdate(failed=(failed,)),
    signs=lambda signs: DecodeUpdate(signs=signs),
)


class DecodeServer(EngineServer[DecodeStart, DecodeUpdate, StepEvent, RunStep | LoadAhead]):
    """The server: steps run on the model's thread, loads ahead of them beside it."""

    def __init__(self, parts: Parts, cost: DecodeCost, grammars: Grammars) -> None:
        config = parts.arguments.config
        settings = DecodeSettings(
            cost=cost,
            block_tokens=parts.runner.kv_spec.block_tokens,
            max_batch=config.decode_node.max_batch,
            eos_token_ids=parts.arguments.model_info.eos_token_ids,
            ingest_lease_s=INGEST_LEASES * config.kv.lease_s,
            slot_wait_s=SLOT_WAIT_S,
            overlap=config.decode_node.overlap,
            inline_tokens=config.decode_node.inline_tokens,
            loads_ahead=parts.runner.loads_ahead,
            answer_s=config.silence_s,
            idle_slowdown=config.slo.idle_slowdown,
        )
        self.core = DecodeCore(settings)
        super().__init__(DECODE_SERVICE, parts, self.core, grammars)
        self._steps = StepRunner(parts.runner, Sampler(parts.arguments.model_info, grammars).sample)
        self._watchdog = Watchdog(end_process)
        self._loads = LoadsAhead(parts.runner, parts.thread)

    async def close(self) -> None:
        self._watchdog.close()
        self._loads.close()
        await super().close()

    def on_notice(self, notice: storage.Notice) -> None:
        if isinstance(notice, storage.Ingested) and (grammar := self.core.grammar_of(notice.attempt_id)):
            compiled = self._grammars.prepare(grammar)
            if not compiled.done():
                # Until then it is in no step: the model's thread, and with it all others, would wait for that.
                when_compiled(compiled, lambda: self.tell(notice))
                return
        super().on_notice(notice)

    def samples_first(self, start: DecodeStart) -> bool:
        return start.inlined

    # ---- what the core decides ----

    def perform(self, action: RunStep | LoadAhead) -> None:
        match action:
            case RunStep():
                metrics.BATCH_SIZE.observe(len(action.rows))
                metrics.INLINED_TOKENS.inc(sum(len(row.prompt) for row in action.rows))
                if self.runner.keeps_pages:
                    for row in action.rows:
                        self.note_slots(row.attempt_id, row.slots)
                predicted_ms = self.core.cost.predict_ms(action.num_tokens, action.context_tokens)
                self.thread.run(self._run_step, action, predicted_ms).add_done_callback(partial(self._step_ended, action.step_id))
            case LoadAhead():
                self._load_ahead(action)

    def _load_ahead(self, load: LoadAhead) -> None:
        link = self.link

        def still_there() -> bool:
            return link is not None and self.link is link

        self.note_slots(load.attempt_id, load.slots)
        self._loads.start(load.attempt_id, load.slots, still_there, lambda: self.tell(Loaded(load.attempt_id)))

    def _run_step(self, run: RunStep, predicted_ms: float) -> StepDone | StepFailed:
        stall_s = stalled_after_s(predicted_ms, self._arguments.config.silence_s)
        beside = self.neighbours.do_idle_work
        with self._watchdog.during(f"step {run.step_id}", longest_s(predicted_ms), stall_s):
            ended = self._steps.run(run)
        return replace(ended, beside_idle=beside) if isinstance(ended, StepDone) and beside == self.neighbours.do_idle_work else ended

    def _step_ended(self, step_id: int, ended: asyncio.Future[StepDone | StepFailed]) -> None:
        """Whatever has become of the step, the core hears of its end: it launches no other before, and nobody else would."""
        if ended.cancelled():
            return
        error = ended.exception()
        if error is not None:
            logger.error("step %d failed", step_id, exc_info=error)
        event = ended.result() if error is None else StepFailed(step_id, f"the step failed: {error!r}")
        if isinstance(event, StepDone):
            metrics.STEP_SECONDS.observe(event.elapsed_ms / 1000)
        self.tell(event)

    # ---- how it is doing ----

    @property
    def stalled_work(self) -> str:
        return self._watchdog.stalled

    def handled(self, event: Event) -> None:
        if isinstance(event, Start):
            self.vllm.started(event.start.request)
        elif isinstance(event, Tick):
            load = self.load()
            self.vllm.doing(load, self.num_held)
            metrics.RUNNING.set(load.running)
            metrics.IDLE.set(load.idle.running)
            metrics.IDLE_SLOWDOWN.set(self.core.slowdown)
            metrics.WAITING.set(load.waiting)
            metrics.CONTEXT_TOKENS.set(load.tokens)

    def count_update(self, update: DecodeUpdate) -> None:
        for done in update.prefilled:
            self.vllm.prefilled(done)
        self.vllm.sampled(update.outputs)
        metrics.INLINED.inc(len(update.prefilled))
        metrics.TOKENS.inc(sum(len(output.tokens) for output in update.outputs))
        for failed in update.failed:
            code = failed.failure.code
            logger.info("%s: %s", code.name, failed.failure.message, extra={"attempt_id": failed.attempt_id})
            metrics.FAILURES.labels(code.value).inc()
            self.vllm.failed(failed.attempt_id, code)
            metrics.PREEMPTIONS.inc(code is FailureCode.PREEMPTED)
            metrics.ADMISSION_REJECTIONS.inc(code is FailureCode.OVERLOADED)
