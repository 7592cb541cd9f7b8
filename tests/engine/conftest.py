from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends import choice as backends
from engine.formats.files import describe
from engine.loader import load_model
from engine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from springtide.modelinfo import ModelInfo
from tests.engine.sequences import Harness
from tests.support.models import demo_gguf, make_tiny_llama
from tests.support.reference import Reference

# Two threads that wait for each other are slow on a machine whose cores have other work too.
torch.set_num_threads(1)

TinyFactory = Callable[..., tuple[Harness, Reference]]

INSTRUCTION_SETS = backends._native.instruction_sets() if backends._native is not None else ()


@pytest.fixture(scope="module", params=INSTRUCTION_SETS or [None])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    """Those of the native kernels that this machine has, in turn."""
    if request.param is None:
        yield
        return
    best = backends._native.instruction_set()
    backends._native.use(request.param)
    yield
    backends._native.use(best)


@pytest.fixture(scope="session")
def demo_info() -> ModelInfo:
    return describe("demo")


@pytest.fixture(scope="session")
def demo_tokenizer(demo_info: ModelInfo) -> Tokenizer:
    return load_tokenizer(demo_info)


@pytest.fixture(scope="session")
def demo_reference() -> Reference:
    return Reference.from_gguf(demo_gguf())


@pytest.fixture(scope="session")
def demo_fp32(demo_info: ModelInfo) -> Harness:
    return Harness(load_model(demo_info, "float32"), demo_info.kv_spec("float32", 64), num_slots=120)


@pytest.fixture(scope="session")
def demo_bf16(demo_info: ModelInfo) -> Harness:
    return Harness(load_model(demo_info, "bfloat16"), demo_info.kv_spec("bfloat16", 64), num_slots=40)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyFactory:
    """A tiny random model by its configuration, with the engine's and transformers' float32 versions of it."""
    made: dict[str, tuple[Harness, Reference]] = {}

    def make(**config: Any) -> tuple[Harness, Reference]:
        key = repr(sorted(config.items()))
        if key not in made:
            path = make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", **config)
            made[key] = (tiny_harness(path), Reference.from_directory(path))
        return made[key]

    return make


def tiny_harness(path: Path) -> Harness:
    info = describe(str(path))
    return Harness(load_model(info, "float32"), info.kv_spec("float32", 16), num_slots=400)
