"""In float32, greedy output is that of transformers, token for token, however the work is cut up."""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import SequenceChunk
from engine.formats.files import describe
from engine.loader import load_model
from engine.runner import ModelRunner
from tests.engine.conftest import TinyFactory
from tests.engine.sequences import Harness
from tests.support.models import make_tiny_llama
from tests.support.reference import Reference, random_prompt

_SCALED = {"rope_theta": 10000.0, "factor": 4.0}
_YARN = {**_SCALED, "rope_type": "yarn", "original_max_position_embeddings": 256}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "grouped heads": {"num_key_value_heads": 2},
    "one KV head": {"num_key_value_heads": 1},
    "a KV head for each head": {"num_key_value_heads": 4},
    "tied embeddings": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "a head size of its own": {"head_dim": 32},
    "linear rope": {"rope_parameters": {**_SCALED, "rope_type": "linear"}},
    "dynamic rope": {"rope_parameters": {**_SCALED, "rope_type": "dynamic"}},
    "llama3 rope": {"rope_parameters": {**_SCALED, **_LLAMA3}},
    "yarn rope": {"rope_parameters": _YARN},
    "yarn rope with all its parameters": {
        "rope_parameters": {**_YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False}
    },
    "yarn rope with a given attention factor": {"rope_parameters": {**_YARN, "attention_factor": 1.3}},
}


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("chunk", [64, 200])
def test_demo_model_equals_transformers(demo_fp32: Harness, demo_reference: Reference, length: int, chunk: int) -> None:
    prompt = random_prompt(length, length)
    demo_fp32.foul()
    assert demo_fp32.greedy(prompt, 4, chunk) == demo_reference.greedy(prompt, 4)


def test_demo_model_equals_transformers_at_1100_tokens_in_one_chunk(demo_fp32: Harness, demo_reference: Reference) -> None:
    """Tiny models are tried with 3,000 tokens."""
    prompt = random_prompt(1100, 1100)
    demo_fp32.foul()
    assert demo_fp32.greedy(prompt, 4, 1100) == demo_reference.greedy(prompt, 4)


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_tiny_models_equal_transformers_in_any_chunks(tiny: TinyFactory, kind: str) -> None:
    harness, reference = tiny(**TINY_MODELS[kind])
    for length in (1, 17, 300):
        prompt = random_prompt(length, length, 10, 250)
        wanted = reference.greedy(prompt, 16)
        for chunk in (64, 200, length):
            harness.foul()
            assert harness.greedy(prompt, 16, chunk) == wanted, f"{length} tokens in chunks of {chunk}"


def test_a_tiny_model_equals_transformers_at_3000_tokens(tiny: TinyFactory) -> None:
    harness, reference = tiny(**TINY_MODELS["llama3 rope"])
    prompt = random_prompt(0, 3000, 10, 250)
    wanted = reference.greedy(prompt, 8)
    for chunk in (64, 200, 3000):
        harness.foul()
        assert harness.greedy(prompt, 8, chunk) == wanted


def test_a_cached_prefix_changes_nothing(tiny: TinyFactory) -> None:
    harness, reference = tiny()
    prompt = random_prompt(1, 500, 10, 250)
    harness.foul()
    slots = harness.slots(600)
    harness.prefill(prompt[:320], slots, chunk=100)
    other = harness.slots(600)
    shared = [*slots[:20], *other[20:]]
    assert harness.greedy(prompt, 12, chunk=128, start=320, slots=shared) == reference.greedy(prompt, 12)


def test_copied_slots_are_as_good_as_computed_ones(tiny: TinyFactory) -> None:
    """As when blocks come from another node."""
    harness, reference = tiny()
    prompt = random_prompt(2, 100, 10, 250)
    harness.foul()
    slots, elsewhere = harness.slots(130), harness.slots(130)
    harness.prefill(prompt, slots, chunk=64)
    memory = harness.arena.reshape(harness.num_slots, -1)
    memory[elsewhere] = memory[slots]
    memory[slots] = 0xFF
    assert harness.greedy([*prompt, 50], 10, start=100, slots=elsewhere) == reference.greedy([*prompt, 50], 10)


