"""The work of the drivers of grammar libraries: JSON schemas, each with the beginning of an output that satisfies it. Arguments: the demo
model's directory, a file with schemas and outputs (a JSON list of [schema, token ids]), and two numbers that are not used.

Operations of the protocol: `compile` (each schema once, to a matcher that has made its first mask, nothing being remembered of earlier
ones), `mask` (all outputs, token by token: the mask of what may come next, and the token taken in).
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

TokenIds = list[int]
CompiledT = TypeVar("CompiledT")
MatcherT = TypeVar("MatcherT")


class GrammarJob(ABC, Generic[CompiledT, MatcherT]):
    """A library. Its masks have a bit for each token, 32 of them in a number."""

    def __init__(self, arguments: Sequence[str]) -> None:
        directory, cases, *_ = arguments
        self.directory = Path(directory)
        self.vocab_size: int = json.loads((self.directory / "config.json").read_text())["vocab_size"]
        cased: list[tuple[dict[str, Any], TokenIds]] = json.loads(Path(cases).read_text())
        self._schemas = [json.dumps(schema, ensure_ascii=False) for schema, _ in cased]
        self._outputs = [output for _, output in cased]
        self._compiled: list[CompiledT] = []

    @abstractmethod
    def compile(self, schema: str) -> CompiledT:
        """The library's own form of a schema's JSON text."""

    @abstractmethod
    def matcher(self, compiled: CompiledT) -> MatcherT:
        """At the beginning of an output."""

    @abstractmethod
    def mask(self, matcher: MatcherT) -> np.ndarray:
        """What may come next: int32 [1, vocabulary / 32], the same memory each time."""

    @abstractmethod
    def take(self, matcher: MatcherT, token_id: int) -> bool:
        """Whether the token may come next; then it has."""

    def taken(self) -> list[bool]:
        """Of each output, whether it is one of its schema."""
        return list(map(self._takes, self._schemas, self._outputs))

    def verify(self) -> None:
        assert all(self.taken()), "there is an output that is none of its schema"
        self._compiled = [self.compile(schema) for schema in self._schemas]

    def _takes(self, schema: str, output: TokenIds) -> bool:
        matcher = self.matcher(self.compile(schema))
        return all(self.mask(matcher)[0][token_id // 32] >> token_id % 32 & 1 and self.take(matcher, token_id) for token_id in output)

    def measure(self, operation: str, times: int) -> list[float]:
        match operation:
            case "compile":
                return [sum(map(self._time_compile, self._schemas)) for _ in range(times)]
            case "mask":
                return [sum(map(self._time_masks, self._compiled, self._outputs)) for _ in range(times)]
        raise ValueError(f"no operation {operation!r}")

    def close(self) -> None:
        """Nothing was started."""

    def _time_compile(self, schema: str) -> float:
        started = time.perf_counter()
        self.mask(self.matcher(self.compile(schema)))
        return time.perf_counter() - started

    def _time_masks(self, compiled: CompiledT, output: TokenIds) -> float:
        matcher = self.matcher(compiled)
        started = time.perf_counter()
        for token_id in output:
            self.mask(matcher)
            self.take(matcher, token_id)
        return time.perf_counter() - started
