"""Hugging Face transformers in float32: what greedy output has to be, token for token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


class Reference:
    """`model` is a transformers causal LM; the prompts go through it one by one, without padding."""

    def __init__(self, model: Any) -> None:
        self._model = model.float().eval()

    @classmethod
    def from_gguf(cls, path: Path) -> Reference:
        """With transformers' own reading of the GGUF; `from_pretrained(gguf_file=…)` does the same but wants accelerate installed."""
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_config(config)
        tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        assert not unexpected and set(missing) <= set(model.all_tied_weights_keys), (missing, unexpected)
        model.tie_weights()
        return cls(model)

    @classmethod
    def from_directory(cls, path: Path) -> Reference:
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))

    def logits(self, prompt: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab]: after each token of the prompt."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([list(prompt)])).logits[0]
            return logits

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The next `num_tokens` tokens, whatever they are: end-of-sequence does not end them."""
        tokens: list[int] = []
        with torch.inference_mode():
            step = self._model(torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1)
            while True:
                tokens.append(int(step.logits[0, -1].argmax()))
                if len(tokens) == num_tokens:
                    return tokens
                step = self._model(torch.tensor([tokens[-1:]]), past_key_values=step.past_key_values, use_cache=True)


def random_prompt(seed: int, length: int, low: int = 100, high: int = 40_000) -> list[int]:
    """Token ids that are the same for the same seed; [low, high) keeps clear of special tokens."""
    generator = random.Random(seed)
    return [generator.randrange(low, high) for _ in range(length)]