def test_prefills_and_decodes_of_many_sequences_share_a_pass(tiny: TinyFactory) -> None:
    harness, reference = tiny()
    harness.foul()
    prompts = [random_prompt(10 + length, length, 10, 250) for length in (1, 5, 16, 33, 90, 91, 200, 700)]
    wanted = [reference.greedy(prompt, 10) for prompt in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    slots = [harness.slots(len(prompt) + 10) for prompt in prompts]
    done = [0 for _ in prompts]
    for step in range(60):
        batch, members = [], []
        for i, prompt in enumerate(prompts):
            if len(outputs[i]) == 10 or i > step:
                continue
            text = [*prompt, *outputs[i]]
            chunk = text[done[i] : done[i] + 48]
            members.append((i, done[i] + len(chunk) == len(text)))
            batch.append(SequenceChunk(chunk, done[i], slots[i], wants_logits=members[-1][1]))
            done[i] += len(chunk)
        if not batch:
            break
        logits = iter(harness.runner.forward(batch))
        for i, is_last in members:
            if is_last:
                outputs[i].append(int(next(logits).argmax()))
    assert outputs == wanted


def test_stages_of_a_pipeline_together_are_the_model(tiny: TinyFactory, tmp_path) -> None:
    _, reference = tiny()
    info = describe(str(make_tiny_llama(tmp_path / "tiny")))
    prompt = random_prompt(3, 90, 10, 250)
    spec = info.kv_spec("float32", 16)
    shared = np.zeros(10 * spec.bytes_per_slot, np.uint8)
    first, last = (ModelRunner(load_model(info, "float32", layers), spec, shared, 10) for layers in ((0, 1), (1, 3)))
    whole = Harness(load_model(info, "float32"), spec, num_slots=10)
    batch = [SequenceChunk(prompt, 0, [4, 1, 9, 6, 3, 0])]
    hidden = last.forward_layers(batch, first.forward_layers(batch, None))
    logits = last.model.logits(hidden[-1:])
    torch.testing.assert_close(logits[0], reference.logits(prompt)[-1], rtol=1e-4, atol=1e-4)
    whole.arena[:] = 0
    whole.runner.forward(batch)
    assert (shared == whole.arena).all(), "each stage wrote its own layers of the arena that they share"


def test_bf16_stays_close(demo_bf16: Harness, demo_reference: Reference) -> None:
    """Single prompts may be off by several times the median, the shortest ones most: their first token's activations are thousands of times
    as large as others."""
    errors = []
    for length in (1, 3, 20, 100, 600):
        for seed in range(3):
            demo_bf16.foul()
            prompt = random_prompt(1000 * seed + length, length)
            logits = demo_bf16.prefill(prompt, demo_bf16.slots(length), chunk=200)
            wanted = demo_reference.logits(prompt)[-1]
            errors.append(float((logits - wanted).pow(2).mean().sqrt() / wanted.std()))
            if length >= 20:
                assert float(torch.softmax(wanted, -1)[logits.argmax()]) > 0.5 * float(torch.softmax(wanted, -1).max())
    assert median(errors) < 0.1 and max(errors) < 0.5, errors


def test_bf16_checkpoints_give_the_same_in_float32(tmp_path) -> None:
    info = describe(str(make_tiny_llama(tmp_path / "tiny", dtype="bfloat16")))
    harness = Harness(load_model(info, "float32"), info.kv_spec("float32", 16), num_slots=20)
    prompt = random_prompt(4, 50, 10, 250)
    assert harness.greedy(prompt, 10) == Reference.from_directory(tmp_path / "tiny").greedy(prompt, 10)


def test_sharded_weights_are_read(tmp_path) -> None:
    path = make_tiny_llama(tmp_path / "tiny", max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    info = describe(str(path))
    harness = Harness(load_model(info, "float32"), info.kv_spec("float32", 16), num_slots=20)
    prompt = random_prompt(5, 50, 10, 250)
    assert harness.greedy(prompt, 10) == Reference.from_directory(path).greedy(prompt, 10)


def test_a_new_arena_is_attached_in_place_of_the_old(tiny: TinyFactory) -> None:
    harness, reference = tiny()
    prompt = random_prompt(6, 40, 10, 250)
    runner = ModelRunner(harness.runner.model, harness.spec, harness.arena, harness.num_slots)
    bigger = bytearray(8 * harness.spec.bytes_per_slot)
    runner.set_arena(memoryview(bigger), 8)
    logits = runner.forward([SequenceChunk(prompt, 0, [7, 2, 5])])
    assert int(logits[0].argmax()) == reference.greedy(prompt, 1)[0]
    assert any(bigger)
