"""Every family's tiny random models give transformers' greedy output in float32, however the work is cut up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import SequenceChunk
from engine.formats import registry
from engine.formats.files import describe, read_config
from engine.formats.hf_config import HFConfig
from engine.formats.registry import ARCHITECTURES
from engine.loader import load_model
from engine.model_config import ModelConfig, RopeConfig, WrongGeometry
from springtide.errors import ConfigError, SpringtideError, UnsupportedModel
from tests.engine.conftest import tiny_harness
from tests.engine.sequences import Harness
from tests.support.models import make_tiny_model
from tests.support.reference import Reference, random_prompt

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Mistral with a head size of its own": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "Mistral with a window as long as the context": ("Mistral", {"sliding_window": 4096}),
    "Mistral with a window": ("Mistral", {"sliding_window": 37}),
    "Mistral with a window of whole blocks": ("Mistral", {"sliding_window": 64}),
    "Mistral with a window of two tokens": ("Mistral", {"sliding_window": 2}),
    "Qwen2": ("Qwen2", {}),
    "Qwen2 with tied embeddings": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen2 with a window in its later layers": ("Qwen2", {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1}),
    "Qwen2 with a window in all layers": ("Qwen2", {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 0}),
    "Qwen2 with a window that no layer has": ("Qwen2", {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 3}),
    "Qwen2 with yarn": ("Qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}),
    "Qwen3": ("Qwen3", {"head_dim": 32}),
    "Qwen3 with biases and tied embeddings": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "Qwen3 with windows in some layers": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 29, "layer_types": _ALTERNATING},
    ),
    "Qwen3-MoE": ("Qwen3Moe", {**_EXPERTS, "head_dim": 32}),
    "Qwen3-MoE, normalised": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True}),
    "Qwen3-MoE with a dense layer": ("Qwen3Moe", {**_EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "Qwen3-MoE with every other layer sparse": ("Qwen3Moe", {**_EXPERTS, "decoder_sparse_step": 2}),
    "Qwen3-MoE with one expert a token": ("Qwen3Moe", {**_EXPERTS, "num_experts_per_tok": 1}),
    "Qwen3-MoE with all experts for each token": ("Qwen3Moe", {**_EXPERTS, "num_experts_per_tok": 6}),
    "Qwen3-MoE with a window": ("Qwen3Moe", {**_EXPERTS, "use_sliding_window": True, "sliding_window": 33}),
    "Qwen3-MoE with fused experts": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True, "fused_experts": True}),
    "Gemma": ("Gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "Gemma with one KV head and biases": ("Gemma", {"head_dim": 16, "num_key_value_heads": 1, "attention_bias": True}),
}

Made = Callable[[str], tuple[Harness, Reference]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The engine's and transformers' versions of one of MODELS."""
    done: dict[str, tuple[Harness, Reference]] = {}

    def make(kind: str) -> tuple[Harness, Reference]:
        if kind not in done:
            family, config = MODELS[kind]
            path = make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", family, **config)
            done[kind] = tiny_harness(path), Reference.from_directory(path)
        harness, reference = done[kind]
        harness.foul()
        return harness, reference

    return make


