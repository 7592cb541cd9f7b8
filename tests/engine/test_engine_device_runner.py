"""A model whose paged cache lies apart from the arena computes what one does that computes in it. The device is the CPU, where pages,
copies and their order are the same as on a GPU, and a GPU where there is one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends import choice as backends
from engine.batch import SequenceChunk
from engine.device.base import Device, find
from engine.device.streams import CopyTimes
from engine.formats.files import describe
from engine.kv_cache import device_cache
from engine.kv_cache.device_cache import DeviceCache
from engine.kv_cache.page_table import OutOfPages
from engine.loader import load_model
from engine.runner import ModelRunner
from springtide.errors import ConfigError
from tests.engine.conftest import tiny_harness
from tests.engine.sequences import Harness
from tests.engine.test_engine_exactness import TINY_MODELS
from tests.engine.test_engine_runner import Recorder
from tests.engine.test_engine_scoring import scored
from tests.support import flashinfer_twin
from tests.support.models import make_tiny_llama, make_tiny_model
from tests.support.reference import Reference, random_prompt
from tests.support.scores import assert_scores_are_those_of

CPU = torch.device("cpu")
SLOTS = 120
where = CPU
"""The device of the test that runs."""

TORCH = "torch"
FLASHINFER = "flashinfer"


@contextmanager
def on_device(path: Path, kernels: str = TORCH, **limits: Any) -> Iterator[Harness]:
    """A harness around the model at `path` on a device with these `limits`, whose attention is torch's or FlashInfer's."""
    info = describe(str(path))
    device = Device(where, **limits)
    with pytest.MonkeyPatch.context() as patched:
        if kernels == FLASHINFER:
            patched.setitem(sys.modules, "flashinfer", flashinfer_twin)
            patched.setattr(backends, "choose", lambda config, dtype, kernels, device: backends.flashinfer(device))
        harness = Harness(load_model(info, "float32", device=device), info.kv_spec("float32", 16), num_slots=SLOTS)
        with closing(harness.runner):
            yield harness


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """FlashInfer's own kernels do not compute in float32: test_engine_device_gpu.py."""
    global where
    if request.param != "cpu":
        if not torch.cuda.is_available():
            pytest.skip("there is no CUDA device")
        if "kernels" in request.fixturenames and request.getfixturevalue("kernels") == FLASHINFER:
            pytest.skip("the twin of FlashInfer computes on the CPU")
    where = torch.device(request.param)
    yield
    where = CPU


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("device") / "model")


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference.from_directory(path)


@pytest.fixture
def in_arena(path: Path) -> Harness:
    """The model over its arena itself."""
    return tiny_harness(path)


def page_table_of(harness: Harness) -> Any:
    cache = harness.runner.cache
    assert isinstance(cache, DeviceCache)
    cache.page_table.validate()
    return cache.page_table


def renew(harness: Harness) -> None:
    """All slots were given back, and others have written into them."""
    harness.foul()
    harness.runner.forget(range(harness.num_slots))


@pytest.mark.parametrize("kernels", [TORCH, FLASHINFER])
@pytest.mark.parametrize("kind", ["grouped heads", "one KV head", "llama3 rope", "biases"])
def test_tokens_are_those_of_transformers_in_any_chunks(tmp_path: Path, kind: str, kernels: str) -> None:
    path = make_tiny_llama(tmp_path / "model", **TINY_MODELS[kind])
    reference = Reference.from_directory(path)
    with on_device(path, kernels) as harness:
        for length in (1, 17, 300):
            prompt = random_prompt(length, length, 10, 250)
            wanted = reference.greedy(prompt, 20)
            for chunk in (64, 200, length):
                renew(harness)
                assert harness.greedy(prompt, 20, chunk) == wanted, f"{length} tokens in chunks of {chunk}"


@pytest.mark.parametrize("kernels", [TORCH, FLASHINFER])
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Mistral", {"sliding_window": 40}),
        ("Qwen3", {"head_dim": 32}),
        ("Gemma", {"head_dim": 32}),
        ("Qwen3Moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}),
    ],
)
def test_families_are_those_of_transformers(tmp_path: Path, family: str, config: dict[str, Any], kernels: str) -> None:
    path = make_tiny_model(tmp_path / "model", family, **config)
    reference = Reference.from_directory(path)
    with on_device(path, kernels, step_graphs=256) as harness:
        prompt = random_prompt(7, 90, 10, 250)
        assert harness.greedy(prompt, 20, 64) == reference.greedy(prompt, 20)


