"""Blocks that are loaded ahead of the pass that uses them, by copies that take as long as the test says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.batch import SequenceChunk
from engine.kv_cache import device_cache
from engine.kv_cache.device_cache import DeviceCache
from engine.kv_cache.paged_pass import Slabs
from tests.engine.conftest import tiny_harness
from tests.engine.sequences import Harness
from tests.engine.test_engine_device_order import Late, LateStreams
from tests.engine.test_engine_device_runner import FLASHINFER, TORCH, on_device
from tests.support.models import make_tiny_llama
from tests.support.reference import Reference, random_prompt

LENGTH = 90
PAGES = 16


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("ahead") / "model")


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference.from_directory(path)


@pytest.fixture
def elsewhere(path: Path) -> Harness:
    """The model over an arena of its own."""
    return tiny_harness(path)


@pytest.fixture(params=[TORCH, FLASHINFER])
def late(path: Path, elsewhere: Harness, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """A harness whose copies are late; with FlashInfer's twin, which is in place when `elsewhere` has been made, decode
    steps are those that are recorded."""
    LateStreams.made = []
    monkeypatch.setattr(device_cache, "ImmediateStreams", LateStreams)
    with on_device(path, request.param, most_pages=PAGES, step_graphs=4) as harness:
        yield harness


def cache_of(harness: Harness) -> DeviceCache:
    cache = harness.runner.cache
    assert isinstance(cache, DeviceCache)
    cache.page_table.validate()
    return cache


def on_its_way() -> list[Late]:
    return [copy for copy in LateStreams.made[-1].ahead if not copy.happened]


def handed_over(harness: Harness, elsewhere: Harness, prompt: list[int]) -> list[int]:
    """Slots with room for 120 tokens, of which the prompt was computed elsewhere and is in the arena."""
    there, slots = elsewhere.slots(len(prompt)), harness.slots(120)
    elsewhere.prefill(prompt, there, 64)
    blocks = harness.arena.reshape(harness.num_slots, -1)
    blocks[slots[: len(there)]] = elsewhere.arena.reshape(elsewhere.num_slots, -1)[there]
    return slots


def blocks_of(slots: list[int]) -> list[int]:
    """Those that hold the prompt."""
    return slots[: -(-LENGTH // 16)]


def step(harness: Harness, *sequences: tuple[list[int], list[int]]) -> None:
    """Of (slots, tokens after the prompt of LENGTH), one more of each."""
    batch = [SequenceChunk(tokens[-1:], LENGTH + len(tokens) - 1, slots) for slots, tokens in sequences]
    for (_, tokens), logits in zip(sequences, harness.runner.forward(batch), strict=True):
        tokens.append(int(logits.argmax()))


def loads_in_passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The slots, pass by pass and layer by layer, that passes load from here on."""
    seen: list[list[int]] = []
    load = Slabs.load
    monkeypatch.setattr(
        Slabs, "load", lambda slabs, layer, pairs: (seen.append(pairs.slots.tolist()) if len(pairs) else None, load(slabs, layer, pairs))[1]
    )
    return seen


