"""A group of several stages, over real stores, stage processes and sessions: what it answers, and what becomes of it when a stage dies."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import psutil
import pytest

from engine.batch import SequenceChunk
from engine.formats.files import describe
from engine.runner import ModelRunner
from kvstore.link import engine_identity
from kvstore.server.shared.arena import Attachments
from messenger.arena_memory import FdServer, SharedMemory
from messenger.tcp.transport import TcpTransport
from node_runtime.loading import load_runner
from node_runtime.model_thread import ModelThread
from prefill_node.core.actions import PassRow, RunPass
from prefill_node.core.events import PassDone, PassEnded, PassFailed, PassGaveWay, PassLeft
from prefill_node.server import formation
from prefill_node.server.formation import FormationArena
from prefill_node.server.group import StageGroup
from prefill_node.server.passes import Launch
from prefill_node.server.stages import StageProcess
from prefill_node.server.starting import serve
from prefill_node.stage.process import StageServer
from prefill_node.stage.ring import Entrance, Ring
from springtide.config import load_config
from springtide.errors import ConfigError, SpringtideError
from springtide.ids import AttemptId, Incarnation, InstanceId
from springtide.process import ProcessArguments
from springtide.protocol import storage
from springtide.protocol.outputs import FailureCode
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.stages import JoinGroup, LoadLayers
from springtide.protocol.wire import LOAD_LAYERS, STAGE_ORDER
from springtide.rpc import node_pb2, stage_pb2
from tests.support.engine_nodes import WAIT_S, DirectEngine, EngineNodes
from tests.support.faulty_transport import FaultyTransport
from tests.support.models import make_tiny_llama
from tests.support.reference import Reference
from tests.support.transport_faults import FaultPlan, TransferFault
from tests.support.waiting import until

BLOCK_TOKENS = 16
KV = {"block_tokens": BLOCK_TOKENS, "arena_size": "8MiB", "layer_group_size": 4 << 10}
SLAB_BYTES = 2 * BLOCK_TOKENS * 2 * 16 * 4
SLOW = TransferFault("slow", "read", bytes_per_s=20 * SLAB_BYTES / 0.1)
"""A layer of 20 blocks in a tenth of a second."""
LENGTHS = (1, 15, 16, 17, 64, 65, 200, 333)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4)


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{length}/{seed}")
    return [draw.randrange(10, 250) for _ in range(length)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def running_stages() -> dict[str, psutil.Process]:
    """By stage id, those of this process's groups that run."""
    titles = {child: " ".join(child.cmdline()).split() for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}
    return {title[2]: child for child, title in titles.items() if title[:2] == ["springtide", "stage"]}


def children_of_thread(thread_id: int) -> list[int]:
    """Of this process's."""
    return [int(word) for word in Path(f"/proc/self/task/{thread_id}/children").read_text().split()]


async def lose_blocks(nodes: EngineNodes) -> None:
    """The prefill node's store begins anew; the decode node's still has what it was handed over."""
    before = nodes.members["prefill-0"].incarnation
    await nodes.stores["prefill-0"].close()
    await nodes.start_store("prefill-0")
    nodes.members["prefill-0"] = await nodes.member("prefill-0", other_than=before)


@asynccontextmanager
async def a_group(run_dir: Path, model: Path, ranges: Sequence[range] = (range(2), range(2, 4))) -> AsyncIterator[StageGroup]:
    """A group without a node around it, its layers loaded."""
    arguments, thread = _arguments(run_dir, model, stages=len(ranges)), ModelThread(1)
    group = StageGroup(arguments, thread)
    try:
        await group.start()
        runner = await thread.run(load_runner, arguments, "prefill", (ranges[0].start, ranges[0].stop))
        await group.load(ranges, runner)
        yield group
    finally:
        await group.close()
        await thread.close()


def scratch(group: StageGroup) -> FormationArena:
    return FormationArena(group.scratch_slots)