@pytest.mark.parametrize("kind", MODELS)
def test_tiny_models_equal_transformers_in_any_chunks(made: Made, kind: str) -> None:
    for length in (1, 17, 300):
        harness, reference = made(kind)
        prompt = random_prompt(length, length, 10, 250)
        wanted = reference.greedy(prompt, 16)
        for chunk in (1, 23, 64, 200, length):
            if length // chunk > 40:
                continue
            harness.foul()
            assert harness.greedy(prompt, 16, chunk) == wanted, f"{length} tokens in chunks of {chunk}"


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_transformers(made: Made, kind: str) -> None:
    harness, reference = made(kind)
    prompt = random_prompt(7, 130, 10, 250)
    logits = harness.prefill(prompt, harness.slots(130), chunk=48)
    torch.testing.assert_close(logits, reference.logits(prompt)[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_prefills_and_decodes_of_many_sequences_share_a_pass(made: Made, kind: str) -> None:
    harness, reference = made(kind)
    prompts = [random_prompt(20 + length, length, 10, 250) for length in (1, 5, 31, 33, 90, 130, 400)]
    wanted = [reference.greedy(prompt, 8) for prompt in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    slots = [harness.slots(len(prompt) + 8) for prompt in prompts]
    done = [0] * len(prompts)
    while any(len(output) < 8 for output in outputs):
        active = [i for i, output in enumerate(outputs) if len(output) < 8]
        batch = []
        for i in active:
            text = [*prompts[i], *outputs[i]]
            chunk = text[done[i] : done[i] + 48]
            batch.append(SequenceChunk(chunk, done[i], slots[i]))
            done[i] += len(chunk)
        for i, row in zip(active, harness.runner.forward(batch), strict=True):
            if done[i] == len(prompts[i]) + len(outputs[i]):
                outputs[i].append(int(row.argmax()))
    assert outputs == wanted


@pytest.mark.parametrize("kind", MODELS)
def test_a_cached_prefix_changes_nothing(made: Made, kind: str) -> None:
    harness, reference = made(kind)
    prompt = random_prompt(1, 300, 10, 250)
    slots, other = harness.slots(320), harness.slots(320)
    harness.prefill(prompt[:160], slots, chunk=100)
    assert harness.greedy(prompt, 12, chunk=128, start=160, slots=[*slots[:10], *other[10:]]) == reference.greedy(prompt, 12)


def test_a_row_of_a_sparse_layer_does_not_depend_on_the_others(made: Made) -> None:
    harness, _ = made("Qwen3-MoE")
    prompts = [random_prompt(30 + i, 40, 10, 250) for i in range(6)]
    alone = [harness.prefill(prompt, harness.slots(40), chunk=64) for prompt in prompts]
    together = harness.runner.forward([SequenceChunk(prompt, 0, harness.slots(40)) for prompt in prompts])
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_stages_of_a_pipeline_together_are_the_model(tmp_path: Path, made: Made, kind: str) -> None:
    _, reference = made(kind)
    family, config = MODELS[kind]
    info = describe(str(make_tiny_model(tmp_path / "tiny", family, **config)))
    spec = info.kv_spec("float32", 16)
    prompt = random_prompt(3, 90, 10, 250)
    batch = [SequenceChunk(prompt, 0, [4, 1, 9, 6, 3, 0])]

    def stage(begin: int, end: int) -> Harness:
        return Harness(load_model(info, "float32", (begin, end)), replace(spec, layers=end - begin), num_slots=10)

    first, last = stage(0, 1), stage(1, 3)
    hidden = last.runner.forward_layers(batch, first.runner.forward_layers(batch, None))
    logits = last.runner.model.logits(hidden[-1:])
    torch.testing.assert_close(logits[0], reference.logits(prompt)[-1], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("kind", MODELS)
def test_bf16_stays_close(tmp_path: Path, made: Made, kind: str) -> None:
    _, reference = made(kind)
    family, config = MODELS[kind]
    info = describe(str(make_tiny_model(tmp_path / "tiny", family, **config)))
    harness = Harness(load_model(info, "bfloat16"), info.kv_spec("bfloat16", 16), num_slots=20)
    prompt = random_prompt(8, 60, 10, 250)
    logits, wanted = harness.prefill(prompt, harness.slots(60), chunk=25), reference.logits(prompt)[-1]
    assert (logits - wanted).norm() < 0.15 * wanted.norm()


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_what_a_config_leaves_out_is_what_transformers_takes_it_for(architecture: Any) -> None:
    import transformers

    theirs = getattr(transformers, architecture.name.replace("ForCausalLM", "Config"))()
    for name, value in architecture.hf.defaults.items():
        standing_for = getattr(theirs, name)
        # Windows that are not in use are not kept.
        assert standing_for == value or (name == "sliding_window" and not theirs.use_sliding_window), name
    bare = architecture.hf.read(HFConfig({}, Path("config.json")), architecture.name)
    kv_heads = theirs.num_key_value_heads or theirs.num_attention_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (bare.kv_heads, bare.head_dim, bare.tied_embeddings) == (kv_heads, head_dim, theirs.tie_word_embeddings)
    assert bare.norm_eps == theirs.rms_norm_eps and bare.rope.theta == theirs.rope_parameters["rope_theta"]


def _with(tmp_path: Path, family: str, **fields: Any) -> Path:
    """A directory with a configuration and no weights."""
    import transformers

    path = tmp_path / "model"
    path.mkdir()
    settings = getattr(transformers, f"{family}Config")(num_hidden_layers=3, max_position_embeddings=4096)
    document = {**settings.to_dict(), "architectures": [f"{family}ForCausalLM"], **fields}
    (path / "config.json").write_text(json.dumps({name: value for name, value in document.items() if value != "absent"}))
    return path


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("Llama", {"sliding_window": 1024}, "sliding_window 1024 is not supported; LlamaForCausalLM attends to the whole context"),
        ("Gemma", {"sliding_window": 1024}, "sliding_window 1024 is not supported"),
        ("Gemma", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ("Gemma", {"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}, "hidden_activation .* hidden_act is 'silu', and both"),
        ("Gemma", {"hidden_act": None}, "hidden_act None is not supported"),
        ("Gemma", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported; silu, swish, gelu_pytorch_tanh are"),
        ("Gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ("Mistral", {"layer_types": ["sliding_attention"] * 3}, "layer_types 'sliding_attention' is not supported"),
        ("Qwen2", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("Qwen3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types 'chunked_attention'"),
        ("Qwen3Moe", {"layer_types": ["sliding_attention"] * 3}, "layer_types 'sliding_attention' is not supported"),
        (
            "Qwen3",
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
            "rope_parameters.full_attention .* is not supported; one rotation for all layers is",
        ),
        ("Gemma2", {}, "architecture 'Gemma2ForCausalLM' is not supported; supported: LlamaForCausalLM, Mistral.*, GemmaForCausalLM"),
        ("Mixtral", {}, "architecture 'MixtralForCausalLM' is not supported"),
        ("Qwen2Moe", {}, "architecture 'Qwen2MoeForCausalLM' is not supported"),
    ],
)
def test_what_the_engine_does_not_have_is_refused_by_name(tmp_path: Path, family: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_config(_with(tmp_path, family, **fields))


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("Qwen2", {"layer_types": ["full_attention"]}, "layer_types must name the kind of each of the 3 layers"),
        ("Qwen3Moe", {"num_experts_per_tok": 200}, r"num_experts_per_tok \(200\) must be at most the number of experts \(128\)"),
        ("Qwen3Moe", {"num_local_experts": 0}, "num_local_experts must be a positive integer, not 0"),
        ("Mistral", {"sliding_window": "wide"}, "sliding_window must be a positive integer, not 'wide'"),
        ("Mistral", {"num_attention_heads": None}, "num_attention_heads is missing"),
        ("Qwen2", {"layer_types": 5}, "layer_types must be a list of names, not 5"),
        ("Qwen3", {"layer_types": None, "max_window_layers": -1}, "max_window_layers must be an integer of at least 0, not -1"),
        ("Qwen3Moe", {"layer_types": [["full_attention"]]}, "layer_types must be a list of names"),
        (
            "Llama",
            {"num_attention_heads": 6, "num_key_value_heads": 4},
            r"num_attention_heads \(6\) .* multiple of num_key_value_heads \(4\)",
        ),
        ("Llama", {"head_dim": 63}, r"head_dim \(63\) must be even"),
        ("Llama", {"head_dim": None, "hidden_size": 4097}, r"hidden_size \(4097\) must be a multiple of num_attention_heads \(32\), or"),
        ("Llama", {"num_hidden_layers": 10**12}, r"num_hidden_layers \(1000000000000\) must be an integer between 1 and 10000"),
        ("Llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number, not nan"),
        ("Llama", {"rope_parameters": None, "rope_theta": -1.0}, r"rope_theta \(-1.0\) must be a positive number"),
        ("Llama", {"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
        ("Gemma", {"tie_word_embeddings": None}, "tie_word_embeddings must be true or false, not None"),
        ("Qwen3Moe", {"mlp_only_layers": 3}, "mlp_only_layers must be a list of integers, not 3"),
    ],
)
def test_wrong_fields_are_named(tmp_path: Path, family: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(_with(tmp_path, family, **fields))


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("Mistral", {"sliding_window": 4096}, ()),
        ("Mistral", {"sliding_window": 4095}, (4095,) * 3),
        ("Mistral", {"sliding_window": "absent", "max_position_embeddings": 8192}, (4096,) * 3),
        ("Llama", {"sliding_window": 4096}, ()),
        ("Qwen2", {"sliding_window": 100, "use_sliding_window": False}, ()),
        ("Qwen2", {"sliding_window": 100, "use_sliding_window": True, "layer_types": None, "max_window_layers": 2}, (None, None, 100)),
        ("Qwen2", {"sliding_window": 100, "use_sliding_window": True, "layer_types": None, "max_window_layers": 0}, (100,) * 3),
        ("Qwen3Moe", {"sliding_window": 100, "use_sliding_window": True}, (100,) * 3),
    ],
)
def test_windows_count_where_they_change_something(tmp_path: Path, family: str, fields: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert read_config(_with(tmp_path, family, **fields)).windows == windows


def test_gemmas_first_releases_mean_the_approximation_by_gelu(tmp_path: Path) -> None:
    assert read_config(_with(tmp_path, "Gemma", hidden_act="gelu", hidden_activation=None)).activation == "gelu_tanh"


def test_the_number_of_experts_has_two_names(tmp_path: Path) -> None:
    config = read_config(_with(tmp_path, "Qwen3Moe", num_local_experts="absent", num_experts=16))
    assert config.experts is not None and config.experts.count == 16


@pytest.mark.parametrize("fused", [False, True])
def test_missing_experts_are_named(tmp_path: Path, fused: bool) -> None:
    path = make_tiny_model(tmp_path / "tiny", "Qwen3Moe", **_EXPERTS, fused_experts=fused)
    document = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**document, "num_local_experts": 7}))
    # The router, which is read first, is what a smaller number of experts shows in.
    with pytest.raises(ConfigError, match=r"'model.layers.0.mlp.gate.weight' has shape \[6, 64\], the configuration says \[7, 64\]"):
        load_model(describe(str(path)), "float32")


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_pytorch_tanh", "absent"])
def test_gemmas_activation_may_be_named_twice(tmp_path: Path, hidden_act: str) -> None:
    path = _with(tmp_path, "Gemma", hidden_activation="gelu_pytorch_tanh", hidden_act=hidden_act)
    assert read_config(path).activation == "gelu_tanh"


def _rewrite(path: Path, **fields: Any) -> None:
    document = {**json.loads((path / "config.json").read_text()), **fields}
    (path / "config.json").write_text(json.dumps({name: value for name, value in document.items() if value != "absent"}))


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_windows_begin_at_the_layer_that_max_window_layers_says(tmp_path: Path, first: int) -> None:
    """As written before `layer_types` was: from 0 on, all layers have one."""
    path = make_tiny_model(tmp_path / "tiny", "Qwen2", use_sliding_window=True, sliding_window=20)
    _rewrite(path, layer_types="absent", max_window_layers=first)
    assert read_config(path).windows == (None,) * first + (20,) * (3 - first)
    prompt = random_prompt(5, 90, 10, 250)
    assert tiny_harness(path).greedy(prompt, 16, chunk=32) == Reference.from_directory(path).greedy(prompt, 16)


@pytest.mark.parametrize("fields", [{"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": None}, {"hidden_act": "silu"}])
def test_gemmas_activation_is_that_which_transformers_computes(tmp_path: Path, fields: dict[str, Any]) -> None:
    path = make_tiny_model(tmp_path / "tiny", "Gemma", head_dim=32)
    _rewrite(path, **fields)
    prompt = random_prompt(6, 60, 10, 250)
    harness, reference = tiny_harness(path), Reference.from_directory(path)
    assert harness.greedy(prompt, 16) == reference.greedy(prompt, 16)
    torch.testing.assert_close(harness.prefill(prompt, harness.slots(60), chunk=60), reference.logits(prompt)[-1], rtol=1e-4, atol=1e-4)


_NONSENSE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([2**31, 10**400, 10**12]),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta"]), st.sampled_from(["yarn", "llama3", 0, -1.0, None]), max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(st.data())
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_whatever_a_config_says_it_is_a_model_or_an_error_that_names_the_file(architecture: Any, data: st.DataObject) -> None:
    import transformers

    whole = getattr(transformers, architecture.name.replace("ForCausalLM", "Config"))().to_dict()
    whole |= {"rope_scaling": None, "max_window_layers": 3, "mlp_only_layers": None, "quantization_config": None, "head_dim": None}
    fields = data.draw(st.dictionaries(st.sampled_from(sorted(whole)), _NONSENSE, min_size=1, max_size=3))
    document = json.loads(json.dumps({**whole, "architectures": [architecture.name], **fields}, default=str))
    file = HFConfig(document, Path("some/config.json"))
    try:
        config = registry.for_hf(file).hf.read(file, architecture.name)
    except SpringtideError as error:
        assert "some/config.json" in str(error)
    else:
        assert config.heads % config.kv_heads == 0 and config.head_dim % 2 == 0 and config.layers >= 1


_WHOLE: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "context_length": 512,
    "norm_eps": 1e-5,
    "rope": RopeConfig(),
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 5}, r"heads \(5\) must be a multiple of kv_heads \(2\)"),
        ({"head_dim": 15}, r"head_dim \(15\) must be even"),
        ({"layers": 0}, r"layers \(0\) must be an integer between 1 and 10000"),
        ({"layers": 10**9}, r"layers \(1000000000\) must be an integer between 1 and 10000"),
        ({"vocab_size": 2**31}, r"vocab_size \(2147483648\) must be an integer between 1 and 2147483647"),
        ({"hidden_size": -64}, r"hidden_size \(-64\) must be"),
        ({"norm_eps": float("nan")}, r"norm_eps \(nan\) must not be negative"),
        ({"windows": (None, 0)}, r"windows \(0\) must be"),
    ],
)
def test_geometry_that_no_model_has_cannot_be_made(fields: dict[str, Any], message: str) -> None:
    ModelConfig(**_WHOLE)
    with pytest.raises(WrongGeometry, match=message):
        ModelConfig(**{**_WHOLE, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"theta": 0.0}, "rope.theta .0.0. must be a positive number"),
        ({"factor": -1.0}, "rope.factor .-1.0. must be a positive number"),
        ({"kind": "llama3"}, "rope.original_context .0. must be"),
        (
            {"kind": "llama3", "original_context": 9, "low_freq_factor": 4.0},
            r"rope.low_freq_factor .4.0. must be positive and less than rope.high_freq_factor .4.0.",
        ),
        ({"kind": "yarn", "original_context": 9, "theta": 1.0}, "rope.theta .1.0. must be greater than 1"),
        (
            {"kind": "yarn", "original_context": 9, "beta_slow": 33.0},
            r"rope.beta_slow .33.0. must be positive and at most rope.beta_fast .32.0.",
        ),
        ({"kind": "yarn", "original_context": 9, "mscale": -1.0}, "rope.mscale .-1.0. must not be negative"),
    ],
)
def test_rotations_that_cannot_be_computed_cannot_be_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongGeometry, match=message):
        RopeConfig(**fields)


def test_the_rotations_base_may_stand_beside_its_scaling(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    path = _with(tmp_path, "Llama", rope_scaling=scaling, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    rope = read_config(path).rope
    assert (rope.kind, rope.theta) == ("linear", 5e5)
