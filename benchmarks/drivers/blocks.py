"""The work of the store drivers: blocks of one size, put into a store in another process and got back from there."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Blocks:
    count: int
    size: int

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Blocks:
        count, size = map(int, arguments[-2:])
        return cls(count, size)

    def random(self) -> np.ndarray:
        """uint8 [count, size]"""
        return np.random.default_rng().integers(0, 256, (self.count, self.size), np.uint8)


class KeyValueJob(ABC):
    """Base of the jobs of stores that put and get by key. A put is of keys that are new to the store (what was put before is removed
    between two, untimed), a get of those that were put last."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.memory = blocks.random()
        """What is put, and where what is got arrives."""
        self._sets = itertools.count()
        self._keys: list[str] = []

    @abstractmethod
    def put(self, keys: Sequence[str]) -> None:
        """The blocks of `memory` under these keys. Raises RuntimeError when one is not taken."""

    @abstractmethod
    def get(self, keys: Sequence[str]) -> object:
        """Raises RuntimeError when one is not there. What it returns is handed to `arrived`."""

    @abstractmethod
    def arrived(self, got: object) -> np.ndarray:
        """What a get brought: uint8 [count, size]."""

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None: ...

    def verify(self) -> None:
        sent = self.memory.copy()
        self._put_new()
        self.memory[:] = 0
        assert np.array_equal(self.arrived(self.get(self._keys)), sent), "the bytes that came back are not those that were put"

    def measure(self, operation: str, times: int) -> list[float]:
        return [self._put_new() if operation == "put" else self._get() for _ in range(times)]

    def _put_new(self) -> float:
        if self._keys:
            self.remove(self._keys)
        name = next(self._sets)
        self._keys = [f"set-{name}-block-{index}" for index in range(self.blocks.count)]
        started = time.perf_counter()
        self.put(self._keys)
        return time.perf_counter() - started

    def _get(self) -> float:
        started = time.perf_counter()
        self.get(self._keys)
        return time.perf_counter() - started
