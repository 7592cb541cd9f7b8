from __future__ import annotations

import numpy as np
import pytest

from engine.batch import SequenceChunk
from engine.profiling import measure_decode, measure_prefill
from engine.runner import ModelRunner
from springtide.cost import DecodeCost, PrefillCost
from tests.engine.conftest import TinyFactory


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def before(self, layer: int) -> None:
        self.calls.append(("before", layer))

    def after(self, layer: int) -> None:
        self.calls.append(("after", layer))


def test_hooks_surround_every_layer_in_order(tiny: TinyFactory) -> None:
    harness, _ = tiny()
    recorder = Recorder()
    harness.runner.forward([SequenceChunk([10, 11], 0, [0])], recorder)
    assert recorder.calls == [(when, layer) for layer in range(3) for when in ("before", "after")]


def test_a_layers_slabs_are_final_when_its_after_hook_is_called(tiny: TinyFactory) -> None:
    harness, _ = tiny()
    harness.foul()
    seen = []

    class Snapshots(Recorder):
        def after(self, layer: int) -> None:
            slabs = harness.arena.reshape(harness.num_slots, harness.spec.layers, -1)
            seen.append(slabs[[3, 5], layer].copy())

    harness.runner.forward([SequenceChunk(list(range(10, 40)), 0, [3, 5])], Snapshots())
    slabs = harness.arena.reshape(harness.num_slots, harness.spec.layers, -1)
    assert all(np.array_equal(seen[layer], slabs[[3, 5], layer]) for layer in range(3))


def test_only_the_slots_of_the_batch_are_written_and_a_partial_slab_ends_in_zeros(tiny: TinyFactory) -> None:
    harness, _ = tiny()
    harness.foul()
    harness.runner.forward([SequenceChunk(list(range(10, 30)), 0, [3, 5, 7])])
    memory = harness.arena.reshape(harness.num_slots, -1)
    assert {slot for slot in range(harness.num_slots) if not (memory[slot] == 0xFF).all()} == {3, 5}
    tokens = memory[5].view(np.float32).reshape(harness.spec.layers, 2, harness.spec.block_tokens, -1)
    assert (tokens[:, :, 4:] == 0).all() and (tokens[:, :, :4] != 0).any(axis=-1).all()


def test_logits_come_only_for_the_chunks_that_want_them_in_their_order(tiny: TinyFactory) -> None:
    harness, _ = tiny()
    harness.foul()
    prompts = [[10, 11, 12], [13], [14, 15]]
    alone = [harness.runner.forward([SequenceChunk(prompt, 0, [i])])[0] for i, prompt in enumerate(prompts)]
    batch = [SequenceChunk(prompt, 0, [i], wants_logits=i != 1) for i, prompt in enumerate(prompts)]
    together = harness.runner.forward(batch)
    assert together.shape == (2, 320)
    for row, wanted in zip(together, (alone[0], alone[2]), strict=True):
        assert (row - wanted).abs().max() < 1e-4
    assert harness.runner.forward([SequenceChunk([10], 0, [0], wants_logits=False)]).shape == (0, 320)


def test_of_guesses_logits_come_too_after_those_of_the_token_before_them(tiny: TinyFactory) -> None:
    harness, _ = tiny()
    harness.foul()
    alone = [harness.runner.forward([SequenceChunk([token], i, [0])])[0] for i, token in enumerate((10, 11, 12, 13))]
    other = harness.runner.forward([SequenceChunk([14], 0, [1])])[0]
    batch = [SequenceChunk([20], 0, [2], wants_logits=False), SequenceChunk([11, 12, 13], 1, [0], drafted=2), SequenceChunk([14], 0, [1])]
    together = harness.runner.forward(batch)
    assert together.shape == (4, 320)
    for row, wanted in zip(together, (*alone[1:], other), strict=True):
        assert (row - wanted).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (SequenceChunk([10] * 17, 0, [0]), "1 slots of 16 tokens cannot hold 17 tokens"),
        (SequenceChunk([10], 0, [400]), "slot 400 is outside the arena of 400 slots"),
        (SequenceChunk([10], 0, [-1]), "slot -1 is outside the arena of 400 slots"),
        (SequenceChunk([10], 4096, list(range(257))), "positions 4096..4096 are outside the context of 4096 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(tiny: TinyFactory, chunk: SequenceChunk, message: str) -> None:
    harness, _ = tiny()
    with pytest.raises(ValueError, match=message):
        harness.runner.forward([chunk])


def test_an_arena_that_is_too_small_or_read_only_is_refused(tiny: TinyFactory) -> None:
    harness, _ = tiny()
    model, spec = harness.runner.model, harness.spec
    with pytest.raises(ValueError, match="an arena of 3 slots needs"):
        ModelRunner(model, spec, np.zeros(3 * spec.bytes_per_slot - 1, np.uint8), 3)
    with pytest.raises(ValueError, match="writable"):
        ModelRunner(model, spec, memoryview(bytes(3 * spec.bytes_per_slot)), 3)


def test_measurements_fit_a_cost_model(tiny: TinyFactory) -> None:
    harness, _ = tiny()
    slots = harness.slots(16 * 40)
    prefill = measure_prefill(harness.runner, slots, max_tokens=300, budget_s=0.5)
    decode = measure_decode(harness.runner, slots, max_batch=8, budget_s=0.5)
    assert all(1 <= new <= 300 and new + cached <= 640 for new, cached, _ in prefill)
    assert all(1 <= batch <= 8 and batch <= context <= batch * 640 for batch, context, _ in decode)
    assert PrefillCost.fit(prefill).predict_ms(100) > 0
    assert DecodeCost.fit(decode).predict_ms(4, 400) > 0


def test_one_scratch_slot_is_enough_to_measure(tiny: TinyFactory) -> None:
    harness, _ = tiny()
    assert len(measure_prefill(harness.runner, [0], max_tokens=512, budget_s=0.1)) >= 3
    assert len(measure_decode(harness.runner, [0], max_batch=64, budget_s=0.1)) >= 3
