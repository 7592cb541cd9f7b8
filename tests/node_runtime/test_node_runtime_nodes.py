"""Prefill and decode nodes with their real stores, models and sessions."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from decode_node.server.steps import StepRunner
from engine.sampling.grammars import Grammars
from messenger.tcp.transport import TcpTransport
from mixed_node.server.server import MixedServer
from node_runtime import neighbours
from node_runtime.loading import Parts
from node_runtime.model_thread import ModelThread
from node_runtime.neighbours import Neighbours
from prefill_node.core.actions import RunPass
from prefill_node.core.events import PassFailed, PassGaveWay
from prefill_node.server import formation
from prefill_node.server.group import StageGroup
from prefill_node.server.server import PrefillServer
from springtide.clock import MonotonicClock
from springtide.cost import DecodeCost, PrefillCost
from springtide.ids import AttemptId, Slot
from springtide.protocol import storage, wire
from springtide.protocol.outputs import FailureCode, Finish
from springtide.protocol.sampling import SamplingParams
from springtide.rpc import node_pb2
from tests.support.engine_nodes import WAIT_S, DirectEngine, EngineNodes
from tests.support.faulty_transport import FaultyTransport
from tests.support.models import make_tiny_llama
from tests.support.transport_faults import FaultPlan, TransferFault
from tests.support.waiting import until

BLOCK_TOKENS = 16
KV = {"block_tokens": BLOCK_TOKENS, "arena_size": "8MiB", "layer_group_size": 16 << 10}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_llama(path)
    yield path


@pytest.fixture
async def nodes(tmp_path: Path, model: Path) -> AsyncIterator[EngineNodes]:
    async with EngineNodes(tmp_path, model, prefill=2, decode=1, kv=KV, prefill_node={"chunk_tokens": 64}) as running:
        yield running


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{length}/{seed}")
    return [draw.randrange(10, 250) for _ in range(length)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


async def test_tokens_are_those_of_the_engine_alone(nodes: EngineNodes) -> None:
    direct = DirectEngine(nodes)
    prompts = [prompt(length) for length in (1, 15, 16, 17, 64, 65, 200, 333)]
    outcomes = await asyncio.gather(*(nodes.gateway.run(token_ids, greedy(40)) for token_ids in prompts))
    for token_ids, outcome in zip(prompts, outcomes, strict=True):
        assert outcome.token_ids == direct.generate(token_ids, greedy(40)), f"{len(token_ids)} tokens, {outcome}"
        assert outcome.finish == Finish.LENGTH
    await nodes.all_slots_given_back()


async def test_a_prefix_is_reused_here_and_from_another_node(nodes: EngineNodes) -> None:
    token_ids = prompt(333)
    cold = await nodes.gateway.run(token_ids, greedy(8))
    local = await nodes.gateway.run(token_ids, greedy(8))
    remote = await nodes.gateway.run(token_ids, greedy(8), on=("prefill-1", "decode-0"), source="prefill-0")
    assert cold.done and local.done and remote.done
    assert (cold.done.cached_tokens, cold.done.remote_tokens) == (0, 0)
    assert (local.done.cached_tokens, local.done.remote_tokens) == (320, 0)
    assert (remote.done.cached_tokens, remote.done.remote_tokens) == (320, 320)
    assert cold.token_ids == local.token_ids == remote.token_ids
    await nodes.all_slots_given_back()


async def test_the_model_does_not_wait_for_a_link_that_stands_still(tmp_path: Path, model: Path) -> None:
    """The first token is out before a byte of the prompt has gone over; then it goes in a few large units."""
    plan = FaultPlan([TransferFault("stand", "write", times=1), TransferFault("slow", "write", bytes_per_s=1e12)])
    plan.armed = False
    slow_link = lambda name, arena: FaultyTransport(TcpTransport(), plan)  # noqa: E731
    kv = {**KV, "transports": ["tcp"]}
    async with EngineNodes(
        tmp_path, model, make_transport=slow_link, prefill=1, decode=1, kv=kv, prefill_node={"chunk_tokens": 64}
    ) as nodes:
        plan.armed = True  # now that the stores have tested themselves
        token_ids, spec = prompt(640), nodes.info.kv_spec("float32", BLOCK_TOKENS)
        attempt_id = await nodes.gateway.start(token_ids, greedy(8))
        outcome = nodes.gateway.outcomes[attempt_id]
        await until(lambda: outcome.done is not None or outcome.failures)
        assert outcome.done is not None
        assert nodes.stores["prefill-0"].shared.bytes_written == 0
        plan.go_on()
        await nodes.gateway.end_of(attempt_id)
        assert outcome.token_ids == DirectEngine(nodes).generate(token_ids, greedy(8))
        assert nodes.stores["prefill-0"].shared.bytes_written == 40 * spec.bytes_per_slot
        units = (plan.struck["slow"] - 1) // 2  # each is followed by its notice, and all by the seal
        assert units <= 4, "the one that was under way, and those that had piled up behind it"
        await nodes.all_slots_given_back()


async def test_blocks_of_the_output_are_found_by_the_next_turn(nodes: EngineNodes) -> None:
    first = await nodes.gateway.run(prompt(40), greedy(61))
    turn = [*prompt(40), *first.token_ids, 11, 12, 13]
    second = await nodes.gateway.run(turn, greedy(4), source="decode-0")
    assert second.done is not None and second.done.cached_tokens == 96
    assert second.token_ids == DirectEngine(nodes).generate(turn, greedy(4))


async def test_a_continued_attempt_goes_on_exactly_where_the_last_one_was(nodes: EngineNodes) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=24, repetition_penalty=1.2, ignore_eos=True, logprobs=1)
    whole = await nodes.gateway.run(prompt(70), params)
    continued = await nodes.gateway.run([*prompt(70), *whole.token_ids[:9]], params, num_prompt_tokens=70)
    assert whole.token_ids == DirectEngine(nodes).generate(prompt(70), params)
    assert continued.done and continued.done.output.position == 9
    assert continued.token_ids == whole.token_ids[9:]


async def test_a_request_for_one_token_ends_at_the_prefill_side(nodes: EngineNodes) -> None:
    outcome = await nodes.gateway.run(prompt(50), greedy(1))
    assert outcome.finish == Finish.LENGTH and len(outcome.token_ids) == 1
    await nodes.all_slots_given_back()


async def test_an_abort_gives_every_slot_back(nodes: EngineNodes) -> None:
    attempts = [await nodes.gateway.start(prompt(100, seed), greedy(2000)) for seed in range(4)]
    await until(lambda: len(nodes.gateway.outcomes[attempts[0]].token_ids) > 5)
    for attempt_id in attempts:
        await nodes.gateway.abort(attempt_id)
    await nodes.all_slots_given_back()
    assert not any(nodes.gateway.outcomes[attempt_id].ended for attempt_id in attempts)


async def test_a_session_that_ends_gives_every_slot_back(nodes: EngineNodes) -> None:
    attempt_id = await nodes.gateway.start(prompt(100), greedy(2000))
    await until(lambda: nodes.gateway.outcomes[attempt_id].token_ids)
    await nodes.gateway.end_session("decode-0")
    await nodes.gateway.end_session("prefill-0")
    await nodes.all_slots_given_back()


async def test_an_attempt_that_cannot_be_is_refused_with_the_field(nodes: EngineNodes) -> None:
    outcome = await nodes.gateway.run([999_999], greedy(4))
    assert outcome.failures[0].code == FailureCode.INVALID and "token_ids" in outcome.failures[0].message


async def test_the_admission_check_refuses_an_objective_that_cannot_be_met(nodes: EngineNodes) -> None:
    attempt_id = await nodes.gateway.start(prompt(20), greedy(4), tbt_slo_ms=1e-6)
    outcome = await nodes.gateway.end_of(attempt_id)
    assert outcome.failures[0].code == FailureCode.OVERLOADED
    await nodes.gateway.abort(attempt_id)
    await nodes.all_slots_given_back()


async def test_a_lost_store_fails_its_attempts_and_the_engine_comes_back_with_a_new_one(nodes: EngineNodes) -> None:
    before = nodes.members["decode-0"].incarnation
    attempt_id = await nodes.gateway.start(prompt(60), greedy(2000))
    await until(lambda: len(nodes.gateway.outcomes[attempt_id].token_ids) > 3)
    await nodes.stores["decode-0"].close()
    outcome = await nodes.gateway.end_of(attempt_id)
    assert outcome.failures[0].code == FailureCode.PEER_LOST
    await nodes.start_store("decode-0")
    nodes.members["decode-0"] = await nodes.member("decode-0", other_than=before)
    again = await nodes.gateway.run(prompt(60), greedy(8))
    assert again.token_ids == DirectEngine(nodes).generate(prompt(60), greedy(8))


async def test_an_engine_that_ends_tells_gateways_before_whoever_it_hands_over_to_hears_of_it(nodes: EngineNodes) -> None:
    attempt_id = await nodes.gateway.start(prompt(2000), greedy(4))
    await until(lambda: nodes.stores["decode-0"].pool.counts().ingests == 1)
    nodes.stop_engine("prefill-0")
    await nodes.gateway.session("prefill-0").over()
    assert nodes.gateway.outcomes[attempt_id].failures == []
    outcome = await nodes.gateway.end_of(attempt_id)
    assert outcome.failures[0].code == FailureCode.ABORTED


async def test_a_store_that_breaks_over_a_command_ends_the_stream_instead_of_leaving_its_engine_waiting(
    nodes: EngineNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise AssertionError("an invariant does not hold")

    before = nodes.members["decode-0"].incarnation
    with monkeypatch.context() as patched:
        patched.setattr(nodes.stores["decode-0"].pool, "reserve", broken)
        attempt_id = await nodes.gateway.start(prompt(60), greedy(8))
        outcome = await nodes.gateway.end_of(attempt_id)
    await nodes.gateway.abort(attempt_id)
    assert outcome.failures[0].code == FailureCode.PEER_LOST
    nodes.members["decode-0"] = await nodes.member("decode-0", other_than=before)
    again = await nodes.gateway.run(prompt(60), greedy(8))
    assert again.token_ids == DirectEngine(nodes).generate(prompt(60), greedy(8))
    await nodes.all_slots_given_back()


async def test_a_pass_that_is_decided_just_when_the_store_is_lost_fails(nodes: EngineNodes) -> None:
    heard: list[Any] = []

    class Server(PrefillServer):
        def tell(self, event: Any) -> None:
            heard.append(event)

    runner, thread, arguments = DirectEngine(nodes).runner, ModelThread(1), nodes.arguments("prefill-0")
    group = StageGroup(arguments, thread)
    server = Server(Parts(arguments, runner, thread, MonotonicClock()), PrefillCost(1.0, 1.0, 0.0), group)
    server.perform(RunPass(7, (), ()))
    await group.close()
    await thread.close()
    assert heard == [PassFailed(7, "the node's store is away")]


async def test_slots_that_were_promised_are_taken_before_the_store_tells_of_it(nodes: EngineNodes) -> None:
    thread = ModelThread(1)
    arguments, runner = nodes.arguments("decode-0"), DirectEngine(nodes).runner
    parts, costs = Parts(arguments, runner, thread, MonotonicClock()), (PrefillCost(1.0, 1.0, 0.0), DecodeCost(1.0, 1.0, 0.0))
    server = MixedServer(parts, costs, Grammars(arguments.model_info), {})
    server.on_notice(storage.StoreLoad(4, 9))
    server.on_notice(storage.Reserved(AttemptId("a"), (Slot(1), Slot(2), Slot(3)), 0))
    server.on_notice(storage.Grown(AttemptId("a"), (Slot(4),)))
    assert server.load_report().load.slots_available == 5
    server.on_notice(storage.Acquired(AttemptId("b"), tuple(map(Slot, range(6))), 2))
    assert server.load_report().load.slots_available == 0
    server.on_notice(storage.StoreLoad(1, 2))
    assert server.load_report().load.slots_available == 2
    await thread.close()


async def test_load_reports_tell_cost_slots_and_attempts(nodes: EngineNodes) -> None:
    watched = nodes.gateway.stub("decode-0").WatchLoad(node_pb2.WatchLoadRequest())
    first = wire.LOAD_REPORT.decode(await watched.read())
    assert first.instance_id == "decode-0" and first.incarnation == nodes.members["decode-0"].incarnation
    assert first.load.slots_total == nodes.stores["decode-0"].options.num_slots and first.load.decode_cost and first.load.max_batch == 64
    attempt_id = await nodes.gateway.start(prompt(30), greedy(2000))
    load = first.load
    while not load.running:
        load = wire.LOAD_REPORT.decode(await watched.read()).load
    assert load.attempt_ids == {attempt_id} and load.tokens > 30
    await nodes.gateway.abort(attempt_id)
    watched.cancel()


async def test_a_pool_that_is_too_small_for_all_serves_them_one_after_another(tmp_path: Path, model: Path) -> None:
    """The gateway's part: what was preempted or found no slot is scheduled again with what it has."""
    small = {**KV, "arena_size": "512KiB"}
    async with EngineNodes(tmp_path, model, kv=small, prefill_node={"chunk_tokens": 64}) as nodes:
        direct = DirectEngine(nodes)
        preempted = 0

        async def persist(token_ids: list[int]) -> list[int]:
            nonlocal preempted
            tokens: list[int] = []
            while True:
                outcome = await nodes.gateway.run([*token_ids, *tokens], greedy(120), num_prompt_tokens=len(token_ids), waits=True)
                tokens += outcome.token_ids
                if not outcome.failures:
                    return tokens
                assert {failure.code for failure in outcome.failures} <= {
                    FailureCode.PREEMPTED,
                    FailureCode.POOL_FULL,
                    FailureCode.ABORTED,
                }
                preempted += outcome.failures[0].code == FailureCode.PREEMPTED

        prompts = [prompt(70, seed) for seed in range(6)]
        results = await asyncio.gather(*(persist(token_ids) for token_ids in prompts))
        assert results == [direct.generate(token_ids, greedy(120)) for token_ids in prompts]
        assert preempted > 0
        await nodes.all_slots_given_back()


