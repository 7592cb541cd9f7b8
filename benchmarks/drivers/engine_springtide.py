"""Springtide's engine: `ModelRunner.forward` over an arena, chunked as a prefill node does, and the sampler after each pass that ends a
prompt or makes a step. The slots of a sequence lie anywhere in the arena, as they come from a store that has been in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.drivers.engine_work import FEW, KV_BYTES, LONGEST_PROMPT, PROVEN_TOKENS, STEPS, EngineJob, Settings, TokenIds
from benchmarks.drivers.protocol import run
from engine.batch import SamplingRow, SequenceChunk
from engine.formats.files import describe
from engine.loader import load_model
from engine.runner import ModelRunner
from engine.sampling.sampler import sample
from springtide.blocks import blocks_for
from springtide.config import ClusterConfig
from springtide.modelinfo import KVDtype
from springtide.protocol.sampling import SamplingParams

DTYPE: KVDtype = "bfloat16"
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
MOST_OUTPUT = max(1 + STEPS, PROVEN_TOKENS)


@dataclass(frozen=True, slots=True)
class Computed:
    """A sequence whose prompt is in its slots."""

    prompt: TokenIds
    slots: list[int]
    output: TokenIds = field(default_factory=list)


class SpringtideEngine(EngineJob):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        torch.set_num_threads(settings.threads)
        info, config = describe(str(settings.directory)), ClusterConfig()
        spec = info.kv_spec(DTYPE, config.kv.block_tokens)
        num_slots = KV_BYTES // spec.bytes_per_slot
        # Filled, so that all of it counts as memory in use, as vLLM's does.
        arena = np.full(num_slots * spec.bytes_per_slot, 0, np.uint8)
        self._runner = ModelRunner(load_model(info, DTYPE), spec, arena, num_slots)
        self._chunk_tokens = config.prefill_node.chunk_tokens
        self._free: list[int] = np.random.default_rng(0).permutation(num_slots).tolist()
        self._prompt_slots = self._take(LONGEST_PROMPT + FEW)
        self._computed: list[Computed] = []
        self._held: list[Computed] = []

    def prefill(self, prompt: TokenIds, cached: int) -> int:
        return self._compute(prompt, cached, self._prompt_slots)

    def hold(self, prompts: Sequence[TokenIds]) -> TokenIds:
        """Those of the same prompts that were held before are so once more without being computed again."""
        if any(sequence.prompt != prompt for sequence, prompt in zip(self._computed, prompts, strict=False)):
            self._free += [slot for sequence in self._computed for slot in sequence.slots]
            self._computed = []
        for prompt in prompts[len(self._computed) :]:
            slots = self._take(len(prompt) + MOST_OUTPUT)
            self._computed.append(Computed(prompt, slots, [self._compute(prompt, 0, slots)]))
        self._held = self._computed[: len(prompts)]
        for sequence in self._held:
            del sequence.output[1:]
        return [sequence.output[0] for sequence in self._held]

    def decode(self, steps: int) -> list[TokenIds]:
        for _ in range(steps):
            logits = self._runner.forward(
                [
                    SequenceChunk(sequence.output[-1:], len(sequence.prompt) + len(sequence.output) - 1, sequence.slots)
                    for sequence in self._held
                ]
            )
            sampled = sample(logits, [SamplingRow(GREEDY, sequence.prompt, sequence.output) for sequence in self._held])
            for sequence, token in zip(self._held, sampled, strict=True):
                sequence.output.append(token.token_id)
        return [sequence.output[-steps:] for sequence in self._held]

    def _compute(self, prompt: TokenIds, cached: int, slots: list[int]) -> int:
        logits = torch.empty(0)
        for start in range(cached, len(prompt), self._chunk_tokens):
            chunk = prompt[start : start + self._chunk_tokens]
            logits = self._runner.forward([SequenceChunk(chunk, start, slots, wants_logits=start + len(chunk) == len(prompt))])
        return sample(logits, [SamplingRow(GREEDY, prompt, [])])[0].token_id

    def _take(self, tokens: int) -> list[int]:
        count = blocks_for(tokens, self._runner.kv_spec.block_tokens)
        taken, self._free = self._free[:count], self._free[count:]
        return taken


if __name__ == "__main__":
    run(lambda arguments: SpringtideEngine(Settings.from_arguments(arguments)))
