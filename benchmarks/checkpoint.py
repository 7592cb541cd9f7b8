"""The demo model as a Hugging Face directory in bfloat16, which every system reads: the GGUF file that it comes in is not for all."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.driven import CHECKOUT
from engine.formats.files import demo_model
from engine.formats.gguf_file import GGUFFile, read_gguf
from engine.formats.gguf_weights import gguf_weights
from engine.formats.registry import for_gguf
from engine.model_config import ModelConfig
from engine.tokenizer.gguf_tokenizer import gguf_special_tokens, gguf_tokenizer

CACHE = CHECKOUT / ".cache" / "benchmarks"
"""What benchmarks make for themselves and may be deleted at any time."""
DTYPE = torch.bfloat16


def demo_checkpoint() -> Path:
    """The directory, made where it is not there yet. Its weights are those that the engine reads from the GGUF file."""
    source = demo_model()
    directory = CACHE / f"{source.stem}-bf16"
    if not (directory / "config.json").exists():
        file = read_gguf(source)
        architecture, family = for_gguf(file)
        config = family.read(file, architecture.name)
        directory.mkdir(parents=True, exist_ok=True)
        _write_tokenizer(directory, file)
        weights = gguf_weights(file, family, config)
        tensors = {name: weights.tensor(name, shape, DTYPE) for name, shape in _shapes(config).items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        # Last: it says that the directory is whole.
        (directory / "config.json").write_text(json.dumps(_hf_config(config, file, architecture.model_type), indent=1))
    return directory


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a Llama whose output head is its embedding, by name."""
    assert config.architecture == "LlamaForCausalLM" and config.tied_embeddings and not config.qkv_bias, config
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    of_layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layers = {f"model.layers.{i}.{name}.weight": shape for i in range(config.layers) for name, shape in of_layer.items()}
    return {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,), **layers}


def _hf_config(config: ModelConfig, file: GGUFFile, model_type: str) -> dict[str, Any]:
    assert config.rope.kind == "default" and config.activation == "silu", config
    return {
        "architectures": [config.architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": file.metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": file.metadata["tokenizer.ggml.eos_token_id"],
    }


def _write_tokenizer(directory: Path, file: GGUFFile) -> None:
    gguf_tokenizer(file).save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": file.text("tokenizer.chat_template"),
        **gguf_special_tokens(file),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=1))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(demo_checkpoint())
