"""The work of the hashing drivers. Arguments: prompts in one repetition, tokens of each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from benchmarks.drivers.protocol import repeat

BLOCK_TOKENS = 64
VOCABULARY = 128_000


class HashingJob:
    def __init__(self, hashes: Callable[[list[int]], Sequence[object]], arguments: Sequence[str]) -> None:
        self._count, tokens = map(int, arguments[-2:])
        self._hashes = hashes
        chance = random.Random(1)
        self._tokens = [chance.randrange(VOCABULARY) for _ in range(tokens)]

    def verify(self) -> None:
        before, full = self._hashes(self._tokens), len(self._tokens) // BLOCK_TOKENS
        assert len(before) == len(set(before)) == full, "there is a hash for every full block"
        changed = [self._tokens[0] ^ 1, *self._tokens[1:]]
        assert self._hashes(changed)[0] != before[0], "other tokens, another hash"

    def measure(self, operation: str, times: int) -> list[float]:
        assert operation == "hash"
        return repeat(lambda: [self._hashes(self._tokens) for _ in range(self._count)], times)

    def close(self) -> None:
        pass
