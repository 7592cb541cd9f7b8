"""Stages on devices, with the CPU as each one's: activations go from device to device, in real processes, or through the host where they
cannot."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from prefill_node.server.stages import StageProcess
from prefill_node.stage import ring
from prefill_node.stage.ring import Arrival, Ring, RingShape, shared_on
from springtide.protocol.sampling import SamplingParams
from tests.prefill_node.test_prefill_group import KV, LENGTHS, lose_blocks, prompt, running_stages
from tests.support import cpu_as_device
from tests.support.engine_nodes import EngineNodes
from tests.support.models import make_tiny_llama
from tests.support.reference import Reference
from tests.support.waiting import until

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SHAPE = RingShape(depth=3, rows=5, hidden=7, dtype=torch.bfloat16)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4)


@pytest.fixture
def on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages have one, and no activations may go through the host."""
    command = StageProcess._command

    def with_device(stage: StageProcess) -> list[str]:
        return ["tests.support.cpu_as_device", *command(stage)[1:]]

    cpu_as_device.use(monkeypatch.setattr)
    monkeypatch.setattr(StageProcess, "_command", with_device)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.parametrize(("stages", "chunk_tokens"), [(2, 64), (3, 7)])
@pytest.mark.usefixtures("on_devices")
async def test_tokens_are_those_of_transformers(tmp_path: Path, model: Path, stages: int, chunk_tokens: int) -> None:
    reference = Reference.from_directory(model)
    wanted = {length: reference.greedy(prompt(length), GREEDY.max_tokens) for length in LENGTHS}
    settings = {"chunk_tokens": chunk_tokens, "stages": stages}
    async with EngineNodes(tmp_path, model, kv=KV, prefill_node=settings) as nodes:

        async def answers(source: str | None = None) -> dict[int, list[int]]:
            outcomes = await asyncio.gather(*(nodes.gateway.run(prompt(length), GREEDY, source=source) for length in LENGTHS))
            return {length: outcome.token_ids for length, outcome in zip(LENGTHS, outcomes, strict=True)}

        assert await answers() == wanted
        await lose_blocks(nodes)
        assert await answers(source="decode-0") == wanted
        await nodes.all_slots_given_back()


@pytest.mark.usefixtures("on_devices")
async def test_a_stage_that_dies_leaves_its_neighbours_devices_to_the_one_that_follows_it(tmp_path: Path, model: Path) -> None:
    reference = Reference.from_directory(model)
    async with EngineNodes(tmp_path, model, kv=KV, prefill_node={"chunk_tokens": 16, "stages": 3}) as nodes:
        for stage in ("prefill-0.stage-1", "prefill-0.stage-2"):
            before = nodes.members["prefill-0"].incarnation
            os.kill(running_stages()[stage].pid, signal.SIGKILL)
            nodes.members["prefill-0"] = await nodes.member("prefill-0", other_than=before)
            outcome = await nodes.gateway.run(prompt(200), GREEDY)
            assert outcome.token_ids == reference.greedy(prompt(200), GREEDY.max_tokens)
        await nodes.all_slots_given_back()


async def test_only_word_of_what_is_on_the_device_goes_by_messenger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_as_device.use_sharing(monkeypatch.setattr)
    arrivals: list[Arrival] = []
    first = Ring("first", shared_on(tmp_path / "1"), SHAPE, lambda arrival: None)
    second = Ring("second", shared_on(tmp_path / "2"), SHAPE, arrivals.append, SHAPE.on(torch.device("cpu")))
    await first.start()
    await first.connect(await second.start())
    sent = [torch.randn(rows, SHAPE.hidden).to(SHAPE.dtype) for rows in (5, 3, 1)]
    for pass_id, hidden in enumerate(sent):
        first.outgoing(pass_id, len(hidden)).copy_(hidden)
        await first.send(pass_id, len(hidden), void=pass_id == 1)
    assert arrivals == [Arrival(0, False, True), Arrival(1, True), Arrival(2, False, True)]
    for arrival in (arrivals[0], arrivals[2]):
        assert torch.equal(second.incoming(arrival, len(sent[arrival.pass_id])), sent[arrival.pass_id])
        assert not second.incoming(Arrival(arrival.pass_id, False), 1).any(), "the host's buffers are not written"
    for one in (first, second):
        await one.close()


@pytest.mark.parametrize("fails", ["share", "open_shared"])
async def test_where_devices_share_nothing_activations_go_through_the_host(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(*_: Any) -> Any:
        raise RuntimeError("pidfd_getfd: Operation not permitted")

    cpu_as_device.use_sharing(monkeypatch.setattr)
    monkeypatch.setattr(ring, fails, forbidden)
    arrivals: list[Arrival] = []
    first = Ring("first", shared_on(tmp_path / "1"), SHAPE, lambda arrival: None)
    second = Ring("second", shared_on(tmp_path / "2"), SHAPE, arrivals.append, SHAPE.on(torch.device("cpu")))
    await first.start()
    with caplog.at_level(logging.WARNING):
        await first.connect(await second.start())
    assert "host's memory: pidfd_getfd" in caplog.text
    hidden = torch.randn(5, SHAPE.hidden).to(SHAPE.dtype)
    first.outgoing(0, 5).copy_(hidden)
    await first.send(0, 5, void=False)
    await until(lambda: arrivals == [Arrival(0, False, False)])
    assert torch.equal(second.incoming(arrivals[0], 5), hidden)
    for one in (first, second):
        await one.close()
