"""The index of our pool."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.drivers.prompts import LookUpJob
from benchmarks.drivers.protocol import run
from benchmarks.filled_pool import new_pool, store
from springtide.ids import BlockKey


class SpringtideIndex(LookUpJob):
    def __init__(self, arguments: Sequence[str]) -> None:
        count, blocks = map(int, arguments)
        self._pool = new_pool(count * blocks)
        super().__init__(arguments)

    def store(self, prompt: int) -> None:
        store(self._pool, prompt, self.sequence(self.prompts.keys(prompt)))

    def sequence(self, keys: Sequence[bytes]) -> list[BlockKey]:
        return [BlockKey(key) for key in keys]

    def look_up(self, sequence: list[BlockKey]) -> int:
        return self._pool.num_held(sequence)

    def num_found(self, answer: int) -> int:
        return answer


if __name__ == "__main__":
    run(SpringtideIndex)
