"""Nodes whose models have their paged cache apart from the arena, and which process is on which card."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.device.base import Device
from engine.kv_cache.device_cache import DeviceCache
from node_runtime import devices
from node_runtime.devices import devices_of
from node_runtime.slot_claims import SlotUse
from springtide.config import load_config
from springtide.errors import ConfigError
from springtide.modelinfo import ModelInfo
from springtide.process import ProcessArguments
from springtide.protocol.instances import Role
from springtide.protocol.outputs import FailureCode
from springtide.protocol.sampling import SamplingParams
from tests.support.engine_nodes import DirectEngine, EngineNodes
from tests.support.models import make_tiny_llama
from tests.support.waiting import until

PAGES = 60
CARDS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every engine's device is the CPU, with pages of its own and not many of them."""
    monkeypatch.setattr(devices, "count_cards", lambda kind: CARDS)
    monkeypatch.setattr(devices, "find", lambda *choice: Device(torch.device("cpu"), most_pages=PAGES))
    yield


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(f"{length}/{seed}")
    return [draw.randrange(10, 250) for _ in range(length)]


@pytest.mark.usefixtures("paged")
async def test_tokens_are_those_of_the_engine_alone_while_slots_go_from_one_request_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small arenas: slots come back with other blocks in them, computed here, fetched from the other prefill node, or handed over."""
    caches: set[DeviceCache] = set()
    run = DeviceCache.run
    monkeypatch.setattr(DeviceCache, "run", lambda cache, *how: (caches.add(cache), run(cache, *how))[1])
    kv = {"block_tokens": 16, "arena_size": "768KiB", "layer_group_size": 16 << 10}
    model = make_tiny_llama(tmp_path / "tiny")
    async with EngineNodes(tmp_path, model, prefill=2, decode=1, kv=kv, prefill_node={"chunk_tokens": 64}) as nodes:
        direct = DirectEngine(nodes)
        expected = {(length, seed): direct.generate(prompt(length, seed), GREEDY) for length in (40, 170, 300) for seed in range(3)}
        for turn in range(6):
            asked = [(length, (turn + i) % 3) for i, length in enumerate((40, 170, 300))]
            here, there = f"prefill-{turn % 2}", f"prefill-{1 - turn % 2}"
            outcomes = await asyncio.gather(
                *(nodes.gateway.run(prompt(*one), GREEDY, on=(here, "decode-0"), source=there if turn else None) for one in asked)
            )
            for one, outcome in zip(asked, outcomes, strict=True):
                assert outcome.token_ids == expected[one], f"turn {turn}, {one}: {outcome.failures}"
        await nodes.all_slots_given_back()
    # The models' threads have ended: until then they may be at forgetting what was given back.
    for cache in caches:
        cache.page_table.validate()
    assert len(caches) >= 3


@pytest.mark.usefixtures("paged")
async def test_a_prompt_that_the_device_has_no_pages_for_is_refused(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "tiny", max_position_embeddings=4096)
    async with EngineNodes(tmp_path, model, kv={"block_tokens": 16, "arena_size": "8MiB"}) as nodes:
        assert nodes.stores["prefill-0"].pool.counts().free > PAGES
        failures = (await nodes.gateway.run(prompt(16 * PAGES + 1, 0), GREEDY)).failures
        await until(lambda: len(failures) == 2)
        assert {failure.code for failure in failures} == {FailureCode.INVALID}
        assert sorted(failure.message for failure in failures) == [
            f"the prompt needs {PAGES + 1} blocks, the arena has {PAGES} slots",
            f"the sequence may come to need {PAGES + 2} blocks, the arena has {PAGES} slots",
        ]
        assert len((await nodes.gateway.run(prompt(16 * (PAGES - 2), 0), GREEDY)).token_ids) == GREEDY.max_tokens
        await nodes.all_slots_given_back()


def test_slots_are_gone_when_the_last_attempt_gives_them_back() -> None:
    use = SlotUse()
    use.note("a", (1, 2, 3))
    use.note("b", (1, 2, 4))
    use.note("b", (1, 2))
    use.note("b", (1, 2, 4, 5))
    assert use.give_back("a") == [3]
    assert use.give_back("a") == []
    assert use.give_back("b") == [1, 2, 4, 5]
    use.note("c", (1,))
    use.clear()
    assert use.give_back("c") == []


def found(
    monkeypatch: pytest.MonkeyPatch, role: str, instance_id: str, cards: int = CARDS, **settings: object
) -> list[tuple[int, float, int] | None]:
    """Of each rank: its card, its share of that, and the most sequences of a recorded step; None on the CPU. With a node of each role,
    unless it is said otherwise."""

    def find(kind: str, number: int, share: float, step_graphs: int) -> tuple[int, float, int]:
        assert number < cards
        return number, share, step_graphs

    monkeypatch.setattr(devices, "find", find)
    monkeypatch.setattr(devices, "count_cards", lambda kind: cards)
    info = ModelInfo("", "", "", "", 1, 1, 1, 1, 1, ())
    config = load_config(overrides={"prefill": 1, "decode": 1, **settings}, environ={})
    arguments = ProcessArguments(config, info, Path(), "", instance_id, "")
    return devices_of(arguments, role)  # type: ignore[arg-type, return-value]


def numbers(monkeypatch: pytest.MonkeyPatch, role: str, instance_id: str, **settings: object) -> list[int]:
    return [one[0] for one in found(monkeypatch, role, instance_id, **settings) if one is not None]


def test_every_process_has_a_card_of_its_own_prefill_groups_first(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"prefill": 2, "decode": 2, "prefill_node.stages": 2, "prefill_node.tensor_parallel": 2, "decode_node.tensor_parallel": 2}
    of = {
        name: numbers(monkeypatch, Role(name.split("-")[0]), name, **settings)
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")
    }
    assert of == {"prefill-0": [0, 1], "prefill-1": [4, 5], "decode-0": [8, 9], "decode-1": [10, 11]}
    assert numbers(monkeypatch, Role.PREFILL, "prefill-1.stage-1", **settings) == [6, 7]


def test_cards_can_be_chosen_and_are_counted_round(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"decode": 3, "decode_node.devices": [5, 7], "prefill_node.stages": 3, "prefill_node.devices": [1, 2]}
    assert [numbers(monkeypatch, Role.DECODE, f"decode-{i}", **settings) for i in range(3)] == [[5], [7], [5]]
    assert [numbers(monkeypatch, Role.PREFILL, f"prefill-0{stage}", **settings) for stage in ("", ".stage-1", ".stage-2")] == [
        [1],
        [2],
        [1],
    ]


def test_an_engine_that_has_switched_its_role_stays_on_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    assert numbers(monkeypatch, Role.DECODE, "prefill-1", prefill=2) == numbers(monkeypatch, Role.PREFILL, "prefill-1", prefill=2) == [1]


def test_it_stays_on_the_cards_that_it_was_started_on_whatever_the_other_role_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"prefill": 2, "prefill_node.stages": 2, "prefill_node.tensor_parallel": 2, "decode_node.tensor_parallel": 2}
    assert numbers(monkeypatch, Role.DECODE, "prefill-1", **settings) == [4, 5]
    assert numbers(monkeypatch, Role.PREFILL, "decode-0", **settings) == [8, 9]
    assert numbers(monkeypatch, Role.PREFILL, "decode-0.stage-1", **settings) == [8, 9]
    assert found(monkeypatch, Role.PREFILL, "decode-0", **settings)[0] == (8, 0.85 / 2, 0), "both of its stages are there"
    with pytest.raises(ConfigError, match=r"decode_node\.tensor_parallel: 2 ranks need a card each, but have 0 of the machine's 64"):
        numbers(monkeypatch, Role.DECODE, "prefill-0", **{"decode_node.tensor_parallel": 2, "device": "cuda"})


def test_processes_that_share_a_card_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, Role.PREFILL, "prefill-0", cards=1) == [(0, 0.85 / 2, 0)]
    assert found(monkeypatch, Role.DECODE, "decode-0", cards=1, **{"decode_node.max_batch": 20}) == [(0, 0.85 / 2, 20)]
    shares = {
        name: found(monkeypatch, Role(name.split("-")[0]), name, cards=2, decode=2, device_memory=0.6)
        for name in ("prefill-0", "decode-0", "decode-1")
    }
    assert shares == {"prefill-0": [(0, 0.3, 0)], "decode-0": [(1, 0.6, 64)], "decode-1": [(0, 0.3, 64)]}


@pytest.mark.parametrize("name", ["release-prefill-0", "prefill-3", "prefill-3f2a", "gpu7", "prefill-3.stage-1"])
def test_an_engine_of_a_pod_a_joined_machine_or_a_ray_node_has_its_cards_to_itself(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for settings in ({}, {"prefill": 1, "decode": 0}):
        assert found(monkeypatch, Role.PREFILL, name, cards=1, **settings) == [(0, 0.85, 0)]
        assert found(monkeypatch, Role.DECODE, name.replace("prefill", "decode"), cards=1, **settings) == [(0, 0.85, 64)]
    assert numbers(monkeypatch, Role.DECODE, "release-decode-2", **{"decode_node.tensor_parallel": 2}) == [0, 1]


def test_ranks_of_a_process_are_never_on_the_same_card(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"prefill_node.tensor_parallel": 2, "prefill_node.devices": [3], "device": "cuda"}
    message = r"prefill_node\.tensor_parallel: 2 ranks need a card each, but have 3 of the machine's 8: .* in prefill_node\.devices"
    with pytest.raises(ConfigError, match=message):
        found(monkeypatch, Role.PREFILL, "prefill-0", cards=8, **settings)
    assert found(monkeypatch, Role.PREFILL, "prefill-0", cards=8, **{**settings, "device": "auto"}) == [None, None]
    (said,) = caplog.records
    assert "they run on the CPU" in said.getMessage()


def test_recorded_steps_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, Role.DECODE, "decode-0", **{"decode_node.cuda_graphs": False}) == [(1, 0.85, 0)]
