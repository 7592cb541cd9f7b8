"""Drives a ModelRunner as the nodes do: slots in random order, prompts in chunks, one token a step afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.batch import SequenceChunk
from engine.model.base import Model
from engine.runner import ModelRunner
from springtide.blocks import blocks_for
from springtide.modelinfo import KVSpec


class Harness:
    """A runner over an arena whose every byte is 0xFF at first: NaN in every dtype, so that reading what was never written shows."""

    def __init__(self, model: Model, spec: KVSpec, num_slots: int) -> None:
        arena = np.full(num_slots * spec.bytes_per_slot, 0xFF, np.uint8)
        self._wrap(ModelRunner(model, spec, arena, num_slots), arena)

    @classmethod
    def around(cls, runner: ModelRunner, arena: np.ndarray) -> Harness:
        harness = cls.__new__(cls)
        harness._wrap(runner, arena)
        return harness

    def _wrap(self, runner: ModelRunner, arena: np.ndarray) -> None:
        self.runner = runner
        self.spec = runner.kv_spec
        self.num_slots = runner.num_slots
        self.arena = arena
        self._random = random.Random(0)
        self._free = list(range(self.num_slots))
        self.foul()

    def foul(self) -> None:
        """Forgets all sequences and makes the arena NaN again."""
        self.arena[:] = 0xFF
        self._free = list(range(self.num_slots))
        self._random.shuffle(self._free)

    def slots(self, num_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(blocks_for(num_tokens, self.spec.block_tokens))]

    def prefill(self, prompt: Sequence[int], slots: Sequence[int], chunk: int, start: int = 0) -> torch.Tensor:
        """Logits [vocab] after the last token; the tokens before `start` are in the slots already."""
        for begin in range(start, len(prompt), chunk):
            end = min(begin + chunk, len(prompt))
            logits = self.runner.forward([SequenceChunk(prompt[begin:end], begin, slots, wants_logits=end == len(prompt))])
        return logits[0]

    def greedy(
        self, prompt: Sequence[int], num_tokens: int, chunk: int = 4096, start: int = 0, slots: Sequence[int] | None = None
    ) -> list[int]:
        slots = self.slots(len(prompt) + num_tokens) if slots is None else slots
        tokens = [int(self.prefill(prompt, slots, chunk, start).argmax())]
        while len(tokens) < num_tokens:
            position = len(prompt) + len(tokens) - 1
            tokens.append(int(self.runner.forward([SequenceChunk(tokens[-1:], position, slots)])[0].argmax()))
        return tokens

    def guessing(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        wrong: int,
        slots: Sequence[int],
        between: Callable[[], None] = lambda: None,
    ) -> list[int]:
        """As `greedy`, whose `tokens` are known, with guesses of some of them in each step, and then `wrong` others; `between` is called
        before each step."""
        output, draw = [int(self.prefill(prompt, slots, 4096).argmax())], random.Random(wrong)
        while len(output) < len(tokens):
            between()
            position, right = len(prompt) + len(output) - 1, tokens[len(output) : len(output) + draw.randrange(4)]
            room = len(slots) * self.spec.block_tokens - position - 1
            guesses = [*right, *[1 + draw.randrange(200) for _ in range(wrong)]][:room]
            logits = self.runner.forward([SequenceChunk([output[-1], *guesses], position, slots, drafted=len(guesses))])
            for guess, row in zip([*guesses, None], logits, strict=True):
                output.append(int(row.argmax()))
                if output[-1] != guess:
                    break
        return output[: len(tokens)]
