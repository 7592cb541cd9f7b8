"""The work of the index drivers: the longest held prefix of a prompt is looked up, among many prompts that have nothing in common."""

from __future__ import annotations

import itertools
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

KEY_BYTES = 16
LOOKED_UP = 1000
"""In one repetition, each another prompt."""
AT_HAND = 10_000
"""Prompts whose keys are prepared, chosen at random: so many that the processor's caches do not hold their blocks."""


@dataclass(frozen=True, slots=True)
class Prompts:
    count: int
    blocks: int
    """Of each."""

    def keys(self, prompt: int) -> list[bytes]:
        """An index does not mind whether keys are chained hashes."""
        return [blake2b(b"%d %d" % (prompt, block), digest_size=KEY_BYTES).digest() for block in range(self.blocks)]

    def some(self) -> list[int]:
        return random.Random(1).sample(range(self.count), min(AT_HAND, self.count))


class LookUpJob(ABC):
    """Operations: `look_up`, and `empty`, of a prompt without blocks. What is looked up is in the form that the index takes."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.prompts = Prompts(*map(int, arguments[-2:]))
        for prompt in range(self.prompts.count):
            self.store(prompt)
        self._at_hand: Iterator[Any] = itertools.cycle([self.sequence(self.prompts.keys(prompt)) for prompt in self.prompts.some()])

    @abstractmethod
    def store(self, prompt: int) -> None: ...

    @abstractmethod
    def sequence(self, keys: Sequence[bytes]) -> Any: ...

    @abstractmethod
    def look_up(self, sequence: Any) -> object: ...

    @abstractmethod
    def num_found(self, answer: Any) -> int: ...

    def verify(self) -> None:
        for prompt in self.prompts.some()[:LOOKED_UP]:
            keys = self.prompts.keys(prompt)
            assert self.num_found(self.look_up(self.sequence(keys))) == len(keys), "what was stored is found"
            keys[len(keys) // 2] = bytes(KEY_BYTES)
            assert self.num_found(self.look_up(self.sequence(keys))) == len(keys) // 2, "up to what was not stored"

    def measure(self, operation: str, times: int) -> list[float]:
        nothing = self.sequence([])
        durations = []
        for _ in range(times):
            sequences = [nothing] * LOOKED_UP if operation == "empty" else list(itertools.islice(self._at_hand, LOOKED_UP))
            started = time.perf_counter()
            for sequence in sequences:
                self.look_up(sequence)
            durations.append(time.perf_counter() - started)
        return durations

    def close(self) -> None:  # noqa: B027 (everything is in this process)
        pass
