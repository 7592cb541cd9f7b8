"""The Conductor's gRPC service for people who watch. What is made for one gateway is given to all that ask within a second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import replace
from itertools import chain

import grpc.aio

from conductor.core.observation import observed_pool, observed_work
from conductor.core.pool_balance import PoolLoads
from conductor.server.grpc_service import cluster_status
from conductor.server.leadership import Leadership
from conductor.server.runner import CoreRunner
from springtide.protocol import wire
from springtide.protocol.observation import DecisionTable, HistoryTable, ObservedPart, Overview
from springtide.rpc import observation_pb2, observation_pb2_grpc
from springtide.slices import slices

WORK_EVERY_S, POOL_EVERY_S = 0.9, 5.0
_MOST_DECISIONS = 256
"""Placements, and as many refusals."""
_DECISIONS_AT_ONCE, _BUCKETS_AT_ONCE = 32, 60

Messages = list[observation_pb2.ObservedPart]


class ObserverService(observation_pb2_grpc.ObserverServicer):
    """Between two parts of an answer everybody else has a turn."""

    def __init__(self, runner: CoreRunner, leadership: Leadership, model_name: str, history_id: int) -> None:
        """`history_id`: of this life of the Conductor."""
        self._runner = runner
        self._leadership = leadership
        self._model_name = model_name
        self._history_id = history_id
        self._making = asyncio.Lock()
        self._overview: Overview | None = None
        self._work: Messages = []
        self._pool: Messages = []
        self._work_at = self._pool_at = float("-inf")

    async def Observe(
        self,
        request: observation_pb2.ObserveRequest,
        context: grpc.aio.ServicerContext[observation_pb2.ObserveRequest, observation_pb2.ObservedPart],
    ) -> AsyncIterator[observation_pb2.ObservedPart]:
        asked = wire.OBSERVE.decode(request)
        version, bucket = (asked.version, asked.bucket) if asked.history == self._history_id else (0, 0)
        work, pool = await self._current()
        history, now = self._runner.history, self._runner.clock.now()
        assert self._overview is not None, "it is made with the work"
        yield wire.OBSERVED_PART.encode(replace(self._overview, now=now, version=history.version))
        decisions = history.changed_since(version, _MOST_DECISIONS)
        for some in slices(decisions, _DECISIONS_AT_ONCE):
            yield wire.OBSERVED_PART.encode(DecisionTable(tuple(some)))
        buckets = history.hour.since(bucket, now)
        for latest in slices(buckets, _BUCKETS_AT_ONCE):
            yield wire.OBSERVED_PART.encode(HistoryTable(tuple(latest)))
        for part in chain(work, pool):
            yield part

    async def Explain(
        self,
        request: observation_pb2.ExplainRequest,
        context: grpc.aio.ServicerContext[observation_pb2.ExplainRequest, observation_pb2.Explanation],
    ) -> observation_pb2.Explanation:
        return wire.EXPLANATION.encode(self._runner.history.explanation(wire.EXPLAIN.decode(request).id, self._runner.clock.now()))

    async def _current(self) -> tuple[Messages, Messages]:
        """Work and pool."""
        turns = self._runner.turns
        async with self._making:
            now = self._runner.clock.now()
            if now - self._work_at >= WORK_EVERY_S:
                loads = await turns.begin(self._runner.core.pool_loads(now))
                self._overview = self._seen(loads, now)
                self._work, self._work_at = await turns.begin(_made(observed_work(self._runner.core, loads, now))), now
            if now - self._pool_at >= POOL_EVERY_S:
                self._pool, self._pool_at = await turns.begin(_made(observed_pool(self._runner.core, now))), now
            return self._work, self._pool

    def _seen(self, loads: PoolLoads, now: float) -> Overview:
        core, settings = self._runner.core, self._runner.core.settings
        return Overview(
            now=now,
            status=cluster_status(core, loads, self._model_name, self._leadership.standing(), now),
            history=self._history_id,
            version=self._runner.history.version,
            attempts_in_prefill=len(core.state.in_prefill),
            ttft_slo_ms=settings.ttft_slo_ms,
            tbt_slo_ms=settings.tbt_slo_ms,
            block_tokens=settings.block_tokens,
            bytes_per_block=settings.bytes_per_block,
            policy=settings.policy,
            admission=settings.admission,
        )


def _made(parts: Iterator[ObservedPart | None]) -> Generator[None, None, Messages]:
    made: Messages = []
    for part in parts:
        if part is not None:
            made.append(wire.OBSERVED_PART.encode(part))
        yield
    return made


def sample_loads(runner: CoreRunner) -> Generator[None, None, None]:
    """Notes for the last hour, in parts, how loaded the pools are."""
    now = runner.clock.now()
    loads = yield from runner.core.pool_loads(now)
    runner.history.sample(loads.prefill, loads.decode, len(runner.core.state.attempts), now)
