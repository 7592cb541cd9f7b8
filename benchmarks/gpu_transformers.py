"""transformers with a model of the same shape and random weights, beside ours on the same device."""

from __future__ import annotations

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.gpu_engine import all_s
from engine.model_config import ModelConfig


class Transformers:
    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        shape = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.context_length,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                self._model = LlamaForCausalLM(shape).eval()
        finally:
            torch.set_default_dtype(before)

    def prefill_s(self, tokens: int, repeats: int) -> list[float]:
        ids = torch.ones(1, tokens, dtype=torch.int64, device=self._device)

        @torch.inference_mode()
        def run() -> None:
            self._model(ids, past_key_values=DynamicCache(), logits_to_keep=1).logits.argmax(-1).tolist()

        return all_s(self._device, run, repeats)

    def decode_s(self, batch: int, context: int, steps: int) -> list[float]:
        cache = DynamicCache()
        token = torch.ones(batch, 1, dtype=torch.int64, device=self._device)

        @torch.inference_mode()
        def run() -> None:
            self._model(token, past_key_values=cache).logits.argmax(-1).tolist()
            cache.crop(-1)

        with torch.inference_mode():
            self._model(token.expand(batch, context - 1), past_key_values=cache, logits_to_keep=1)
        return all_s(self._device, run, steps)