@pytest.mark.parametrize(("stages", "chunk_tokens"), [(1, 40), (2, 64), (3, 7)])
async def test_tokens_are_those_of_transformers_cold_cached_and_with_a_remote_prefix(
    tmp_path: Path, model: Path, stages: int, chunk_tokens: int
) -> None:
    reference = Reference.from_directory(model)
    wanted = {length: reference.greedy(prompt(length), 6) for length in LENGTHS}
    settings = {"chunk_tokens": chunk_tokens, "stages": stages}
    async with EngineNodes(tmp_path, model, kv=KV, prefill_node=settings) as nodes:

        async def answers(source: str | None = None) -> dict[int, list[int]]:
            outcomes = await asyncio.gather(*(nodes.gateway.run(prompt(length), greedy(6), source=source) for length in LENGTHS))
            return {length: outcome.token_ids for length, outcome in zip(LENGTHS, outcomes, strict=True)}

        assert len(running_stages()) == stages - 1
        assert await answers() == wanted
        assert await answers() == wanted
        await lose_blocks(nodes)
        remote = await nodes.gateway.run(prompt(333), greedy(6), source="decode-0")
        assert remote.done is not None and (remote.done.cached_tokens, remote.done.remote_tokens) == (320, 320)
        assert remote.token_ids == wanted[333]
        assert await answers(source="decode-0") == wanted
        await nodes.all_slots_given_back()


@pytest.mark.parametrize("stages", [1, 2])
async def test_passes_wait_for_a_slow_source_and_no_longer_than_its_blocks_travel(tmp_path: Path, model: Path, stages: int) -> None:
    plan = FaultPlan([SLOW])
    plan.armed = False
    faulty = lambda name, arena: FaultyTransport(TcpTransport(), plan)  # noqa: E731
    settings = {"chunk_tokens": 64, "stages": stages}
    async with EngineNodes(tmp_path, model, make_transport=faulty, kv={**KV, "transports": ["tcp"]}, prefill_node=settings) as nodes:
        cold = await nodes.gateway.run(prompt(333), greedy(6))
        await lose_blocks(nodes)
        plan.armed = True
        remote = await nodes.gateway.run(prompt(333), greedy(6), source="decode-0")
        assert remote.done is not None and (remote.done.cached_tokens, remote.done.remote_tokens) == (320, 320)
        assert 0 < remote.done.fetch_wait_ms <= remote.done.fetch_ms
        assert remote.token_ids == cold.token_ids
        await nodes.all_slots_given_back()


@pytest.mark.parametrize("layers_before", [0, 1, 3])
async def test_a_prefix_found_truncated_in_any_layer_is_computed_from_where_it_is_valid(
    tmp_path: Path, model: Path, layers_before: int
) -> None:
    plan = FaultPlan([SLOW, TransferFault("stale", "read", after=layers_before, times=1)])
    plan.armed = False
    faulty = lambda name, arena: FaultyTransport(TcpTransport(), plan)  # noqa: E731
    settings = {"chunk_tokens": 4, "stages": 2}
    async with EngineNodes(tmp_path, model, make_transport=faulty, kv={**KV, "transports": ["tcp"]}, prefill_node=settings) as nodes:
        cold = await nodes.gateway.run(prompt(333), greedy(6))
        await lose_blocks(nodes)
        plan.armed = True
        again = await nodes.gateway.run(prompt(333), greedy(6), source="decode-0")
        assert plan.struck["stale"] == 1 and again.done is not None and again.done.cached_tokens < 320
        assert again.token_ids == cold.token_ids == DirectEngine(nodes).generate(prompt(333), greedy(6))
        await nodes.all_slots_given_back()


async def test_layers_are_split_as_the_configuration_says(tmp_path: Path, model: Path) -> None:
    settings = {"chunk_tokens": 64, "stages": 2, "stage_layers": [3, 1]}
    async with EngineNodes(tmp_path, model, kv=KV, prefill_node=settings) as nodes:
        outcome = await nodes.gateway.run(prompt(200), greedy(6))
        assert outcome.token_ids == DirectEngine(nodes).generate(prompt(200), greedy(6))
        watched = nodes.gateway.stub("prefill-0").WatchLoad(node_pb2.WatchLoadRequest())
        assert 0.5 < (await watched.read()).load.prefill_cost.slowest_share < 1
        watched.cancel()


