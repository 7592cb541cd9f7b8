"""The checkpoint that all engines are measured with, and our own engine as a driver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import checkpoint
from benchmarks.driven import OURS, Bench, Driver, Job
from benchmarks.engine import CONTEXT, SECONDS, SPRINGTIDE, VLLM, rows
from engine.formats.files import demo_model, describe, read_config
from engine.formats.gguf_file import read_gguf
from engine.formats.gguf_weights import gguf_weights
from engine.formats.registry import for_gguf
from engine.formats.safetensors_weights import SafetensorsWeights
from engine.loader import load_model
from engine.tokenizer.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "CACHE", tmp_path_factory.mktemp("cache"))
        return checkpoint.demo_checkpoint()


def test_the_checkpoint_is_the_demo_model(directory: Path) -> None:
    file = read_gguf(demo_model())
    config = read_config(demo_model())
    # Unscaled, the rotary embedding does not ask for its original context.
    assert config.rope.kind == "default"
    assert read_config(directory) == replace(config, rope=replace(config.rope, original_context=config.context_length))
    original, copy = gguf_weights(file, for_gguf(file)[1], config), SafetensorsWeights(directory)
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.29.mlp.down_proj.weight"):
        assert torch.equal(copy.read(name), original.read(name).to(torch.bfloat16)), name
    load_model(describe(str(directory)), "bfloat16")


def test_its_tokenizer_is_the_demo_models(directory: Path) -> None:
    ours, demo = load_tokenizer(describe(str(directory))), load_tokenizer(describe("demo"))
    messages = [{"role": "user", "content": "What is 1234 + 5678? Ünïcode, too."}]
    assert ours.apply_chat_template(messages) == demo.apply_chat_template(messages)


def test_our_engine_proves_itself_and_is_measured(directory: Path) -> None:
    driver = Driver(SPRINGTIDE, "engine_springtide", OURS, (str(directory),))
    with Bench([Job(driver, 1, CONTEXT)]) as bench:
        for operation in ("startup", "prefill-64", "cached-128", "decode-2"):
            assert min(bench.rounds(operation, 1, rounds=1)[SPRINGTIDE]) > 0
        assert bench.memory_bytes()[SPRINGTIDE] > directory.joinpath("model.safetensors").stat().st_size


def test_vllm_alone_has_to_be_met() -> None:
    seconds = {SPRINGTIDE: [1.0], VLLM: [2.0], "transformers": [0.5]}
    assert [(row.peer_name, row.ratio, row.wanted, row.met) for row in rows("x", SECONDS, seconds, 1.5)] == [
        (VLLM, 2.0, 1.5, True),
        ("transformers", 0.5, None, None),
    ]
    assert [row.peer for row in rows("x", SECONDS, {SPRINGTIDE: [1.0]}, 1.5)] == [None]