def test_steps_go_on_while_a_prompt_is_loaded_and_the_one_that_it_joins_loads_nothing(
    late: Harness, elsewhere: Harness, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (random_prompt(seed, LENGTH, 10, 250) for seed in range(2))
    wanted, wanted_too = reference.greedy(first, 12), reference.greedy(second, 8)
    slots = late.slots(120)
    tokens = [int(late.prefill(first, slots, 64).argmax())]
    joins, output = handed_over(late, elsewhere, second), wanted_too[:1]
    loading = late.runner.load_ahead(blocks_of(joins))
    assert loading is not None and late.runner.load_ahead(blocks_of(joins)) is loading, "it is on its way already"
    loaded = loads_in_passes(monkeypatch)
    for _ in range(4):
        step(late, (slots, tokens))
    assert not loading.done() and len(on_its_way()) == 1
    on_its_way()[0].happen()
    assert late.runner.load_ahead(blocks_of(joins)) is None
    while len(output) < 8:
        step(late, (slots, tokens), (joins, output))
        cache_of(late)
    assert not loaded and (tokens, output) == (wanted, wanted_too)


def test_a_step_that_comes_before_its_prompt_is_loaded_waits_for_it(late: Harness, elsewhere: Harness, reference: Reference) -> None:
    prompt = random_prompt(2, LENGTH, 10, 250)
    wanted = reference.greedy(prompt, 10)
    slots, output = handed_over(late, elsewhere, prompt), wanted[:1]
    for begin in range(0, 6, 2):
        assert late.runner.load_ahead(blocks_of(slots)[begin : begin + 2]) is not None
    assert len(on_its_way()) == 3
    while len(output) < 10:
        step(late, (slots, output))
        assert not on_its_way()
    assert output == wanted


def test_a_late_copy_does_not_overwrite_what_comes_into_pages_whose_slots_were_given_back(
    late: Harness, elsewhere: Harness, reference: Reference
) -> None:
    gone, prompt = (random_prompt(seed, LENGTH, 10, 250) for seed in (3, 4))
    slots = handed_over(late, elsewhere, gone)
    assert late.runner.load_ahead(blocks_of(slots)) is not None
    late.runner.forget(slots)
    (copy,) = on_its_way()
    others = late.slots(120)
    output = [int(late.prefill(prompt, others, 64).argmax())]
    assert copy.happened, "before anything was written there"
    while len(output) < 10:
        step(late, (others, output))
    assert output == reference.greedy(prompt, 10)


def test_nor_what_is_loaded_ahead_into_them(late: Harness, elsewhere: Harness, reference: Reference) -> None:
    gone, prompt = (random_prompt(seed, LENGTH, 10, 250) for seed in (5, 6))
    wanted = reference.greedy(prompt, 10)
    slots = handed_over(late, elsewhere, gone)
    late.runner.load_ahead(blocks_of(slots))
    late.runner.forget(slots)
    slots, output = handed_over(late, elsewhere, prompt), wanted[:1]
    loading = late.runner.load_ahead(blocks_of(slots))
    assert loading is not None
    loading.wait()
    assert not on_its_way(), "the one before it has ended, too"
    while len(output) < 10:
        step(late, (slots, output))
    assert output == wanted


def test_a_pass_that_takes_the_pages_of_what_is_still_loaded_waits_and_what_has_lost_them_is_loaded_again(
    late: Harness, elsewhere: Harness, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, large = random_prompt(7, LENGTH, 10, 250), random_prompt(8, 16 * PAGES - 40, 10, 250)
    wanted = reference.greedy(prompt, 10)
    slots, output = handed_over(late, elsewhere, prompt), wanted[:1]
    late.runner.load_ahead(blocks_of(slots))
    (copy,) = on_its_way()
    assert late.greedy(large, 3) == reference.greedy(large, 3) and copy.happened
    loaded = loads_in_passes(monkeypatch)
    while len(output) < 10:
        step(late, (slots, output))
        cache_of(late)
    assert loaded and output == wanted


def test_blocks_that_are_on_their_way_for_another_sequence_are_waited_for_and_not_loaded_twice(late: Harness, elsewhere: Harness) -> None:
    slots = blocks_of(handed_over(late, elsewhere, random_prompt(9, LENGTH, 10, 250)))
    whole = late.runner.load_ahead(slots)
    assert late.runner.load_ahead(slots[:2]) is whole and len(on_its_way()) == 1
    late.runner.load_ahead(late.slots(40))
    assert late.runner.load_ahead(slots[2:]) is whole


def test_without_room_there_is_nothing_to_wait_for_and_the_step_loads(late: Harness, elsewhere: Harness, reference: Reference) -> None:
    first, second = (random_prompt(seed, LENGTH, 10, 250) for seed in (10, 11))
    wanted = reference.greedy(second, 6)
    slots = late.slots(16 * (PAGES - 5))
    late.prefill([*first, *first][: 16 * (PAGES - 5)], slots, 4096)
    joins, output = handed_over(late, elsewhere, second), wanted[:1]
    assert late.runner.load_ahead(blocks_of(joins)) is None and not on_its_way()
    while len(output) < 6:
        step(late, (joins, output))
    assert output == wanted


def test_a_load_that_fails_leaves_nothing_behind(
    late: Harness, elsewhere: Harness, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*how: Any) -> None:
        raise RuntimeError("out of order")

    prompt = random_prompt(12, LENGTH, 10, 250)
    wanted = reference.greedy(prompt, 6)
    slots, output = handed_over(late, elsewhere, prompt), wanted[:1]
    with monkeypatch.context() as patched:
        patched.setattr(LateStreams, "load_ahead", broken)
        with pytest.raises(RuntimeError, match="out of order"):
            late.runner.load_ahead(blocks_of(slots))
    cache_of(late)
    while len(output) < 6:
        step(late, (slots, output))
    assert output == wanted


def test_an_arena_is_left_when_nothing_is_read_from_it_any_more(late: Harness, elsewhere: Harness) -> None:
    late.runner.load_ahead(blocks_of(handed_over(late, elsewhere, random_prompt(13, LENGTH, 10, 250))))
    assert on_its_way()
    late.runner.leave_arena()
    assert not on_its_way()


def test_what_is_loaded_ahead_is_not_in_the_copy_times_of_a_pass(path: Path) -> None:
    with on_device(path) as harness:
        slots = harness.slots(64)
        harness.prefill([10] * 40, slots, 64)
        harness.runner.load_ahead(harness.slots(100))
        harness.runner.forward([SequenceChunk([10], 40, slots)])
        assert harness.runner.copy_times().load_ms == 0


def test_in_the_arena_there_is_nothing_to_load(path: Path) -> None:
    harness = tiny_harness(path)
    assert not harness.runner.loads_ahead and harness.runner.load_ahead(harness.slots(100)) is None