async def test_sampling_at_the_last_stage_is_that_of_the_engine_alone(tmp_path: Path, model: Path) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=5, repetition_penalty=1.2, ignore_eos=True, logprobs=2)
    async with EngineNodes(tmp_path, model, kv=KV, prefill_node={"chunk_tokens": 64, "stages": 2}) as nodes:
        outcome = await nodes.gateway.run(prompt(70), params)
        assert outcome.token_ids == DirectEngine(nodes).generate(prompt(70), params)
        assert outcome.done is not None and len(outcome.done.output.tokens[0].top) == 2


async def test_a_stage_that_dies_fails_the_attempts_of_its_group_which_forms_again_and_serves(tmp_path: Path, model: Path) -> None:
    roomy = {**KV, "arena_size": "16MiB"}
    async with EngineNodes(tmp_path, model, kv=roomy, prefill_node={"chunk_tokens": 16, "stages": 3}) as nodes:
        before, direct = nodes.members["prefill-0"].incarnation, DirectEngine(nodes)
        prompts = [prompt(2000, seed) for seed in range(3)]
        attempts = [await nodes.gateway.start(token_ids, greedy(4)) for token_ids in prompts]
        await until(lambda: len(nodes.stores["prefill-0"].pool.held_keys()) > 8)
        stages = running_stages()
        assert set(stages) == {"prefill-0.stage-1", "prefill-0.stage-2"}
        os.kill(stages["prefill-0.stage-1"].pid, signal.SIGKILL)
        outcomes = [await nodes.gateway.end_of(attempt_id) for attempt_id in attempts]
        assert {failure.code for outcome in outcomes for failure in outcome.failures[:1]} == {FailureCode.PEER_LOST}
        for attempt_id in attempts:
            await nodes.gateway.abort(attempt_id)
        nodes.members["prefill-0"] = await nodes.member("prefill-0", other_than=before)
        again = await asyncio.gather(*(nodes.gateway.run(token_ids, greedy(4)) for token_ids in prompts))
        assert [outcome.token_ids for outcome in again] == [direct.generate(token_ids, greedy(4)) for token_ids in prompts]
        survivors = running_stages()
        assert survivors["prefill-0.stage-2"].pid == stages["prefill-0.stage-2"].pid, "only what had died was started anew"
        await nodes.all_slots_given_back()


async def test_a_stage_that_hangs_is_killed_and_the_group_forms_again(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formation, "END_TIMEOUT_S", 0.5)
    async with EngineNodes(tmp_path, model, kv=KV, prefill_node={"chunk_tokens": 16, "stages": 2}) as nodes:
        before = nodes.members["prefill-0"].incarnation
        stage = running_stages()["prefill-0.stage-1"]
        stage.suspend()
        attempt_id = await nodes.gateway.start(prompt(333), greedy(4))
        outcome = await nodes.gateway.end_of(attempt_id)
        await nodes.gateway.abort(attempt_id)
        assert outcome.failures[0].code == FailureCode.PEER_LOST
        nodes.members["prefill-0"] = await nodes.member("prefill-0", other_than=before)
        again = await nodes.gateway.run(prompt(333), greedy(4))
        assert again.token_ids == DirectEngine(nodes).generate(prompt(333), greedy(4))
        await nodes.all_slots_given_back()


async def test_a_pass_that_hangs_in_a_stage_which_still_talks_ends_the_formation(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formation, "WATCH_EVERY_S", 0.05)
    async with a_group(tmp_path, model) as group:
        formed, told = await group.form(scratch(group)), list[PassLeft | PassEnded]()
        # Its prefix, the second stage hears, is under way, and then nothing more of it.
        formed.relay(storage.Acquired(AttemptId("a"), (), 0, 1))
        run = RunPass(0, (PassRow("a", SequenceChunk((1,) * 8, 0, (0,)), None),), (), awaits="a")
        formed.launch(Launch(run, None, lambda _, event: told.append(event)))
        await until(lambda: told == [PassLeft(0)])
        monkeypatch.setattr(formation, "longest_pass_s", lambda *_: 0.2)
        async with asyncio.timeout(WAIT_S):
            broken = await formed.broken()
        assert re.search(r"pass 0 has not ended .* 1$", broken.message)
        await group.at_rest()
        assert told == [PassLeft(0), PassFailed(0, broken.message)]
        await group.form(scratch(group))