@pytest.mark.parametrize("kernels", [TORCH, FLASHINFER])
def test_prefills_and_decodes_of_many_sequences_share_a_pass(path: Path, reference: Reference, kernels: str) -> None:
    prompts = [random_prompt(10 + length, length, 10, 250) for length in (1, 5, 16, 33, 90, 91, 200)]
    wanted = [reference.greedy(prompt, 20) for prompt in prompts]
    with on_device(path, kernels, step_graphs=256) as harness:
        assert together(harness, prompts, 20) == wanted


@pytest.mark.parametrize("pages", [None, 9])
@pytest.mark.parametrize("kernels", [TORCH, FLASHINFER])
def test_wrong_guesses_leave_nothing_behind_in_the_arena(path: Path, in_arena: Harness, kernels: str, pages: int | None) -> None:
    """Nor do they elsewhere: of another sequence a token is computed between its steps, for which 9 pages have no room beside it."""
    prompt = random_prompt(3, 50, 10, 250)
    slots = in_arena.slots(len(prompt) + 60)
    tokens = in_arena.greedy(prompt, 60, slots=slots)
    with on_device(path, kernels, most_pages=pages) as harness:
        for wrong in (0, 1, 5):
            renew(harness)
            of_device, of_other = harness.slots(len(prompt) + 60), harness.slots(50)
            other = harness.prefill(prompt[::-1], of_other, 4096)

            def between() -> None:
                again = harness.runner.forward([SequenceChunk(prompt[:1], 49, of_other)])[0]  # noqa: B023
                assert torch.allclose(again, other, atol=1e-4)  # noqa: B023

            assert harness.guessing(prompt, tokens, wrong, of_device, between) == tokens
            blocks = (len(prompt) + 59) // 16
            whole = [
                one.arena.reshape(one.num_slots, -1)[of[:blocks]].view(np.float32) for one, of in ((harness, of_device), (in_arena, slots))
            ]
            assert np.allclose(*whole, atol=1e-4)


