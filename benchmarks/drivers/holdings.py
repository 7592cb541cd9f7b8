"""What the workers of a cluster hold, and the work of the drivers of routers' indexes: finding a prompt's holders, taking in events."""

from __future__ import annotations

import itertools
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

PROMPTS, HOT = 64, 4
"""The first HOT prompts are held by every worker, in full or in part; the others in full by one to three."""
SHARES = (1.0, 1.0, 0.5, 0.25)
FOUND = 200
"""Prompts that are looked up in one repetition, every other one a hot one."""
EVENTS, EVENT_BLOCKS = 100, 128
"""That are taken in in one repetition; of blocks that nobody had."""


@dataclass(frozen=True, slots=True)
class Holdings:
    workers: int
    blocks: int
    """Of each prompt."""

    def keys(self, prompt: int) -> list[bytes]:
        """An index does not mind whether keys are chained hashes."""
        return [blake2b(b"%d %d" % (prompt, block), digest_size=16).digest() for block in range(self.blocks)]

    def holders(self, prompt: int) -> dict[int, int]:
        """Worker -> blocks of the prompt, from the first on."""
        if prompt < HOT:
            return {worker: max(1, int(self.blocks * SHARES[(worker + prompt) % len(SHARES)])) for worker in range(self.workers)}
        chance = random.Random(prompt)
        return dict.fromkeys(chance.sample(range(self.workers), chance.randint(1, 3)), self.blocks)

    def order(self) -> Iterator[int]:
        """Prompts to ask for, for ever."""
        chance = random.Random(0)
        while True:
            yield chance.randrange(HOT)
            yield chance.randrange(HOT, PROMPTS)


class RouterIndexJob(ABC):
    """Arguments: workers, blocks of a prompt. What is looked up and taken in is in the form in which the system gets it.

    Operations: `find` a prompt's holders, find and `read` them, an `empty` find of a prompt without blocks, and `intake` of events.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.holdings = Holdings(*map(int, arguments[-2:]))
        self._new = itertools.count(PROMPTS)
        prompts = {prompt: self.holdings.keys(prompt) for prompt in range(PROMPTS)}
        for prompt, keys in prompts.items():
            for worker, blocks in self.holdings.holders(prompt).items():
                self.take_in(self.event(worker, keys[:blocks]))
        self._sequences = {prompt: self.sequence(keys) for prompt, keys in prompts.items()}
        self._order = self.holdings.order()
        self._nothing = self.sequence([])

    @abstractmethod
    def event(self, worker: int, keys: Sequence[bytes]) -> Any:
        """The next event that the worker's store would send, as bytes."""

    @abstractmethod
    def take_in(self, event: Any) -> None: ...

    @abstractmethod
    def sequence(self, keys: Sequence[bytes]) -> Any: ...

    @abstractmethod
    def find(self, sequence: Any) -> Any: ...

    @abstractmethod
    def read(self, answer: Any) -> object:
        """How many blocks each worker has, in the form in which a caller in Python is given it."""

    @abstractmethod
    def found(self, answer: Any) -> dict[int, int]:
        """Worker -> blocks."""

    def verify(self) -> None:
        for prompt, sequence in self._sequences.items():
            assert self.found(self.find(sequence)) == self.holdings.holders(prompt), "every holder is found, as far as it holds the prompt"

    def measure(self, operation: str, times: int) -> list[float]:
        work = {"find": self._find, "read": self._find_and_read, "empty": self._find_nothing, "intake": self._take_in}[operation]
        return [work() for _ in range(times)]

    def _find(self) -> float:
        return self._find_all([self._sequences[prompt] for prompt in itertools.islice(self._order, FOUND)])

    def _find_nothing(self) -> float:
        return self._find_all([self._nothing] * FOUND)

    def _find_all(self, sequences: Sequence[Any]) -> float:
        started = time.perf_counter()
        for sequence in sequences:
            self.find(sequence)
        return time.perf_counter() - started

    def _find_and_read(self) -> float:
        sequences = [self._sequences[prompt] for prompt in itertools.islice(self._order, FOUND)]
        started = time.perf_counter()
        for sequence in sequences:
            self.read(self.find(sequence))
        return time.perf_counter() - started

    def _take_in(self) -> float:
        events = []
        for _ in range(EVENTS):
            number = next(self._new)
            keys = [blake2b(b"%d %d" % (number, block), digest_size=16).digest() for block in range(EVENT_BLOCKS)]
            events.append(self.event(number % self.holdings.workers, keys))
        started = time.perf_counter()
        for event in events:
            self.take_in(event)
        self.find(self._sequences[HOT])
        return time.perf_counter() - started

    def close(self) -> None:  # noqa: B027 (everything is in this process)
        pass
