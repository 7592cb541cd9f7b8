"""What only a GPU can show: FlashInfer's kernels, recorded steps, drawing on the device, and copies that computing hides."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from engine.batch import SequenceChunk
from engine.device.base import Device
from engine.loader import load_model
from engine.sampling.sampler import sample
from springtide.modelinfo import ModelInfo
from tests.engine.sequences import Harness
from tests.engine.test_engine_device_sampling import random_rows
from tests.engine.test_engine_runner import Recorder
from tests.support.reference import Reference, random_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
needs_flashinfer = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")


GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module", params=["auto", "plain"])
def demo(request: pytest.FixtureRequest, demo_info: ModelInfo) -> Iterator[Harness]:
    """The demo model in bfloat16 on the GPU."""
    device = Device(GPU, memory_share=0.2, step_graphs=64)
    model = load_model(demo_info, "bfloat16", kernels=request.param, device=device)
    harness = Harness(model, demo_info.kv_spec("bfloat16", 64), num_slots=200)
    with closing(harness.runner):
        yield harness


def renew(harness: Harness) -> None:
    harness.foul()
    harness.runner.forget(range(harness.num_slots))


@needs_flashinfer
def test_flashinfer_is_what_is_chosen(demo_info: ModelInfo) -> None:
    model = load_model(demo_info, "bfloat16", (0, 1), device=Device(GPU))
    assert model.backend.name == "flashinfer"


def test_bf16_stays_close_to_transformers_in_float32(demo: Harness, demo_reference: Reference) -> None:
    for length in (20, 100, 600, 2000):
        renew(demo)
        prompt = random_prompt(length, length)
        logits = demo.prefill(prompt, demo.slots(length), chunk=200).cpu()
        wanted = demo_reference.logits(prompt)[-1]
        assert float((logits - wanted).pow(2).mean().sqrt() / wanted.std()) < 0.2
        assert float(torch.softmax(wanted, -1)[logits.argmax()]) > 0.5 * float(torch.softmax(wanted, -1).max())


@needs_flashinfer
@pytest.mark.parametrize("demo", ["auto"], indirect=True)
def test_steps_that_are_replayed_give_what_steps_give_that_are_launched(demo: Harness) -> None:
    renew(demo)
    demo.runner.warm_up()
    steps = demo.runner.cache.steps  # type: ignore[attr-defined]
    assert set(steps.recorded) == {1, 2, 4, 8, 16, 32, 64} and not steps.failed
    prompts = [random_prompt(seed, 50 + 30 * seed) for seed in range(5)]
    slots = [demo.slots(len(prompt) + 80) for prompt in prompts]
    for prompt, own in zip(prompts, slots, strict=True):
        demo.prefill(prompt, own, 512)
    for step in range(70):
        batch = [SequenceChunk([100 + step], len(prompt) + step, own) for prompt, own in zip(prompts, slots, strict=True)]
        replayed = demo.runner.forward(batch).clone()
        # With hooks a pass is launched layer by layer.
        launched = demo.runner.forward(batch, Recorder())
        assert float((replayed - launched).abs().max()) < 0.05 * float(launched.std()), f"step {step}"
    assert not steps.failed, "they were replayed"


def test_drawn_on_the_device_tokens_are_those_of_the_cpu() -> None:
    """But where a draw falls so near to the border of two tokens that the last bits of a sum decide."""
    dice = random.Random(0)
    noise = torch.Generator().manual_seed(0)
    same = total = 0
    for _ in range(100):
        rows = random_rows(dice, dice.randint(1, 9))
        logits = torch.stack([torch.randperm(5000, generator=noise) for _ in rows]) * (dice.choice([2.0, 8.0]) / 5000)
        pairs = zip(sample(logits.to(GPU), rows), sample(logits, rows), rows, strict=True)
        for ours, theirs, row in pairs:
            assert ours.token_id == theirs.token_id or not row.params.greedy
            same += ours.token_id == theirs.token_id
            total += 1
    assert same >= 0.98 * total


def test_a_layer_s_slabs_are_in_the_arena_when_its_hook_is_called(demo: Harness) -> None:
    renew(demo)
    slots, seen = demo.slots(2048), []
    slabs = demo.arena.reshape(demo.num_slots, demo.spec.layers, -1)

    class Snapshots(Recorder):
        def after(self, layer: int) -> None:
            super().after(layer)
            seen.append(slabs[slots, layer].copy())

    recorder = Snapshots()
    demo.runner.forward([SequenceChunk(random_prompt(1, 2048), 0, slots)], recorder)
    assert [layer for when, layer in recorder.calls if when == "after"] == list(range(demo.spec.layers))
    assert all((seen[layer] == slabs[slots, layer]).all() and not (seen[layer] == 0xFF).all() for layer in range(demo.spec.layers))


def test_copies_are_timed(demo: Harness) -> None:
    renew(demo)
    slots = demo.slots(2048)
    demo.runner.forward([SequenceChunk(random_prompt(2, 2000), 0, slots)], Recorder())
    demo.runner.forget(slots)
    demo.runner.forward([SequenceChunk(random_prompt(3, 40), 2000, slots)], Recorder())
    times = demo.runner.copy_times()
    assert times.load_ms > 0 and times.store_ms > 0 and times.load_waited_ms >= 0 and times.store_waited_ms >= 0


def test_what_is_loaded_ahead_beside_steps_gives_what_a_step_loads_itself(demo: Harness) -> None:
    renew(demo)
    prompt, other = random_prompt(4, 2000), random_prompt(5, 60)
    slots, beside = demo.slots(2048), demo.slots(128)
    demo.prefill(prompt, slots, 512)
    demo.runner.forward([SequenceChunk([100], 2000, slots)], Recorder())
    demo.prefill(other, beside, 512)
    demo.runner.forget(slots)
    in_step = demo.runner.forward([SequenceChunk([100], 2000, slots)]).clone()
    assert demo.runner.copy_times().load_ms > 0
    demo.runner.forget(slots)
    loading = demo.runner.load_ahead(slots)
    assert loading is not None
    for step in range(20):
        demo.runner.forward([SequenceChunk([100 + step], 60 + step, beside)])
        assert demo.runner.copy_times().load_ms == 0
    loading.wait()
    assert loading.done() and demo.runner.load_ahead(slots) is None
    ahead = demo.runner.forward([SequenceChunk([100], 2000, slots)])
    assert demo.runner.copy_times().load_ms == 0
    assert float((ahead - in_step).abs().max()) < 0.01 * float(in_step.std())


def test_a_step_of_what_is_still_loaded_ahead_waits_for_it(demo: Harness) -> None:
    renew(demo)
    slots = demo.slots(2048)
    demo.prefill(random_prompt(6, 2000), slots, 512)
    wanted = demo.runner.forward([SequenceChunk([100], 2000, slots)], Recorder()).clone()
    others = demo.slots(2048)
    for seed in range(20):
        demo.runner.forget(slots)
        demo.prefill(random_prompt(100 + seed, 2000), others, 512)  # into the pages that were theirs
        demo.runner.forget(others)
        demo.runner.load_ahead(slots)
        logits = demo.runner.forward([SequenceChunk([100], 2000, slots)])
        assert float((logits - wanted).abs().max()) < 0.05 * float(wanted.std())
