"""The server of a decode node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import grpc.aio

from decode_node import metrics
from decode_node.core import DecodeCore
from decode_node.core.actions import Action, LoadAhead, Reply, RunStep
from decode_node.core.events import Loaded, Start, StepDone, StepFailed
from decode_node.core.settings import Settings
from decode_node.server.loads import LoadsAhead
from decode_node.server.steps import StepRunner
from engine.profiling import measure_decode
from engine.runner import ModelRunner
from node_runtime.node import EngineNode
from node_runtime.process import Kind, Parts
from node_runtime.watchdog import Watchdog, longest_s, stalled_after_s
from springtide.clock import Tick
from springtide.cost import DecodeCost
from springtide.process import ProcessArguments, end_process
from springtide.protocol import wire
from springtide.protocol.instances import Load, Role
from springtide.protocol.outputs import AttemptFailed, AttemptSigns, DecodeUpdate, FailureCode
from springtide.protocol.starts import DecodeStart
from springtide.rpc import node_pb2, node_pb2_grpc

logger = logging.getLogger(__name__)

INGEST_LEASES = 10
"""A prompt may take so many leases' time from its reservation to its last block: the prefill side's queue, its compute and the transfer."""

SLOT_WAIT_S = 10.0
"""Whoever waits longer for room is scheduled again, with its age: another node may have room by now."""
MEASURE_BUDGET_S = 2.0


def kind(arguments: ProcessArguments) -> Kind[DecodeCost]:
    config = arguments.config.decode_node

    def measure(runner: ModelRunner, scratch: Sequence[int]) -> DecodeCost:
        return DecodeCost.fit(measure_decode(runner, scratch, config.max_batch, MEASURE_BUDGET_S))

    return Kind(Role.DECODE, config.threads, DecodeCost, measure, DecodeServer)


class DecodeServer(EngineNode[Action, DecodeStart, DecodeUpdate], node_pb2_grpc.DecodeNodeServicer):
    def __init__(self, parts: Parts, cost: DecodeCost) -> None:
        arguments = parts.arguments
        config = arguments.config
        self.core = DecodeCore(
            Settings(
                cost=cost,
                block_tokens=parts.runner.kv_spec.block_tokens,
                max_batch=config.decode_node.max_batch,
                eos_token_ids=arguments.model_info.eos_token_ids,
                ingest_lease_s=INGEST_LEASES * config.kv.lease_s,
                slot_wait_s=SLOT_WAIT_S,
                overlap=config.decode_node.overlap,
                inline_tokens=config.decode_node.inline_tokens,
                loads_ahead=parts.runner.loads_ahead,
                answer_s=config.silence_s,
            )
        )
        super().__init__(
            Role.DECODE, wire.DECODE_COMMAND, wire.DECODE_UPDATE, arguments, self.core, parts.runner, parts.thread, parts.clock
        )
        self._steps = StepRunner(parts.runner)
        self._watchdog = Watchdog(end_process)
        self._loads = LoadsAhead(parts.runner, parts.thread)

    def register(self, server: grpc.aio.Server) -> None:
        node_pb2_grpc.add_DecodeNodeServicer_to_server(self, server)

    async def Session(self, request_iterator: AsyncIterator[node_pb2.DecodeCommand], context: Any) -> AsyncIterator[node_pb2.DecodeUpdate]:
        async for update in self.session(request_iterator):
            yield update

    async def WatchLoad(self, request: node_pb2.WatchLoadRequest, context: Any) -> AsyncIterator[node_pb2.LoadReport]:
        async for report in self.watch_load():
            yield report

    async def SwitchRole(self, request: node_pb2.SwitchRoleRequest, context: Any) -> node_pb2.SwitchRoleReply:
        return await self.switch_role(request, context)

    # ---- what the core decides ----

    def perform(self, action: Action) -> None:
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
            case Reply(session, update):
                self._count(update)
                self.sessions.send(session, update)

    def _load_ahead(self, load: LoadAhead) -> None:
        link = self.link

        def still_there() -> bool:
            return link is not None and self.link is link

        self.note_slots(load.attempt_id, load.slots)
        self._loads.start(load.attempt_id, load.slots, still_there, lambda: self.tell(Loaded(load.attempt_id)))

    def _run_step(self, run: RunStep, predicted_ms: float) -> StepDone | StepFailed:
        stall_s = stalled_after_s(predicted_ms, self._arguments.config.silence_s)
        with self._watchdog.during(f"step {run.step_id}", longest_s(predicted_ms), stall_s):
            return self._steps.run(run)

    async def close(self) -> None:
        self._watchdog.close()
        self._loads.close()
        await super().close()

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

    def start_event(self, session: int, start: DecodeStart) -> Start:
        return Start(session, start)

    def failed_update(self, failed: AttemptFailed) -> DecodeUpdate:
        return DecodeUpdate(failed=(failed,))

    def signs_update(self, signs: AttemptSigns) -> DecodeUpdate:
        return DecodeUpdate(signs=signs)

    # ---- how it is doing ----

    @property
    def stalled_work(self) -> str:
        return self._watchdog.stalled

    def work(self) -> Load:
        return self.core.load()

    def handled(self, event: Any) -> None:
        if isinstance(event, Tick):
            load = self.core.load()
            metrics.RUNNING.set(load.running)
            metrics.WAITING.set(load.waiting)
            metrics.CONTEXT_TOKENS.set(load.tokens)

    def _count(self, update: DecodeUpdate) -> None:
        metrics.INLINED.inc(len(update.prefilled))
        metrics.TOKENS.inc(sum(len(output.tokens) for output in update.outputs))
        for failed in update.failed:
            code = failed.failure.code
            logger.info("%s: %s", code.name, failed.failure.message, extra={"attempt_id": failed.attempt_id})
            metrics.FAILURES.labels(code.value).inc()
            metrics.PREEMPTIONS.inc(code is FailureCode.PREEMPTED)
            metrics.DOOR_REJECTIONS.inc(code is FailureCode.OVERLOADED)
