"""A decode node whose pages lie apart from the arena: prompts are loaded beside the steps of the others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decode_node.core.actions import LoadAhead
from decode_node.core.events import Loaded
from decode_node.server import loads
from engine.device.base import Device
from engine.device.streams import ImmediateStreams, SlabCopy, copy_all
from engine.formats.files import describe
from engine.kv_cache import device_cache
from engine.loader import load_model
from engine.runner import ModelRunner
from engine.sampling.grammars import Grammars
from mixed_node.server.server import MixedServer
from node_runtime import devices
from node_runtime.loading import Parts
from node_runtime.model_thread import ModelThread
from springtide.clock import MonotonicClock
from springtide.config import load_config
from springtide.cost import DecodeCost, PrefillCost
from springtide.process import ProcessArguments
from springtide.protocol.outputs import FailureCode
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.storage import Release
from tests.support.engine_nodes import DirectEngine, EngineNodes
from tests.support.models import make_tiny_llama
from tests.support.waiting import until

KV = {"block_tokens": 16, "arena_size": "8MiB"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=1500)


class Gate:
    """While it is closed no load ahead ends by itself."""

    def __init__(self) -> None:
        self.open = True
        self.held: list[Held] = []


class Held(SlabCopy):
    def __init__(self, gate: Gate, happens: Callable[[], None]) -> None:
        self._gate = gate
        self._happens = happens
        self.happened = False
        gate.held.append(self)

    def done(self) -> bool:
        if self._gate.open:
            self.wait()
        return self.happened

    def wait(self) -> None:
        if not self.happened:
            self.happened = True
            self._happens()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Every engine's device is the CPU, with pages of its own, into which prompts are loaded a few blocks at a time."""
    gate = Gate()

    class GatedStreams(ImmediateStreams):
        def load_ahead(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> SlabCopy:
            def happens() -> None:
                with torch.inference_mode():
                    copy_all(targets, sources)

            return Held(gate, happens)

        def begin(self, ahead: Sequence[SlabCopy]) -> None:
            for copy in ahead:
                copy.wait()
            super().begin(ahead)

    monkeypatch.setattr(device_cache, "ImmediateStreams", GatedStreams)
    monkeypatch.setattr(devices, "count_cards", lambda kind: 8)
    monkeypatch.setattr(devices, "find", lambda *choice: Device(torch.device("cpu"), most_pages=200))
    monkeypatch.setattr(loads, "PIECE_BLOCKS", 8)
    yield gate
    assert all(copy.happened for copy in gate.held)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(10, 250) for _ in range(length)]


async def goes_on(nodes: EngineNodes, attempt_id: str, tokens: int = 8) -> None:
    """Waits until it has so many tokens more."""
    outcome = nodes.gateway.outcomes[attempt_id]
    wanted = len(outcome.token_ids) + tokens
    await until(lambda: len(outcome.token_ids) >= wanted)


async def test_steps_of_the_others_end_while_a_prompt_is_loaded(tmp_path: Path, model: Path, gate: Gate) -> None:
    async with EngineNodes(tmp_path, model, prefill=1, decode=1, kv=KV) as nodes:
        other = await nodes.gateway.start(prompt(30), LONG)
        await goes_on(nodes, other)
        gate.open, gate.held = False, []
        joins = await nodes.gateway.start(prompt(300), GREEDY)
        await until(lambda: len(gate.held) == 3)
        await goes_on(nodes, other)
        assert len(nodes.gateway.outcomes[joins].token_ids) <= 1 and not any(copy.happened for copy in gate.held)
        gate.open = True
        assert (await nodes.gateway.end_of(joins)).token_ids == DirectEngine(nodes).generate(prompt(300), GREEDY)
        await nodes.gateway.abort(other)
        await nodes.all_slots_given_back()


