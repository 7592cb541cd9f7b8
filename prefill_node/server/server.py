"""The server of a prefill group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from engine.profiling import measure_prefill
from engine.runner import ModelRunner
from node_runtime import storage
from node_runtime.events import Tick
from node_runtime.node import EngineNode
from node_runtime.process import Kind, Parts
from node_runtime.requests import Request
from prefill_node import metrics
from prefill_node.core import PrefillCore
from prefill_node.core.actions import Action, Reply, RunPass
from prefill_node.core.events import PassDone, PassFailed, PassInterrupted, Start
from prefill_node.core.pushing import LayerGroups
from prefill_node.core.schedule import Policy
from prefill_node.server.passes import run_pass
from springtide.cost import PrefillCost
from springtide.process import ProcessArguments
from springtide.rpc import common_pb2, node_pb2, node_pb2_grpc

logger = logging.getLogger(__name__)

MEASURE_BUDGET_S = 2.0


def kind(arguments: ProcessArguments) -> Kind[PrefillCost]:
    config = arguments.config.prefill_node

    def measure(runner: ModelRunner, scratch: Sequence[int]) -> PrefillCost:
        return PrefillCost.fit(measure_prefill(runner, scratch, config.chunk_tokens, MEASURE_BUDGET_S))

    return Kind("prefill", config.threads, PrefillCost, measure, PrefillServer)


class PrefillServer(EngineNode[Action, node_pb2.PrefillStart, node_pb2.PrefillUpdate], node_pb2_grpc.PrefillNodeServicer):
    def __init__(self, parts: Parts, cost: PrefillCost) -> None:
        arguments, spec = parts.arguments, parts.runner.kv_spec
        config = arguments.config
        self.core = PrefillCore(
            Policy(cost, config.prefill_node.chunk_tokens),
            LayerGroups(spec.layers, spec.bytes_per_slab, config.kv.layer_group_size),
            spec.block_tokens,
            arguments.model_info.eos_token_ids,
        )
        super().__init__("prefill", self.core, arguments.model_info, parts.runner, parts.thread, parts.clock)
        self._arguments = arguments
        self._first_token_at: dict[str, float] = {}
        """Of attempts whose hand-over is under way."""

    def register(self, server: grpc.aio.Server) -> None:
        node_pb2_grpc.add_PrefillNodeServicer_to_server(self, server)

    async def Session(
        self, request_iterator: AsyncIterator[node_pb2.PrefillCommand], context: Any
    ) -> AsyncIterator[node_pb2.PrefillUpdate]:
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
            case RunPass():
                self._launch(action)
            case Reply(session, update):
                self._count_reply(update)
                self.sessions.send(session, update)

    def _launch(self, run: RunPass) -> None:
        if self.link is None:
            # Lost already; the core will hear of it by the event that follows.
            self.tell(PassFailed(run.pass_id, "the node's store is away"))
            return
        timeout_s = self._arguments.config.kv.lease_s
        metrics.PASS_TOKENS.observe(sum(len(row.chunk.token_ids) for row in run.rows))
        self.thread.run(run_pass, self.runner, self.link, run, timeout_s).add_done_callback(lambda ended: self._pass_ended(run, ended))

    def _pass_ended(self, run: RunPass, ended: asyncio.Future[PassDone | PassInterrupted | PassFailed]) -> None:
        if ended.cancelled():
            return
        event = ended.result()
        if isinstance(event, PassDone):
            metrics.PASS_SECONDS.observe(event.elapsed_ms / 1000)
            metrics.CHUNKS.inc(len(run.rows))
            metrics.TOKENS.inc(sum(len(row.chunk.token_ids) for row in run.rows))
        self.tell(event)

    def start_event(self, session: int, start: node_pb2.PrefillStart, request: Request) -> Start:
        return Start(
            session=session,
            request=request,
            decode_store_address=start.decode_store_address,
            decode_store_node_id=start.decode_store_node_id,
            ttft_budget_ms=start.ttft_budget_ms,
            sources=tuple(start.sources),
        )

    def failed_update(self, output: common_pb2.TokenOutput) -> node_pb2.PrefillUpdate:
        return node_pb2.PrefillUpdate(failed=output)

    # ---- how it is doing ----

    def report(self) -> node_pb2.LoadReport:
        load = self.core.load()
        cost = self.core.cost
        return node_pb2.LoadReport(
            instance_id=self._arguments.instance_id,
            node_id=self._arguments.node_id,
            running=load.running,
            waiting=load.waiting,
            tokens=load.tokens,
            queue_ms=load.queue_ms,
            cost=node_pb2.CostModel(prefill=[cost.fixed_ms, cost.per_token_ms, cost.per_pair_ms]),
            attempt_ids=load.attempt_ids,
        )

    def handled(self, event: Any) -> None:
        match event:
            case Tick():
                load = self.core.load()
                metrics.RUNNING.set(load.running)
                metrics.WAITING.set(load.waiting)
                metrics.QUEUE_SECONDS.set(load.queue_ms / 1000)
                self._first_token_at = {name: self._first_token_at[name] for name in load.attempt_ids if name in self._first_token_at}
            case storage.HandedOver(attempt_id, num_bytes):
                metrics.HAND_OVER_BYTES.inc(num_bytes)
                if (first_token_at := self._first_token_at.pop(attempt_id, None)) is not None:
                    metrics.HAND_OVER_TAIL_SECONDS.observe(self._clock.now() - first_token_at)

    def _count_reply(self, update: node_pb2.PrefillUpdate) -> None:
        if update.HasField("failed"):
            failure = update.failed.failure
            code = common_pb2.FailureCode.Name(failure.code)
            logger.info("%s: %s", code, failure.message, extra={"attempt_id": update.failed.attempt_id})
            metrics.FAILURES.labels(code).inc()
            return
        done = update.done
        self._first_token_at[done.output.attempt_id] = self._clock.now()
        metrics.QUEUE_WAIT_SECONDS.observe(done.queue_ms / 1000)
        metrics.CACHED_TOKENS.labels("local").inc(done.cached_tokens - done.remote_tokens)
        metrics.CACHED_TOKENS.labels("remote").inc(done.remote_tokens)