async def reports_until(nodes: EngineNodes, name: str, condition: Callable[[node_pb2.LoadReport], bool]) -> node_pb2.LoadReport:
    async with asyncio.timeout(WAIT_S):
        async for report in nodes.gateway.stub(name).WatchLoad(node_pb2.WatchLoadRequest()):
            if condition(report):
                return report
    raise AssertionError("the reports ended")


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_an_engine_whose_store_is_silent_offers_nothing_and_fails_what_asks_it(
    nodes: EngineNodes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = prompt(100)
    session = nodes.stores[name]._session
    assert session is not None
    with monkeypatch.context() as hung:
        hung.setattr(session, "notify", lambda notice: None)
        attempt_id = await nodes.gateway.start(token_ids, greedy(4))
        report = await reports_until(nodes, name, lambda report: report.load.slots_total == 0)
        assert not report.stalled, "it is not sure yet"
        await reports_until(nodes, name, lambda report: report.stalled == "its store is silent")
        outcome = await nodes.gateway.end_of(attempt_id)
        assert [failure.code for failure in outcome.failures] == [FailureCode.PEER_LOST]
        await nodes.gateway.abort(attempt_id)
    await reports_until(nodes, name, lambda report: not report.stalled and report.load.slots_total > 0)
    assert (await nodes.gateway.run(token_ids, greedy(4))).token_ids == DirectEngine(nodes).generate(token_ids, greedy(4))
    await nodes.all_slots_given_back()


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_an_engine_whose_model_thread_is_stuck_says_so_and_that_it_goes_on(
    nodes: EngineNodes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids, goes_on = prompt(100), threading.Event()
    where, what = (formation, "compute") if name == "prefill-0" else (StepRunner, "run")
    computes = getattr(where, what)

    def stuck(*arguments: Any) -> Any:
        goes_on.wait(WAIT_S)
        return computes(*arguments)

    monkeypatch.setattr(where, what, stuck)
    attempt_id = await nodes.gateway.start(token_ids, greedy(4))
    await reports_until(nodes, name, lambda report: "has not ended within" in report.stalled)
    goes_on.set()
    await reports_until(nodes, name, lambda report: not report.stalled)
    outcome = await nodes.gateway.end_of(attempt_id)
    assert outcome.token_ids == DirectEngine(nodes).generate(token_ids, greedy(4)), "a false alarm does no harm here"


async def test_idle_work_gives_way_to_whoever_comes_and_is_right_in_the_end(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gave_way, told = list[int](), PrefillServer._told

    def noted(self: PrefillServer, run: RunPass, event: Any) -> None:
        gave_way.extend([run.pass_id] if isinstance(event, PassGaveWay) else [])
        told(self, run, event)

    monkeypatch.setattr(PrefillServer, "_told", noted)
    async with EngineNodes(tmp_path, model, kv=KV, prefill_node={"chunk_tokens": 512}) as nodes:
        direct, gateway = DirectEngine(nodes), nodes.gateway
        patient = await gateway.start(prompt(1500), greedy(8), idle=True)
        number = 0
        while not gateway.outcomes[patient].ended and (not gave_way or number < 3):
            number += 1
            outcome = await gateway.run(prompt(70, number), greedy(2))
            assert outcome.token_ids == direct.generate(prompt(70, number), greedy(2))
        assert gave_way, "it ended before anybody could come"
        assert (await gateway.end_of(patient)).token_ids == direct.generate(prompt(1500), greedy(8))
        await nodes.all_slots_given_back()


async def test_idle_work_rests_while_another_engine_of_the_machine_wants_quiet(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "SHOWN_S", WAIT_S)
    neighbour = Neighbours(tmp_path, "decode-9")
    async with EngineNodes(tmp_path, model, kv=KV, prefill_node={"chunk_tokens": 64}) as nodes:
        direct, gateway = DirectEngine(nodes), nodes.gateway
        neighbour.show(quiet=True, idle=False)
        patient = await gateway.start(prompt(300), greedy(4), idle=True)
        for number in range(3):
            outcome = await gateway.run(prompt(70, number), greedy(2))
            assert outcome.token_ids == direct.generate(prompt(70, number), greedy(2))
            assert not gateway.outcomes[patient].ended
        neighbour.close()
        assert (await gateway.end_of(patient)).token_ids == direct.generate(prompt(300), greedy(4))
        await nodes.all_slots_given_back()
