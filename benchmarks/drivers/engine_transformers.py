"""Hugging Face transformers: the model called directly, with the kind of cache that it makes by default. A prompt is one pass, with logits
of its last token only; `generate` would add to every step what it does for options that nobody here asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.drivers.engine_work import EngineJob, Settings, TokenIds
from benchmarks.drivers.protocol import run


class TransformersEngine(EngineJob):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        torch.set_num_threads(settings.threads)
        self._model = AutoModelForCausalLM.from_pretrained(settings.directory, dtype=torch.bfloat16).eval()
        self._prompt_cache = self._new_cache()
        self._held_cache = self._new_cache()
        self._held: list[TokenIds] = []
        self._first = torch.empty(0, 1, dtype=torch.int64)
        self._next = self._first

    def prefill(self, prompt: TokenIds, cached: int) -> int:
        if cached:
            _cut(self._prompt_cache, cached)
        else:
            self._prompt_cache = self._new_cache()
        return int(self._forward(torch.tensor([prompt[cached:]]), self._prompt_cache)[0, 0])

    def hold(self, prompts: Sequence[TokenIds]) -> TokenIds:
        """All prompts have the same length. Those that were held before are so once more without being computed again."""
        if list(prompts) == self._held:
            _cut(self._held_cache, len(prompts[0]))
        else:
            self._held, self._held_cache = list(prompts), self._new_cache()
            self._first = self._forward(torch.tensor(prompts), self._held_cache)
        self._next = self._first
        return self._first[:, 0].tolist()

    def decode(self, steps: int) -> list[TokenIds]:
        taken = []
        for _ in range(steps):
            self._next = self._forward(self._next, self._held_cache)
            taken.append(self._next)
        sequences: list[TokenIds] = torch.cat(taken, dim=1).tolist()
        return sequences

    def _forward(self, token_ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """The likeliest next tokens, int64 [sequences, 1], after int64 [sequences, new tokens]."""
        with torch.inference_mode():
            logits = self._model(input_ids=token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            return logits[:, -1].argmax(-1, keepdim=True)

    def _new_cache(self) -> Any:
        return DynamicCache(config=self._model.config)


def _cut(cache: Any, length: int) -> None:
    """Down to its first `length` tokens."""
    cache.crop(length - cache.get_seq_length())


if __name__ == "__main__":
    run(lambda arguments: TransformersEngine(Settings.from_arguments(arguments)))
