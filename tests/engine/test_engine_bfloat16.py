"""In bfloat16, computed by the native kernels in one thread, no bit of a token depends on what is computed beside it
(docs/packages/engine.md, Exactness). There is one thread by tests/engine/conftest.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.backends import choice as backends
from engine.batch import SequenceChunk
from engine.formats.files import describe, read_config
from engine.loader import load_model
from tests.engine.sequences import Harness
from tests.support.models import demo_gguf, make_tiny_model
from tests.support.reference import random_prompt

pytestmark = [
    pytest.mark.skipif(not backends.native_can_run(read_config(demo_gguf())), reason="this machine has no AVX2"),
    pytest.mark.usefixtures("instruction_set"),
]

FAMILIES = {"Llama": {}, "Qwen2": {}, "Qwen3": {}, "Gemma": {"tie_word_embeddings": True}, "grouped Llama": {"num_key_value_heads": 1}}
CHUNKS = (1, 7, 16, 25, 64, 97, 200)
LENGTH, OUTPUT_TOKENS, BLOCK_TOKENS = 300, 12, 16


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    family = request.param.rpartition(" ")[2]
    path = make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", family, head_dim=32, **FAMILIES[request.param])
    info = describe(str(path))
    harness = Harness(load_model(info, "bfloat16"), info.kv_spec("bfloat16", BLOCK_TOKENS), num_slots=400)
    assert harness.runner.model.backend.name == "native"
    return harness


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> None:
    for name in {"tiny", "demo_bf16"} & set(request.fixturenames):
        request.getfixturevalue(name).foul()


def prompt_of(seed: int, length: int = LENGTH) -> list[int]:
    return random_prompt(seed, length, 10, 250)


def blocks(harness: Harness, slots: Sequence[int], num_tokens: int) -> bytes:
    """The keys and values of whole blocks."""
    arena = harness.arena.reshape(harness.num_slots, -1)
    return np.ascontiguousarray(arena[slots[: num_tokens // harness.spec.block_tokens]]).tobytes()


def test_chunks_change_no_bit(tiny: Harness) -> None:
    prompt, results = prompt_of(1), []
    for chunk in (4096, *CHUNKS):
        slots = tiny.slots(LENGTH)
        logits = tiny.prefill(prompt, slots, chunk)
        results.append((logits.numpy().tobytes(), blocks(tiny, slots, LENGTH)))
        tiny.foul()
    assert len(set(results)) == 1


def test_guesses_change_no_bit(tiny: Harness) -> None:
    prompt, results = prompt_of(2), []
    for wrong in (None, 0, 1, 4):
        slots = tiny.slots(LENGTH + OUTPUT_TOKENS)
        tokens = tiny.greedy(prompt, OUTPUT_TOKENS, slots=slots) if wrong is None else tiny.guessing(prompt, results[0][0], wrong, slots)
        results.append((tokens, blocks(tiny, slots, LENGTH + OUTPUT_TOKENS - 1)))
        tiny.foul()
    assert results == results[:1] * 4


def test_company_in_a_batch_changes_no_bit(tiny: Harness) -> None:
    prompts = [prompt_of(seed, length) for seed, length in enumerate((300, 1, 65, 130, 17, 250))]
    alone = []
    for prompt in prompts:
        slots = tiny.slots(LENGTH + OUTPUT_TOKENS)
        tokens = tiny.greedy(prompt, OUTPUT_TOKENS, slots=slots)
        alone.append((tokens, blocks(tiny, slots, len(prompt) + OUTPUT_TOKENS - 1)))
        tiny.foul()
    slots_of = [tiny.slots(LENGTH + OUTPUT_TOKENS) for _ in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    batch = [SequenceChunk(prompt, 0, slots) for prompt, slots in zip(prompts, slots_of, strict=True)]
    for _ in range(OUTPUT_TOKENS):
        for output, logits in zip(outputs, tiny.runner.forward(batch), strict=True):
            output.append(int(logits.argmax()))
        batch = [
            SequenceChunk(output[-1:], len(prompt) + len(output) - 1, slots)
            for prompt, output, slots in zip(prompts, outputs, slots_of, strict=True)
        ]
    together = [blocks(tiny, slots, len(prompt) + OUTPUT_TOKENS - 1) for prompt, slots in zip(prompts, slots_of, strict=True)]
    assert list(zip(outputs, together, strict=True)) == alone


@pytest.mark.parametrize("moved_after", [1, 5, 11])
def test_a_move_changes_no_bit(tiny: Harness, moved_after: int) -> None:
    """What decode steps have computed is computed again as a part of a prompt, from where a prefix survives."""
    prompt = prompt_of(2)
    slots = tiny.slots(LENGTH + OUTPUT_TOKENS)
    whole = tiny.greedy(prompt, OUTPUT_TOKENS, chunk=97, slots=slots)
    before = blocks(tiny, slots, LENGTH + OUTPUT_TOKENS - 1)
    elsewhere = tiny.slots(LENGTH + OUTPUT_TOKENS)
    arena = tiny.arena.reshape(tiny.num_slots, -1)
    cached = 4
    arena[elsewhere[:cached]] = arena[slots[:cached]]
    rest = tiny.greedy(prompt + whole[:moved_after], OUTPUT_TOKENS - moved_after, chunk=64, start=cached * BLOCK_TOKENS, slots=elsewhere)
    assert whole[:moved_after] + rest == whole
    assert blocks(tiny, elsewhere, LENGTH + OUTPUT_TOKENS - 1) == before


def test_stages_change_no_bit(tmp_path: Path) -> None:
    info = describe(str(make_tiny_model(tmp_path / "tiny", "Llama", head_dim=32, num_hidden_layers=4)))
    spec = info.kv_spec("bfloat16", BLOCK_TOKENS)
    whole = Harness(load_model(info, "bfloat16"), spec, num_slots=30)
    stages = [Harness(load_model(info, "bfloat16", layers), spec, num_slots=30) for layers in ((0, 1), (1, 4))]
    prompt, slots = prompt_of(3, 200), list(range(13))
    batch = [SequenceChunk(prompt, 0, slots)]
    hidden = None
    for stage in stages:
        hidden = stage.runner.forward_layers(batch, hidden)
    assert hidden is not None
    assert torch.equal(stages[-1].runner.logits(batch, hidden), whole.runner.forward(batch))


def test_the_demo_model_goes_on_with_the_same_tokens_in_any_chunks(demo_bf16: Harness) -> None:
    prompt = random_prompt(4, 700)
    wanted = demo_bf16.greedy(prompt, 16)
    for chunk in (64, 200, 333):
        demo_bf16.foul()
        assert demo_bf16.greedy(prompt, 16, chunk=chunk) == wanted
