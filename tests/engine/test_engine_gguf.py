"""GGUF files written from a tiny checkpoint, the way llama.cpp's converter writes them, against transformers' version of the checkpoint."""

from __future__ import annotations

import contextlib
import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from engine.formats.end_tokens import gguf_end_tokens
from engine.formats.files import describe
from engine.formats.gguf_config import LLAMA
from engine.formats.gguf_file import read_gguf
from engine.formats.gguf_weights import GGUFWeights
from engine.formats.registry import for_gguf
from engine.layers.rope import frequencies
from engine.loader import load_model
from engine.model_config import RopeConfig
from engine.tokenizer.gguf_tokenizer import gguf_tokenizer
from engine.tokenizer.tokenizer import load_tokenizer
from springtide.errors import ConfigError, SpringtideError, UnsupportedModel
from tests.engine.conftest import tiny_harness
from tests.engine.sequences import Harness
from tests.support.models import make_tiny_llama, make_tiny_model
from tests.support.reference import Reference, random_prompt

LLAMA3 = {"rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py does to Q and K."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, checkpoint: Path, kind: gguf.GGMLQuantizationType, architecture: str = "llama", **extra: Any) -> None:
    """`extra` are further keys, `__` standing for a dot, and tensors."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for key, value in extra.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key.replace("__", "."), value)
        elif isinstance(value, str):
            writer.add_string(key.replace("__", "."), value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key.replace("__", "."), value)
    backend = json.loads((checkpoint / "tokenizer.json").read_text())
    vocab = backend["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([3, 3, 3, *[1] * (len(vocab) - 3)])
    writer.add_token_merges([" ".join(merge) for merge in backend["model"]["merges"]])
    writer.add_eos_token_id(2)
    _add_weights(writer, checkpoint, config, kind, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_weights(
    writer: gguf.GGUFWriter, checkpoint: Path, config: dict[str, Any], kind: gguf.GGMLQuantizationType, architecture: str
) -> None:
    """Under the names that the gguf package gives them."""
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    experts: dict[str, list[np.ndarray]] = {}
    for name, weight in sorted(load_file(checkpoint / "model.safetensors").items()):
        array = weight.float().numpy()
        if architecture == "llama" and "q_proj" in name:
            array = permute(array, config["num_attention_heads"])
        if architecture == "llama" and "k_proj" in name:
            array = permute(array, config["num_key_value_heads"])
        if architecture == "gemma" and name.endswith("norm.weight"):
            array = array + 1
        if expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            stacked = experts.setdefault(f"{expert[1]}.{expert[3]}", [])
            assert len(stacked) == int(expert[2])
            stacked.append(array)
        else:
            _add_tensor(writer, names.get_name(name, (".weight", ".bias")), array, kind)
    for name, stacked in experts.items():
        _add_tensor(writer, names.get_name(name, (".weight",)), np.stack(stacked), kind)


def _add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    its_kind = kind if array.ndim > 1 else gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quants.quantize(array, its_kind), raw_dtype=its_kind)


def harness_of(path: Path) -> Harness:
    info = describe(str(path))
    return Harness(load_model(info, "float32"), info.kv_spec("float32", 16), num_slots=40)


def test_float32_weights_answer_as_the_checkpoint_does(tmp_path: Path) -> None:
    checkpoint = make_tiny_llama(tmp_path / "tiny", attention_bias=True, mlp_bias=True)
    write_gguf(tmp_path / "tiny-F32.gguf", checkpoint, gguf.GGMLQuantizationType.F32)
    prompt = random_prompt(0, 100, 10, 250)
    assert harness_of(tmp_path / "tiny-F32.gguf").greedy(prompt, 10) == Reference.from_directory(checkpoint).greedy(prompt, 10)
    info = describe(str(tmp_path / "tiny-F32.gguf"))
    assert (info.name, info.eos_token_ids) == ("tiny", (2,))
    assert load_tokenizer(info).encode("in the end") == load_tokenizer(describe(str(checkpoint))).encode("in the end")


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Mistral": ("llama", "Mistral", {"sliding_window": None}),
    "Mistral with a head size of its own": ("llama", "Mistral", {"sliding_window": None, "head_dim": 32}),
    "Qwen2": ("qwen2", "Qwen2", {}),
    "Qwen2 with tied embeddings": ("qwen2", "Qwen2", {"tie_word_embeddings": True}),
    # transformers does not read the sizes of a head and of an expert and takes them for 128 and 768.
    "Qwen3": ("qwen3", "Qwen3", {"head_dim": 128}),
    "Qwen3-MoE": ("qwen3moe", "Qwen3Moe", {**EXPERTS, "head_dim": 32, "moe_intermediate_size": 768}),
    "Gemma": ("gemma", "Gemma", {"head_dim": 32, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_files_of_every_family_answer_as_the_checkpoint_does(tmp_path: Path, kind: str) -> None:
    architecture, family, config = FAMILIES[kind]
    checkpoint = make_tiny_model(tmp_path / "tiny", family, **config)
    write_gguf(tmp_path / "tiny.gguf", checkpoint, gguf.GGMLQuantizationType.F32, architecture)
    prompt = random_prompt(0, 100, 10, 250)
    assert harness_of(tmp_path / "tiny.gguf").greedy(prompt, 10) == Reference.from_directory(checkpoint).greedy(prompt, 10)


@pytest.mark.parametrize("kind", ["Mistral", "Qwen2", "Qwen3", "Qwen3-MoE"])
def test_transformers_reads_the_same_from_these_files(tmp_path: Path, kind: str) -> None:
    """So that the files are not only what this test takes for GGUF. (transformers does not read Gemma's.)"""
    architecture, family, config = FAMILIES[kind]
    write_gguf(tmp_path / "tiny.gguf", make_tiny_model(tmp_path / "tiny", family, **config), gguf.GGMLQuantizationType.F32, architecture)
    prompt = random_prompt(0, 60, 10, 250)
    assert harness_of(tmp_path / "tiny.gguf").greedy(prompt, 10) == Reference.from_gguf(tmp_path / "tiny.gguf").greedy(prompt, 10)


def test_quantised_experts_are_read_one_by_one(tmp_path: Path) -> None:
    checkpoint = make_tiny_model(tmp_path / "tiny", "Qwen3Moe", **EXPERTS)
    write_gguf(tmp_path / "tiny.gguf", checkpoint, gguf.GGMLQuantizationType.Q8_0, "qwen3moe")
    info = describe(str(tmp_path / "tiny.gguf"))
    assert (info.architecture, info.layers) == ("Qwen3MoeForCausalLM", 3)
    prompt = random_prompt(0, 40, 10, 250)
    logits, wanted = (
        harness.prefill(prompt, [0, 1, 2], chunk=64) for harness in (harness_of(tmp_path / "tiny.gguf"), tiny_harness(checkpoint))
    )
    assert (logits - wanted).norm() < 0.15 * wanted.norm()


def test_a_window_as_long_as_the_context_changes_nothing(tmp_path: Path) -> None:
    checkpoint = make_tiny_llama(tmp_path / "tiny")
    write_gguf(tmp_path / "tiny.gguf", checkpoint, gguf.GGMLQuantizationType.F32, llama__attention__sliding_window=4096)
    assert describe(str(tmp_path / "tiny.gguf")).context_length == 4096


@pytest.mark.parametrize(("kind", "tolerance"), [("F16", 0.004), ("BF16", 0.04), ("Q8_0", 0.1), ("Q4_0", 0.8), ("Q5_1", 0.4)])
def test_other_weights_are_dequantised(tmp_path: Path, kind: str, tolerance: float) -> None:
    checkpoint = make_tiny_llama(tmp_path / "tiny")
    write_gguf(tmp_path / "tiny.gguf", checkpoint, gguf.GGMLQuantizationType[kind])
    prompt = random_prompt(0, 40, 10, 250)
    logits, wanted = (
        harness.prefill(prompt, [0, 1, 2], chunk=64) for harness in (harness_of(tmp_path / "tiny.gguf"), tiny_harness(checkpoint))
    )
    assert (logits - wanted).norm() < tolerance * wanted.norm()


@pytest.mark.parametrize("rows", [1, 16, 37, 600])
def test_dequantised_is_what_gguf_makes_of_it_however_many_rows_are_computed_at_once(tmp_path: Path, rows: int) -> None:
    path, kind = tmp_path / "one.gguf", gguf.GGMLQuantizationType.Q4_1
    stored = gguf.quants.quantize(np.random.default_rng(rows).normal(size=(rows, 576)).astype(np.float32), kind)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("one.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = GGUFWeights(read_gguf(path), {}, lambda name, weight: weight).read("one.weight")
    assert read.equal(torch.from_numpy(gguf.quants.dequantize(stored, kind)))


def test_rope_frequencies_in_the_file_are_llama3s_scaling(tmp_path: Path) -> None:
    checkpoint = make_tiny_llama(tmp_path / "tiny", rope_parameters={**LLAMA3, "rope_type": "llama3"})
    plain, _ = frequencies(RopeConfig(), 16)
    scaled, _ = frequencies(RopeConfig("llama3", factor=4.0, original_context=256, low_freq_factor=1.0, high_freq_factor=4.0), 16)
    write_gguf(tmp_path / "tiny.gguf", checkpoint, gguf.GGMLQuantizationType.F32, rope_freqs__weight=(plain / scaled).numpy())
    prompt = random_prompt(1, 300, 10, 250)
    assert not torch.equal(plain, scaled)
    assert harness_of(tmp_path / "tiny.gguf").greedy(prompt, 10) == Reference.from_directory(checkpoint).greedy(prompt, 10)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_read(tmp_path: Path, kind: str) -> None:
    scaling = {"rope_theta": 10000.0, "factor": 4.0, "rope_type": kind}
    original = {"original_max_position_embeddings": 1024} if kind == "yarn" else {}
    checkpoint = make_tiny_llama(tmp_path / "tiny", rope_parameters={**scaling, **original})
    extra = {"llama__rope__scaling__type": kind, "llama__rope__scaling__factor": 4.0, "llama__rope__scaling__original_context_length": 1024}
    write_gguf(tmp_path / "tiny.gguf", checkpoint, gguf.GGMLQuantizationType.F32, **extra)
    prompt = random_prompt(2, 200, 10, 250)
    assert harness_of(tmp_path / "tiny.gguf").greedy(prompt, 10) == Reference.from_directory(checkpoint).greedy(prompt, 10)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama__expert_count": 8}, "llama.expert_count 8 .mixture of experts. is not supported"),
        ({"llama__attention__sliding_window": 1024}, "llama.attention.sliding_window 1024 is not supported"),
        ({"llama__attention__scale": 0.5}, "llama.attention.scale 0.5 is not supported"),
        ({"llama__final_logit_softcapping": 30.0}, "llama.final_logit_softcapping 30.0 is not supported"),
        ({"llama__rope__scaling__type": "longrope"}, "llama.rope.scaling.type 'longrope' is not supported"),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count 8 is not supported; it must equal the head size, 16"),
    ],
)
def test_what_the_engine_does_not_have_is_refused_by_name(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    checkpoint = make_tiny_llama(tmp_path / "tiny")
    write_gguf(tmp_path / "tiny.gguf", checkpoint, gguf.GGMLQuantizationType.F32, **extra)
    with pytest.raises(UnsupportedModel, match=message):
        describe(str(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"llama__attention__head_count_kv": 3},
            r"llama.attention.head_count \(4\) must be a multiple of llama.attention.head_count_kv \(3\)",
        ),
        ({"llama__attention__key_length": 15, "llama__attention__value_length": 15}, r"llama.attention.key_length \(15\) must be even"),
        (
            {"llama__attention__head_count": 5},
            r"llama.attention.head_count \(5\) must be a multiple of llama.attention.head_count_kv \(2\)",
        ),
        ({"llama__attention__head_count": 0}, "'llama.attention.head_count' must be a positive integer, not 0"),
        ({"llama__attention__head_count": 4.0}, "'llama.attention.head_count' must be a positive integer, not 4.0"),
        ({"llama__embedding_length": 128}, r"'token_embd.weight' has shape \[320, 64\], embedding_length says \[tokens, 128\]"),
        ({"llama__block_count": 2}, "llama.block_count is 2, but there is a tensor 'blk.2"),
        ({"llama__block_count": 2**31}, r"llama.block_count \(2147483648\) must be an integer between 1 and 10000"),
        ({"llama__rope__freq_base": -1.0}, r"llama.rope.freq_base \(-1.0\) must be a positive number"),
        ({"llama__rope__freq_base": "fast"}, "'llama.rope.freq_base' must be a finite number, not 'fast'"),
        (
            {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 0.0},
            r"llama.rope.scaling.factor \(0.0\) must be a positive",
        ),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon' must be a finite number, not nan"),
        ({"llama__attention__sliding_window": "all"}, "'llama.attention.sliding_window' must be an integer of at least 0, not 'all'"),
        ({"tokenizer__ggml__eot_token_id": 320}, "tokenizer.ggml.eot_token_id 320 is outside the vocabulary of 320"),
        ({"tokenizer__ggml__eot_token_id": "end"}, "'tokenizer.ggml.eot_token_id' must be an integer of at least 0, not 'end'"),
    ],
)
def test_metadata_that_cannot_be_is_named(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_tiny_llama(tmp_path / "tiny"), gguf.GGMLQuantizationType.F32, **extra)
    with pytest.raises(ConfigError, match=message) as caught:
        describe(str(tmp_path / "tiny.gguf"))
    assert "tiny.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"qwen3moe__expert_used_count": 7}, r"qwen3moe.expert_used_count \(7\) must be at most qwen3moe.expert_count \(6\)"),
        ({"qwen3moe__expert_count": 0}, "'qwen3moe.expert_count' must be a positive integer, not 0"),
        ({"qwen3moe__expert_used_count": 0}, "'qwen3moe.expert_used_count' must be a positive integer, not 0"),
    ],
)
def test_experts_that_cannot_be_are_named(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    checkpoint = make_tiny_model(tmp_path / "tiny", "Qwen3Moe", **EXPERTS)
    write_gguf(tmp_path / "tiny.gguf", checkpoint, gguf.GGMLQuantizationType.F32, "qwen3moe", **extra)
    with pytest.raises(ConfigError, match=message):
        describe(str(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama__attention__head_count_kv": 4}, r"k_proj.weight' has shape \[32, 64\], the configuration says \[64, 64\]"),
        (
            {"llama__attention__head_count": 2, "llama__attention__key_length": 16},
            "q_proj.weight' has shape .64, 64., .* says .32, 64.",
        ),
        ({"llama__feed_forward_length": 192}, r"mlp.gate_proj.weight' has shape \[160, 64\], the configuration says \[192, 64\]"),
        ({"llama__block_count": 4}, "tensor 'model.layers.3.* is missing"),
    ],
)
def test_tensors_of_another_shape_than_the_metadata_says_are_named(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_tiny_llama(tmp_path / "tiny"), gguf.GGMLQuantizationType.F32, **extra)
    with pytest.raises(ConfigError, match=message):
        load_model(describe(str(tmp_path / "tiny.gguf")), "float32")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of which the header is much."""
    path = tmp_path_factory.mktemp("small")
    checkpoint = make_tiny_llama(path / "tiny", num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=2)
    write_gguf(path / "tiny.gguf", checkpoint, gguf.GGMLQuantizationType.F32)
    return path / "tiny.gguf"


def read_all(path: Path) -> None:
    """As far as it goes."""
    info = describe(str(path))
    load_tokenizer(info)
    load_model(info, "float32")


@settings(max_examples=150, deadline=None)
@given(st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut_is_refused(small: Path, share: float) -> None:
    whole = small.read_bytes()
    cut = small.with_name("cut.gguf")
    cut.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ConfigError, match=r"cut\.gguf"):
        read_all(cut)


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_whatever_is_in_a_header_it_is_a_model_or_an_error(small: Path, data: st.DataObject) -> None:
    """Bytes of it are changed: lengths, types, names, values."""
    content = bytearray(small.read_bytes())
    end = read_gguf(small).data_offset
    for position in data.draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=3)):
        value = data.draw(st.sampled_from([b"\x00", b"\x01", b"\x09", b"\xff", b"\xff" * 8, b"\x00" * 8, b"\xff" * 7 + b"\x7f"]))
        content[position : position + len(value)] = value[: end - position]
    broken = small.with_name("broken.gguf")
    broken.write_bytes(content)
    with contextlib.suppress(SpringtideError):
        read_all(broken)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_a_key_says_it_is_a_model_or_an_error_that_names_the_file(small: Path, data: st.DataObject) -> None:
    file = read_gguf(small)
    values = st.one_of(
        *(st.integers(-2, 20), st.booleans(), st.floats(), st.text(max_size=4), st.sampled_from([2**31, 2**63, np.arange(3), ["a"]]))
    )
    keys = [*file.metadata, "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.attention.key_length", "llama.expert_count"]
    changed = data.draw(st.dictionaries(st.sampled_from(keys), values, min_size=1, max_size=3))
    missing = data.draw(st.sets(st.sampled_from(keys), max_size=1))
    metadata = {key: value for key, value in {**file.metadata, **changed}.items() if key not in missing}
    file = replace(file, metadata=metadata)
    try:
        architecture, family = for_gguf(file)
        config = family.read(file, architecture.name)
        gguf_end_tokens(file, config.vocab_size)
        gguf_tokenizer(file)
    except SpringtideError as error:
        assert "tiny.gguf" in str(error)


def test_heads_that_do_not_come_out_even_need_a_size_of_their_own(small: Path) -> None:
    file = read_gguf(small)
    metadata = {**file.metadata, "llama.attention.head_count": 6}
    for key in ("key", "value"):
        del metadata[f"llama.attention.{key}_length"]
    with pytest.raises(ConfigError, match=r"llama.embedding_length \(8\) must be a multiple of llama.attention.head_count \(6\), or llama"):
        LLAMA.read(replace(file, metadata=metadata), "LlamaForCausalLM")


@pytest.mark.parametrize("position", [0, 3])
def test_what_is_no_gguf_file_is_told_from_its_beginning(small: Path, position: int) -> None:
    content = bytearray(small.read_bytes())
    content[position] ^= 0xFF
    small.with_name("other.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=r"other.gguf is not a GGUF file: it starts with"):
        describe(str(small.with_name("other.gguf")))


def test_arrays_in_arrays_have_an_end(tmp_path: Path) -> None:
    nested = b"".join(struct.pack("<IQ", 9, 1) for _ in range(100_000))
    key = b"deep"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<I", 9)
    (tmp_path / "deep.gguf").write_bytes(header + nested)
    with pytest.raises(ConfigError, match="arrays are nested more than 4 deep"):
        read_gguf(tmp_path / "deep.gguf")


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"general\.architecture 'mamba' is not supported; supported: llama"):
        describe(str(tmp_path / "other.gguf"))


def test_the_header_is_what_gguf_itself_reads(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_tiny_llama(tmp_path / "tiny"), gguf.GGMLQuantizationType.Q8_0)
    ours, theirs = read_gguf(tmp_path / "tiny.gguf"), gguf.GGUFReader(tmp_path / "tiny.gguf")
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert (entry.offset, entry.num_bytes, entry.quantization) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
        assert list(entry.shape) == tensor.shape[::-1].tolist()
    for key, value in ours.metadata.items():
        assert list(np.atleast_1d(value)) == list(np.atleast_1d(theirs.fields[key].contents())), key