async def test_a_pass_that_is_done_says_when_each_stage_was_at_it(tmp_path: Path, model: Path) -> None:
    async with a_group(tmp_path, model) as group:
        formed, told = await group.form(scratch(group)), list[PassLeft | PassEnded]()
        run = RunPass(0, (PassRow("a", SequenceChunk((1,) * 8, 0, (0,)), None),), ())
        formed.launch(Launch(run, None, lambda _, event: told.append(event)))
        await until(lambda: len(told) == 2)
    left, done = told
    assert left == PassLeft(0) and isinstance(done, PassDone)
    first, second = done.stages
    assert 0 < first.busy_ms <= first.end_ms < second.end_ms and 0 < second.busy_ms <= second.end_ms - first.end_ms
    assert done.elapsed_ms == pytest.approx(second.end_ms)


async def test_a_pass_that_cannot_even_begin_fails_and_the_next_one_runs(tmp_path: Path, model: Path) -> None:
    async with a_group(tmp_path, model, (range(4),)) as group:
        formed, told = await group.form(scratch(group)), list[PassLeft | PassEnded]()
        row = PassRow("a", SequenceChunk((1,) * 8, 0, (0,), wants_logits=False), None)
        for run in (RunPass(4, (None,), ()), RunPass(5, (row,), ())):  # type: ignore[arg-type]
            formed.launch(Launch(run, None, lambda _, event: told.append(event)))
        time.sleep(0.2)  # noqa: ASYNC251 -- both are over when the event loop learns of the first
        await until(lambda: len(told) == 2)
    assert isinstance(told[0], PassFailed) and told[0].pass_id == 4
    assert isinstance(told[1], PassDone) and told[1].pass_id == 5 and told[1].elapsed_ms > 0


class SlowLink:
    """A store whose word of a prefix a test gives."""

    def __init__(self) -> None:
        self.arriving, self.waited_for, self.goes_on = threading.Event(), threading.Event(), threading.Event()
        self.arriving.set()
        self._looks = threading.Semaphore(0)

    def waits(self, attempt_id: AttemptId, num_layers: int) -> bool:
        self._looks.release()
        return self.arriving.is_set()

    def wait_layer(self, attempt_id: AttemptId, layer: int, timeout_s: float) -> int | None:
        self.waited_for.set()
        self.goes_on.wait(WAIT_S)
        return None

    async def looked(self, times: int) -> None:
        """Returns when the formation has been watched so many times more."""
        for _ in range(times):
            await until(lambda: self._looks.acquire(blocking=False))


WAITING_PASS = RunPass(0, (PassRow("a", SequenceChunk((1,) * 8, 0, (0,), wants_logits=False), None),), (), awaits="a", predicted_ms=1.0)


async def test_a_pass_that_waits_for_its_prefix_does_not_stall_and_one_that_computes_for_as_long_does(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formation, "WATCH_EVERY_S", 0.01)
    monkeypatch.setattr(formation, "stalled_after_s", lambda *_: 0.05)
    async with a_group(tmp_path, model, (range(4),)) as group:
        formed, stalled_at_end, link = await group.form(scratch(group)), list[str](), SlowLink()
        formed.launch(Launch(WAITING_PASS, link, lambda *_: stalled_at_end.append(formed.stalled)))  # type: ignore[arg-type]
        for _ in range(20):
            await link.looked(1)
            assert not formed.stalled, "who waits for others is not at work"
        link.arriving.clear()
        await until(lambda: formed.stalled)
        assert formed.stalled == "pass 0 has not ended within 0.1 s"
        link.goes_on.set()
        await until(lambda: stalled_at_end)
        assert stalled_at_end == [""]