def test_nothing_is_guessed_on_cards(path: Path, in_arena: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_arena.runner.takes_drafts
    with on_device(path) as harness:
        assert harness.runner.takes_drafts == (where.type == "cpu")
        with monkeypatch.context() as patched:
            patched.setattr(Device, "is_cuda", True)
            assert not harness.runner.takes_drafts


def together(harness: Harness, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Each prompt comes a step after the one before, in chunks of 48."""
    outputs: list[list[int]] = [[] for _ in prompts]
    slots = [harness.slots(len(prompt) + num_tokens) for prompt in prompts]
    done = [0 for _ in prompts]
    step = 0
    while any(len(output) < num_tokens for output in outputs):
        batch, members = [], []
        for i, prompt in enumerate(prompts):
            if len(outputs[i]) == num_tokens or i > step:
                continue
            text = [*prompt, *outputs[i]]
            chunk = text[done[i] : done[i] + 48]
            members.append((i, done[i] + len(chunk) == len(text)))
            batch.append(SequenceChunk(chunk, done[i], slots[i], wants_logits=members[-1][1]))
            done[i] += len(chunk)
        logits = iter(harness.runner.forward(batch))
        for i, is_last in members:
            if is_last:
                outputs[i].append(int(next(logits).argmax()))
        step += 1
    return outputs


def test_decode_steps_are_recorded_once_for_each_size_and_replayed(
    path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, replayed = [], []

    def record(compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        size = len(recorded)
        recorded.append(compute)
        return lambda: (replayed.append(size), compute())[1]

    if where != CPU:
        pytest.skip("FlashInfer's twin computes on the CPU")
    monkeypatch.setattr(device_cache, "as_it_is", record)
    prompts = [random_prompt(seed, 30 + seed, 10, 250) for seed in range(3)]
    with on_device(path, FLASHINFER, step_graphs=256) as harness:
        assert together(harness, prompts, 20) == [reference.greedy(prompt, 20) for prompt in prompts]
        page_table_of(harness)
        assert set(harness.runner.cache.steps.recorded) == {1, 2, 4} and not harness.runner.cache.steps.failed  # type: ignore[attr-defined]
    assert len(recorded) == 3, "steps of 1, 2 and, filled up, 3 sequences"
    assert len(replayed) >= 19 and set(replayed) == {0, 1, 2}


def test_with_few_pages_sequences_take_turns_on_them(path: Path, reference: Reference) -> None:
    """Three sequences of 8 blocks each over 9 pages: each step evicts what another has computed, newer than the arena or not."""
    prompts = [random_prompt(seed, 100, 10, 250) for seed in range(3)]
    wanted = [reference.greedy(prompt, 24) for prompt in prompts]
    with on_device(path, most_pages=9) as harness:
        slots = [harness.slots(124) for _ in prompts]
        tokens = [[int(harness.prefill(prompt, own, 40).argmax())] for prompt, own in zip(prompts, slots, strict=True)]
        for _ in range(23):
            for prompt, own, output in zip(prompts, slots, tokens, strict=True):
                position = len(prompt) + len(output) - 1
                output.append(int(harness.runner.forward([SequenceChunk(output[-1:], position, own)])[0].argmax()))
                page_table_of(harness)
    assert tokens == wanted


def test_a_pass_that_needs_more_pages_than_there_are_says_so_and_does_no_harm(path: Path, reference: Reference) -> None:
    prompt = random_prompt(1, 60, 10, 250)
    with on_device(path, most_pages=5) as harness:
        slots = harness.slots(100)
        tokens = [int(harness.prefill(prompt, slots, 64).argmax())]
        with pytest.raises(OutOfPages, match="needs 6 pages of the device's 5: raise device_memory"):
            harness.runner.forward([SequenceChunk([1] * 90, 0, harness.slots(90))])
        while len(tokens) < 10:
            tokens.append(int(harness.runner.forward([SequenceChunk(tokens[-1:], 59 + len(tokens), slots)])[0].argmax()))
    assert tokens == reference.greedy(prompt, 10)


@pytest.mark.parametrize("kernels", [TORCH, FLASHINFER])
def test_a_step_of_more_sequences_than_there_are_pages_for_goes_in_several(path: Path, reference: Reference, kernels: str) -> None:
    prompts = [random_prompt(seed, 40, 10, 250) for seed in range(5)]
    wanted = [reference.greedy(prompt, 20) for prompt in prompts]
    with on_device(path, kernels, most_pages=9, step_graphs=256) as harness:
        slots = [harness.slots(60) for _ in prompts]
        tokens = [[int(harness.prefill(prompt, own, 40).argmax())] for prompt, own in zip(prompts, slots, strict=True)]
        for step in range(19):
            batch = [SequenceChunk(output[-1:], 40 + step, own) for output, own in zip(tokens, slots, strict=True)]
            for output, logits in zip(tokens, harness.runner.forward(batch), strict=True):
                output.append(int(logits.argmax()))
    assert tokens == wanted


def test_parts_of_a_batch_may_want_no_logits(path: Path) -> None:
    with on_device(path, most_pages=4) as harness:
        batch = [SequenceChunk([10] * 50, 0, harness.slots(50), wants_logits=wanted) for wanted in (False, True)]
        assert len(harness.runner.forward(batch)) == 1


@pytest.mark.parametrize("kernels", [TORCH, FLASHINFER])
def test_a_prompt_is_scored_as_transformers_does(path: Path, reference: Reference, kernels: str) -> None:
    prompt = random_prompt(4, 100, 10, 250)
    with on_device(path, kernels) as harness:
        for chunk in (33, 100):
            assert_scores_are_those_of(reference, prompt, scored(harness, prompt, chunk, 5), 5)


def test_a_prefix_that_others_have_put_into_the_arena_is_loaded(path: Path, reference: Reference, in_arena: Harness) -> None:
    prompt = random_prompt(2, 200, 10, 250)
    elsewhere = in_arena.slots(200)
    in_arena.prefill(prompt[:160], elsewhere, 64)
    with on_device(path) as harness:
        slots = harness.slots(230)
        blocks(harness)[slots[:10]] = blocks(in_arena)[elsewhere[:10]]
        assert harness.greedy(prompt, 12, 64, start=160, slots=slots) == reference.greedy(prompt, 12)


def test_a_prefix_that_arrives_layer_by_layer_is_loaded_after_each_layer_s_hook(
    path: Path, reference: Reference, in_arena: Harness
) -> None:
    prompt = random_prompt(3, 100, 10, 250)
    elsewhere = in_arena.slots(100)
    in_arena.prefill(prompt[:96], elsewhere, 64)
    with on_device(path) as harness:
        slots = harness.slots(100)

        class Arrivals(Recorder):
            def before(self, layer: int) -> None:
                slabs(harness)[slots[:6], layer] = slabs(in_arena)[elsewhere[:6], layer]

        logits = harness.runner.forward([SequenceChunk(prompt[96:], 96, slots)], Arrivals())
    assert int(logits[0].argmax()) == reference.greedy(prompt, 1)[0]


def test_slots_that_were_given_back_are_read_anew(path: Path, reference: Reference, in_arena: Harness) -> None:
    """A slot that had another block on the device gets a prefix from elsewhere."""
    prompt = random_prompt(4, 100, 10, 250)
    elsewhere = in_arena.slots(100)
    in_arena.prefill(prompt[:80], elsewhere, 64)
    with on_device(path) as harness:
        slots = harness.slots(120)
        harness.prefill(random_prompt(5, 90, 10, 250), slots, 64)
        harness.runner.forget(slots)
        blocks(harness)[slots[:5]] = blocks(in_arena)[elsewhere[:5]]
        assert harness.greedy(prompt, 10, 64, start=80, slots=slots) == reference.greedy(prompt, 10)


def test_full_blocks_are_in_the_arena_when_the_pass_that_filled_them_has_returned(path: Path, in_arena: Harness) -> None:
    prompt = random_prompt(6, 60, 10, 250)
    with on_device(path) as harness:
        slots = harness.slots(120)
        mine, theirs = [harness, in_arena], []
        tokens = [int(one.prefill(prompt, slots, 64).argmax()) for one in mine][:1]
        for length in range(61, 110):
            for one in mine:
                logits = one.runner.forward([SequenceChunk(tokens[-1:], length - 1, slots)])
            tokens.append(int(logits[0].argmax()))
            full = slots[: length // 16]
            assert alike(blocks(harness)[full], blocks(in_arena)[full]), f"at {length} tokens"
            theirs.append(set(page_table_of(harness).dirty_slots()))
        assert all(len(dirty) <= 1 for dirty in theirs), "only the last block is newer than the arena"


def test_with_hooks_partial_blocks_are_in_the_arena_too_and_end_in_zeros(path: Path, in_arena: Harness) -> None:
    prompt = random_prompt(7, 75, 10, 250)
    with on_device(path) as harness:
        slots = harness.slots(75)
        for one in (harness, in_arena):
            for begin, end in ((0, 40), (40, 75)):
                one.runner.forward([SequenceChunk(prompt[begin:end], begin, slots)], Recorder())
        assert alike(blocks(harness)[slots], blocks(in_arena)[slots])
        assert not page_table_of(harness).dirty_slots().size
        untouched = [slot for slot in range(SLOTS) if slot not in slots]
        assert (blocks(harness)[untouched] == 0xFF).all()


def test_hooks_surround_every_layer_in_order_and_a_layer_s_slabs_are_final_after_it(path: Path) -> None:
    with on_device(path) as harness:
        slots, seen = harness.slots(30), []

        class Snapshots(Recorder):
            def after(self, layer: int) -> None:
                super().after(layer)
                seen.append(slabs(harness)[slots, layer].copy())

        recorder = Snapshots()
        harness.runner.forward([SequenceChunk(list(range(10, 40)), 0, slots)], recorder)
        assert recorder.calls == [(when, layer) for layer in range(3) for when in ("before", "after")]
        assert all(np.array_equal(seen[layer], slabs(harness)[slots, layer]) for layer in range(3))


def test_a_pass_that_a_hook_stops_leaves_nothing_behind(path: Path, reference: Reference) -> None:
    prompt = random_prompt(8, 100, 10, 250)
    with on_device(path) as harness:
        slots = harness.slots(120)
        harness.prefill(prompt[:40], slots, 64)

        class Missing(Recorder):
            def before(self, layer: int) -> None:
                if layer == 1:
                    raise LookupError

        with pytest.raises(LookupError):
            harness.runner.forward([SequenceChunk(prompt[40:], 40, slots)], Missing())
        page_table_of(harness)
        assert harness.greedy(prompt, 10, 64, start=40, slots=slots) == reference.greedy(prompt, 10)


def test_slots_outside_the_arena_are_refused(path: Path) -> None:
    with on_device(path) as harness, pytest.raises(ValueError, match=f"slot {SLOTS} is outside the arena of {SLOTS} slots"):
        harness.runner.forward([SequenceChunk([1] * 20, 0, [0, SLOTS])])


def test_a_new_arena_is_computed_in_from_its_beginning(path: Path, reference: Reference) -> None:
    prompt = random_prompt(9, 40, 10, 250)
    with on_device(path) as harness:
        harness.prefill(random_prompt(10, 40, 10, 250), [7, 2, 5], 64)
        bigger = bytearray((SLOTS + 1) * harness.spec.bytes_per_slot)
        harness.runner.leave_arena()
        harness.runner.set_arena(memoryview(bigger), SLOTS + 1)
        logits = harness.runner.forward([SequenceChunk(prompt, 0, [SLOTS, 2, 5])])
    assert int(logits[0].argmax()) == reference.greedy(prompt, 1)[0]
    assert any(bigger)


def test_stages_of_a_pipeline_have_their_own_layers_on_their_devices(path: Path, reference: Reference) -> None:
    info = describe(str(path))
    spec = info.kv_spec("float32", 16)
    prompt = random_prompt(11, 90, 10, 250)
    stages = []
    for layers in ((0, 1), (1, 3)):
        arena = np.full(10 * spec.bytes_per_slot, 0xFF, np.uint8)
        stages.append(ModelRunner(load_model(info, "float32", layers, device=Device(where, memory_share=0.2)), spec, arena, 10))
    with closing(stages[0]), closing(stages[1]):
        for begin, end in ((0, 50), (50, 90)):
            batch = [SequenceChunk(prompt[begin:end], begin, [4, 1, 9, 6, 3, 0])]
            hidden: torch.Tensor | None = None
            for stage in stages:
                hidden = stage.forward_layers(batch, hidden, Recorder())
            assert hidden is not None
        assert int(stages[-1].logits(batch, hidden)[0].argmax()) == reference.greedy(prompt, 1)[0]


def test_a_refused_pass_has_no_copies(path: Path) -> None:
    with on_device(path, most_pages=3) as harness:
        slots = harness.slots(64)
        harness.runner.forward([SequenceChunk([10] * 40, 0, slots)], Recorder())
        assert harness.runner.copy_times().store_ms > 0
        with pytest.raises(OutOfPages):
            harness.runner.forward([SequenceChunk([10] * 64, 0, slots)], Recorder())
        assert harness.runner.copy_times() == CopyTimes()


@pytest.mark.parametrize("kernels", [TORCH, FLASHINFER])
def test_what_is_prepared_before_the_first_pass_touches_nothing(path: Path, reference: Reference, kernels: str) -> None:
    prompt = random_prompt(12, 40, 10, 250)
    with on_device(path, kernels, step_graphs=4) as harness:
        harness.runner.warm_up()
        assert (harness.arena == 0xFF).all() and not page_table_of(harness).dirty_slots().size
        steps = harness.runner.cache.steps  # type: ignore[attr-defined]
        assert list(steps.recorded) == ([4, 2, 1] if kernels == FLASHINFER else [])
        assert harness.greedy(prompt, 10, slots=[0, 5, 3, 4]) == reference.greedy(prompt, 10)


def test_stages_prepare_themselves_too(path: Path) -> None:
    info = describe(str(path))
    spec = info.kv_spec("float32", 16)
    arena = np.full(4 * spec.bytes_per_slot, 0xFF, np.uint8)
    with closing(ModelRunner(load_model(info, "float32", (1, 3), device=Device(where)), spec, arena, 4)) as stage:
        stage.warm_up()
    assert (arena == 0xFF).all()


def test_what_copies_took_is_told(path: Path) -> None:
    with on_device(path, most_pages=6) as harness:
        slots = harness.slots(64)
        harness.prefill([10] * 64, slots, 64)
        harness.runner.forget(slots)
        harness.runner.forward([SequenceChunk([10], 64, [*slots, *harness.slots(1)])], Recorder())
        times = harness.runner.copy_times()
        assert times.load_ms > 0 and times.store_ms > 0
        assert times.load_waited_ms <= times.load_ms and times.store_waited_ms <= times.store_ms


def test_cuda_that_is_not_there_is_refused_by_name() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert find("auto") is None and find("cpu") is None
    with pytest.raises(ConfigError, match="device: this machine has no CUDA device"):
        find("cuda")


def blocks(harness: Harness) -> np.ndarray:
    """[slots, bytes of one]."""
    return harness.arena.reshape(harness.num_slots, -1)


def slabs(harness: Harness) -> np.ndarray:
    """[slots, layers, bytes of one]."""
    return harness.arena.reshape(harness.num_slots, harness.spec.layers, -1)


def alike(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Float32 bytes, computed on different devices."""
    return np.allclose(ours.view(np.float32), theirs.view(np.float32), rtol=1e-4, atol=1e-4, equal_nan=True)
