"""Safetensors files that were cut or changed are refused before anything is made of them, by `describe` and by the loader alike."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.formats.files import describe
from engine.formats.safetensors_file import read_safetensors
from engine.formats.safetensors_weights import SafetensorsWeights
from engine.loader import load_model
from springtide.errors import ConfigError, SpringtideError
from tests.support.models import make_tiny_llama


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which the header is much."""
    path = tmp_path_factory.mktemp("small") / "model"
    return make_tiny_llama(path, num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=2)


@pytest.fixture
def model(small: Path, tmp_path: Path) -> Path:
    """One of its own."""
    for file in small.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@contextlib.contextmanager
def rewritten(model: Path, content: bytes) -> Iterator[None]:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(whole)


def with_header(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def test_spans_are_where_safetensors_finds_the_tensors(model: Path) -> None:
    file = model / "model.safetensors"
    parsed, content = read_safetensors(file), file.read_bytes()
    tensors = load_file(file)
    assert sorted(content[start : start + length] for start, length in parsed.spans) == sorted(
        tensor.numpy().tobytes() for tensor in tensors.values()
    )


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut_is_refused(small: Path, share: float) -> None:
    whole = (small / "model.safetensors").read_bytes()
    with rewritten(small, whole[: int(share * len(whole))]):
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            describe(str(small))
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            SafetensorsWeights(small)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_whatever_is_in_a_header_it_is_a_model_or_an_error(small: Path, data: st.DataObject) -> None:
    content = bytearray((small / "model.safetensors").read_bytes())
    end = 8 + struct.unpack("<Q", content[:8])[0]
    for position in data.draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=3)):
        value = data.draw(st.sampled_from([b"\x00", b"0", b"9", b"-", b'"', b"}", b"[", b",", b"\xff" * 8, b"null"]))
        content[position : position + len(value)] = value[: end - position]
    with rewritten(small, bytes(content)), contextlib.suppress(SpringtideError):
        load_model(describe(str(small)), "float32")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "tensor 'a' has 4 bytes for F32 of shape .2."),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "tensor 'a' begins at 4 and not where the one before it ends, 0"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "it has .* bytes, and its header speaks of"),
        ({"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}, "tensor 'a' has 8 bytes for F32 of shape .-1, -2."),
        ({"dtype": "Q4", "shape": [2], "data_offsets": [0, 8]}, "tensor 'a' has the unknown dtype 'Q4'"),
        ({"dtype": "F32", "shape": [2]}, "tensor 'a' needs dtype, shape and two data_offsets, not"),
        ([1, 2], "tensor 'a' needs dtype, shape and two data_offsets, not"),
    ],
)
def test_tensors_that_do_not_fit_are_named(model: Path, entry: Any, message: str) -> None:
    with rewritten(model, with_header(json.dumps({"a": entry}).encode(), bytes(8))), pytest.raises(ConfigError, match=message):
        describe(str(model))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is not a safetensors file: it begins with b''"),
        (b"GGUF" + bytes(100), "is not a safetensors file: it begins with b'GGUF"),
        (with_header(b"{not json}", b""), "is not a whole safetensors file: Expecting property name"),
        (with_header(b'{"a":' * 100_000, b""), "is not a whole safetensors file: "),
        (with_header(b"\xff" * 20, b""), "is not a safetensors file"),
    ],
)
def test_what_is_no_safetensors_file_is_told(model: Path, content: bytes, message: str) -> None:
    with rewritten(model, content), pytest.raises(ConfigError, match=message):
        describe(str(model))


def test_an_index_that_names_no_files_is_refused(model: Path) -> None:
    for weight_map in (None, ["model.safetensors"], {"a": 5}):
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ConfigError, match="weight_map must be an object that names the file of each tensor"):
            describe(str(model))


def test_weights_that_are_integers_are_not_taken_for_numbers(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"up_proj.weight' is of torch.int8, not of floating-point numbers"):
        load_model(describe(str(model)), "float32")


def test_a_tensor_of_another_shape_is_named(model: Path) -> None:
    document = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**document, "intermediate_size": 16}))
    with pytest.raises(ConfigError, match=r"mlp.gate_proj.weight' has shape \[8, 8\], the configuration says \[16, 8\]"):
        load_model(describe(str(model)), "float32")