async def test_a_pass_that_hangs_in_a_group_of_one_is_left_to_the_watchdog(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ends the process: a formation that broke at the same time would have the attempts scheduled anew here."""
    monkeypatch.setattr(formation, "WATCH_EVERY_S", 0.01)
    async with a_group(tmp_path, model, (range(4),)) as group:
        formed, told, link = await group.form(scratch(group)), list[PassLeft | PassEnded](), SlowLink()
        formed.launch(Launch(WAITING_PASS, link, lambda _, event: told.append(event)))  # type: ignore[arg-type]
        await until(link.waited_for.is_set)
        monkeypatch.setattr(formation, "longest_pass_s", lambda *_: 0.05)
        looking, breaking = asyncio.create_task(link.looked(20)), asyncio.create_task(formed.broken())
        await asyncio.wait({looking, breaking}, return_when=asyncio.FIRST_COMPLETED)
        link.goes_on.set()
        assert not breaking.done()
        breaking.cancel()
        await until(lambda: told)
        assert isinstance(told[0], PassDone)


async def test_a_stage_whose_loading_was_called_off_loads_when_the_group_forms_again(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefill_node.server.stages")
    async with a_group(tmp_path, model) as group:
        (stage,) = running_stages().values()
        stage.kill()
        forming = asyncio.create_task(group.form(scratch(group)))
        await until(lambda: sum("is process" in record.message for record in caplog.records) == 2)
        forming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forming
        await group.form(scratch(group))


async def test_a_stage_is_started_by_a_thread_that_lives_as_long_as_it(tmp_path: Path, model: Path) -> None:
    """What an event loop forks amid the threads of gRPC may never come to its program."""
    async with a_group(tmp_path, model):
        (stage,) = running_stages().values()
        assert stage.pid not in children_of_thread(threading.get_native_id())
        assert sum(stage.pid in children_of_thread(thread.id) for thread in psutil.Process().threads()) == 1


async def test_a_stage_that_cannot_be_started_is_an_error_and_nothing_to_be_ended(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = StageProcess(_arguments(tmp_path, model, stages=2), 1)
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", str(tmp_path / "no-python"))
        with pytest.raises(FileNotFoundError):
            await stage.start()
    assert not stage.running and stage.pid is None
    await stage.kill()
    await stage.close()
    await stage.start()
    assert stage.running
    await stage.close()
    assert not stage.running


async def test_a_stage_loads_once_though_whoever_asked_for_it_is_gone(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[tuple[Any, ...]] = []

    def loading(*arguments: Any) -> ModelRunner:
        began.append(arguments)
        return load_runner(*arguments)

    monkeypatch.setattr("prefill_node.stage.process.load_runner", loading)
    thread = ModelThread(1)
    stage, order = StageServer(_arguments(tmp_path, model, stages=2), thread), LOAD_LAYERS.encode(LoadLayers(2, 4, 2))
    asked = asyncio.create_task(stage.Load(order, None))
    await until(lambda: began)
    asked.cancel()
    await stage.Load(order, None)
    assert len(began) == 1
    await stage.close()
    await thread.close()


def noted(work: Callable[[], Awaitable[None]], begun: asyncio.Event) -> Callable[[], Awaitable[None]]:
    async def noting() -> None:
        begun.set()
        await work()

    return noting


async def test_a_stage_lets_go_of_the_arena_though_its_call_is_cancelled_while_its_session_ends(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is when the group's first stage is lost: its orders end, and a moment later its call is cancelled."""
    thread, arguments = ModelThread(1), _arguments(tmp_path, model, stages=2)
    stage, engine = StageServer(arguments, thread), engine_identity("prefill-0", Incarnation(7))
    await stage.Load(LOAD_LAYERS.encode(LoadLayers(2, 4, 2)), None)
    spec = arguments.model_info.kv_spec(arguments.config.dtype, arguments.config.kv.block_tokens)
    memory, attachments = SharedMemory.create(8, spec.bytes_per_slot, Incarnation(7)), Attachments()
    server, over, computed = FdServer(memory, arguments.arena_socket, attachments.serve), asyncio.Event(), threading.Event()
    await server.start()

    async def orders() -> AsyncIterator[stage_pb2.StageOrder]:
        yield STAGE_ORDER.encode(JoinGroup(InstanceId("prefill-0"), 8, Incarnation(7)))
        await over.wait()

    context = mock.Mock(write=mock.AsyncMock())
    call = asyncio.create_task(stage.Serve(orders(), context))
    await until(lambda: context.write.called)
    assert not await attachments.has_let_go(engine)
    thread.run(computed.wait)
    ending = asyncio.Event()
    monkeypatch.setattr(thread, "at_rest", noted(thread.at_rest, ending))
    over.set()
    await ending.wait()
    call.cancel()
    await asyncio.sleep(0)
    assert not await attachments.has_let_go(engine), "it may still be writing"
    computed.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: attachments.has_let_go(engine))
    await server.close()
    memory.close()
    await stage.close()
    await thread.close()


