"""Dynamo's RadixTree, the index of its KV router, with many workers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("DYN_LOG", "error")

from dynamo._core import RadixTree

from benchmarks.drivers.holdings import RouterIndexJob
from benchmarks.drivers.protocol import run


class DynamoRouterIndex(RouterIndexJob):
    def __init__(self, arguments: Sequence[str]) -> None:
        self._tree = RadixTree()
        self._events = 0
        super().__init__(arguments)

    def event(self, worker: int, keys: Sequence[bytes]) -> tuple[int, bytes]:
        self._events += 1
        blocks = [{"block_hash": number, "tokens_hash": number} for number in self.sequence(keys)]
        event = {"event_id": self._events, "dp_rank": 0, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
        return worker, json.dumps(event).encode()

    def take_in(self, event: tuple[int, bytes]) -> None:
        self._tree.apply_event(*event)

    def sequence(self, keys: Sequence[bytes]) -> list[int]:
        return [int.from_bytes(key[:8], "little") for key in keys]

    def find(self, sequence: list[int]) -> Any:
        return self._tree.find_matches(sequence)

    def read(self, answer: Any) -> object:
        return answer.scores

    def found(self, answer: Any) -> dict[int, int]:
        return {worker: blocks for (worker, _rank), blocks in answer.scores.items()}


if __name__ == "__main__":
    run(DynamoRouterIndex)