async def test_the_slots_of_an_attempt_that_is_aborted_meanwhile_are_given_back_when_they_are_not_read_any_more(
    tmp_path: Path, model: Path, gate: Gate
) -> None:
    async with EngineNodes(tmp_path, model, prefill=1, decode=1, kv=KV) as nodes:
        other = await nodes.gateway.start(prompt(30), LONG)
        await goes_on(nodes, other)
        gate.open, gate.held = False, []
        aborted = await nodes.gateway.start(prompt(300), GREEDY)
        await until(lambda: gate.held)
        await nodes.gateway.abort(aborted)
        await goes_on(nodes, other)
        assert nodes.stores["decode-0"].pool.counts().in_use >= 19
        await nodes.gateway.abort(other)
        gate.open = True
        await nodes.all_slots_given_back()
        for length in (300, 301, 40):
            assert (await nodes.gateway.run(prompt(length), GREEDY)).token_ids == DirectEngine(nodes).generate(prompt(length), GREEDY)
        await nodes.all_slots_given_back()


async def test_a_prompt_that_cannot_be_loaded_ahead_is_loaded_in_its_step(
    tmp_path: Path, model: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*how: Any) -> None:
        raise RuntimeError("out of order")

    async with EngineNodes(tmp_path, model, prefill=1, decode=1, kv=KV) as nodes:
        monkeypatch.setattr(ModelRunner, "load_ahead", broken)
        assert (await nodes.gateway.run(prompt(300), GREEDY)).token_ids == DirectEngine(nodes).generate(prompt(300), GREEDY)
        await nodes.all_slots_given_back()
    assert [record.getMessage() for record in caplog.records if "loaded ahead" in record.getMessage()]


async def test_a_store_that_is_lost_meanwhile_ends_what_is_loaded_and_leaves_nothing_in_the_pages(
    tmp_path: Path, model: Path, gate: Gate
) -> None:
    async with EngineNodes(tmp_path, model, prefill=1, decode=1, kv=KV) as nodes:
        gate.open = False
        lost = await nodes.gateway.start(prompt(300), GREEDY)
        await until(lambda: gate.held)
        before = nodes.members["decode-0"].incarnation
        await nodes.stores["decode-0"].close()
        outcome = await nodes.gateway.end_of(lost)
        assert FailureCode.PEER_LOST in [failure.code for failure in outcome.failures]
        await nodes.start_store("decode-0")
        nodes.members["decode-0"] = await nodes.member("decode-0", other_than=before)
        assert all(copy.happened for copy in gate.held), "before the engine left the arena"
        gate.open = True
        for length in (300, 301):
            assert (await nodes.gateway.run(prompt(length), GREEDY)).token_ids == DirectEngine(nodes).generate(prompt(length), GREEDY)
        await nodes.all_slots_given_back()


async def test_when_the_store_is_gone_nothing_is_loaded_and_no_slot_is_noted(
    tmp_path: Path, model: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core has yet to hear of it: the slots are nobody's, and other blocks will be in those of the next arena."""
    info = describe(str(model))
    spec = info.kv_spec("float32", 16)
    runner = ModelRunner(
        load_model(info, "float32", device=Device(torch.device("cpu"))), spec, np.zeros(20 * spec.bytes_per_slot, np.uint8), 20
    )
    arguments = ProcessArguments(load_config(overrides={"model": str(model)}, environ={}), info, tmp_path, "", "decode-0", "127.0.0.1")
    thread = ModelThread(1)
    parts, costs = Parts(arguments, runner, thread, MonotonicClock()), (PrefillCost(1.0, 1.0, 0.0), DecodeCost(1.0, 1.0, 0.0))
    node = MixedServer(parts, costs, Grammars(arguments.model_info), {})
    told: list[Any] = []
    monkeypatch.setattr(node, "tell", told.append)
    node.act(LoadAhead("a", (1, 2, 3)))
    await until(lambda: told)
    assert told == [Loaded("a")] and not gate.held
    forgotten: list[Sequence[int]] = []
    monkeypatch.setattr(node, "forget", forgotten.append)
    node.act(Release("a"))
    assert not forgotten
    await node.close()
    await thread.close()
