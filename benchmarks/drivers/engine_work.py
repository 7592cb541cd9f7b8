"""What an engine does in `make bench-engine`, whosever it is: prompts to compute, sequences to decode, and a text to prove itself with.

Operations of the protocol: `startup` (seconds from the process's start until the engine is ready for its first pass, however often asked),
`prefill-N` (one prompt of N tokens that were never seen before, to its first token), `decode-B` (STEPS steps of B sequences, `context`
tokens before each), `cached-N` (a prompt of N tokens that are cached and FEW that are new, to its first token).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from tokenizers import Tokenizer

STEPS = 16
FEW = 16
LARGEST_BATCH = 64
KV_BYTES = 2 << 30
"""Memory for keys and values in each system that wants to know."""
COUNTED_TO = 199
"""The text to prove oneself with counts up from 1. Every digit is a token, and at its end the model's best token leads by 2.8 and more."""
PROVEN_TOKENS = 16
PROVEN_BATCH = 3

TokenIds = list[int]


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of a driver; `context`: tokens before the first step of decoding."""

    directory: Path
    threads: int
    context: int

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Settings:
        directory, threads, context = arguments
        return cls(Path(directory), int(threads), int(context))


class EngineJob(ABC):
    """A system with the model, everything greedy and without regard to end tokens."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._tokenizer = Tokenizer.from_file(str(settings.directory / "tokenizer.json"))
        self._random = np.random.default_rng(0)
        self._prompts = [self._new_tokens(settings.context) for _ in range(LARGEST_BATCH)]
        self._startup_s = 0.0

    @abstractmethod
    def prefill(self, prompt: TokenIds, cached: int) -> int:
        """The token after `prompt`, whose first `cached` tokens, and no more, are those of the prompt before this one."""

    @abstractmethod
    def hold(self, prompts: Sequence[TokenIds]) -> TokenIds:
        """Makes these sequences ready to be decoded, in place of those before; returns the first token of each."""

    @abstractmethod
    def decode(self, steps: int) -> list[TokenIds]:
        """So many further tokens of every sequence that is held."""

    def verify(self) -> None:
        self._startup_s = time.time() - psutil.Process().create_time()
        text = self._tokenizer.encode(" ".join(map(str, range(1, COUNTED_TO + 1))), add_special_tokens=False).ids
        prompt, expected = text[:-PROVEN_TOKENS], text[-PROVEN_TOKENS:]
        came = self.prefill(prompt, 0)
        assert came == expected[0], f"{came} came after the prompt, not {expected[0]}"
        first = self.hold([prompt] * PROVEN_BATCH)
        for sequence, rest in zip(first, self.decode(PROVEN_TOKENS - 1), strict=True):
            assert [sequence, *rest] == expected, f"{[sequence, *rest]} came after the prompt, not {expected}"

    def measure(self, operation: str, times: int) -> list[float]:
        kind, _, size = operation.partition("-")
        match kind:
            case "startup":
                return [self._startup_s] * times
            case "prefill":
                return [self._time_prefill(self._new_tokens(int(size)), 0) for _ in range(times)]
            case "cached":
                return self._measure_cached(int(size), times)
            case "decode":
                return [self._time_decode(self._prompts[: int(size)]) for _ in range(times)]
        raise ValueError(f"no operation {operation!r}")

    def close(self) -> None:  # noqa: B027 (it is all there is to do, for every one of them)
        """Nothing was started."""

    def _measure_cached(self, num_tokens: int, times: int) -> list[float]:
        prefix = self._new_tokens(num_tokens)
        self.prefill(prefix + self._new_tokens(FEW), 0)
        return [self._time_prefill(prefix + self._new_tokens(FEW), num_tokens) for _ in range(times)]

    def _time_prefill(self, prompt: TokenIds, cached: int) -> float:
        started = time.perf_counter()
        self.prefill(prompt, cached)
        return time.perf_counter() - started

    def _time_decode(self, prompts: Sequence[TokenIds]) -> float:
        self.hold(prompts)
        started = time.perf_counter()
        self.decode(STEPS)
        return time.perf_counter() - started

    def _new_tokens(self, count: int) -> TokenIds:
        """Ordinary ones, at random."""
        vocabulary = self._tokenizer.get_vocab_size()
        tokens: TokenIds = self._random.integers(vocabulary // 2, vocabulary, count).tolist()
        return tokens
