"""Models for tests: the demo model's file, and tiny random checkpoints with a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from engine.formats.files import demo_model

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("e", "r"), ("o", "n"))
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    # Large enough that two tokens are hardly ever equally likely.
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


def demo_gguf() -> Path:
    """SmolLM2-135M-Instruct."""
    return demo_model()


def make_tiny_llama(path: Path, *, seed: int = 0, max_shard_size: str = "1GB", special_tokens: Sequence[str] = (), **config: Any) -> Path:
    """Writes a Hugging Face directory with random float32 weights, the same for the same arguments, and returns `path`.

    `config` has fields of transformers' LlamaConfig. The tokenizer is byte-level BPE with token ids below 270, and `special_tokens` beyond
    them, ChatML its template.
    """
    _random_model("Llama", seed, config).save_pretrained(path, max_shard_size=max_shard_size)
    write_tiny_tokenizer(path, special_tokens)
    return path


def make_tiny_model(path: Path, family: str, *, seed: int = 0, fused_experts: bool = False, **config: Any) -> Path:
    """As `make_tiny_llama`, of the `family` that transformers calls so (`Qwen3Moe`), its norms and biases random too.

    `fused_experts`: a layer's experts in two tensors, as transformers 5 keeps them in memory, instead of one by one.
    """
    import torch

    model = _random_model(family, seed, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(path, save_original_format=not fused_experts)
    write_tiny_tokenizer(path)
    return path


def _random_model(family: str, seed: int, config: dict[str, Any]) -> Any:
    import torch
    import transformers

    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    settings = getattr(transformers, f"{family}Config")(**{**_DEFAULTS, **config})
    model = getattr(transformers, f"{family}ForCausalLM")(settings)
    torch.random.set_rng_state(generator_state)
    return model


def write_tiny_tokenizer(path: Path, special_tokens: Sequence[str] = ()) -> None:
    """tokenizer.json and tokenizer_config.json."""
    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in _MERGES)]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=list(_MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (*_SPECIAL, *special_tokens)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