async def test_a_stage_of_another_number_of_stages_is_told_both(tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Refused(Exception):
        pass

    context = mock.Mock(abort=mock.AsyncMock(side_effect=Refused))
    thread = ModelThread(1)
    arguments = replace(_arguments(tmp_path, model, stages=3), instance_id="long.stage-1", stage=1)
    stage = StageServer(arguments, thread)
    for _ in range(2):
        with pytest.raises(Refused):
            await stage.Load(LOAD_LAYERS.encode(LoadLayers(2, 4, 2)), context)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert said.startswith("--stage: long.stage-1 was started as 1/3, and its group's first stage as 0/2:")
    assert context.abort.call_args.args == (grpc.StatusCode.FAILED_PRECONDITION, said)
    await stage.close()
    await thread.close()


async def test_a_group_that_cannot_form_for_whatever_reason_tries_again(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failures = Ring.start, [SpringtideError("by the test"), OSError("by the test")]

    async def fail_first(ring: Ring) -> Entrance:
        if failures:
            raise failures.pop()
        return await start(ring)

    monkeypatch.setattr(Ring, "start", fail_first)
    monkeypatch.setattr("prefill_node.server.group.RETRY_S", 0.0)
    async with a_group(tmp_path, model) as group:
        await group.form(scratch(group))
        assert not failures


async def test_an_abort_in_the_middle_of_several_passes_gives_every_slot_back(tmp_path: Path, model: Path) -> None:
    async with EngineNodes(tmp_path, model, kv=KV, prefill_node={"chunk_tokens": 16, "stages": 2}) as nodes:
        attempts = [await nodes.gateway.start(prompt(2000, seed), greedy(4)) for seed in range(3)]
        await until(lambda: len(nodes.stores["prefill-0"].pool.held_keys()) > 8)
        for attempt_id in attempts:
            await nodes.gateway.abort(attempt_id)
        await nodes.all_slots_given_back()
        assert not any(nodes.gateway.outcomes[attempt_id].ended for attempt_id in attempts)
        outcome = await nodes.gateway.run(prompt(100), greedy(4))
        assert outcome.token_ids == DirectEngine(nodes).generate(prompt(100), greedy(4))


async def test_a_group_ends_its_stages(tmp_path: Path, model: Path) -> None:
    async with EngineNodes(tmp_path, model, kv=KV, prefill_node={"stages": 2}):
        (stage,) = running_stages().values()
    assert not stage.is_running()


async def test_more_stages_than_layers_are_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"prefill_node\.stages: the model has 4 layers"):
        await serve(_arguments(tmp_path, model, stages=5), asyncio.Event())
    with pytest.raises(ConfigError, match=r"prefill_node\.stage_layers: they are 5 in all"):
        await serve(_arguments(tmp_path, model, stages=2, stage_layers=[2, 3]), asyncio.Event())


def _arguments(tmp_path: Path, model: Path, **prefill_node: Any) -> ProcessArguments:
    overrides = {"kv.open_to_strangers": True, **{f"prefill_node.{name}": value for name, value in prefill_node.items()}}
    config = load_config(overrides=overrides, environ={})
    return ProcessArguments(config, describe(str(model)), tmp_path, "prefill-0", "prefill-0", "127.0.0.1")


async def test_a_pass_that_gives_way_ends_before_its_next_layer_and_the_next_one_runs(tmp_path: Path, model: Path) -> None:
    async with a_group(tmp_path, model, (range(4),)) as group:
        formed, told, asked = await group.form(scratch(group)), list[PassLeft | PassEnded](), list[int]()

        def gives_way() -> bool:
            asked.append(len(asked))
            return len(asked) == 3

        row = PassRow("a", SequenceChunk((1,) * 8, 0, (0,), wants_logits=False), None)
        for run, way in ((RunPass(4, (row,), (), idle=True), gives_way), (RunPass(5, (row,), ()), lambda: False)):
            formed.launch(Launch(run, None, lambda _, event: told.append(event), gives_way=way))
        await until(lambda: len(told) == 2)
    assert told[0] == PassGaveWay(4) and asked == [0, 1, 2]
    assert isinstance(told[1], PassDone) and told[1].pass_id == 5
