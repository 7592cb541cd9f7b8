"""Dynamo's RadixTree, the index of its KV router: a tree in Rust by the 64-bit hash of each block's tokens. One worker holds everything."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("DYN_LOG", "error")

from dynamo._core import RadixTree

from benchmarks.drivers.prompts import LookUpJob
from benchmarks.drivers.protocol import run

WORKER = 1


class DynamoIndex(LookUpJob):
    def __init__(self, arguments: Sequence[str]) -> None:
        self._tree = RadixTree()
        super().__init__(arguments)

    def store(self, prompt: int) -> None:
        blocks = [{"block_hash": number, "tokens_hash": number} for number in self.sequence(self.prompts.keys(prompt))]
        event = {"event_id": prompt, "dp_rank": 0, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
        self._tree.apply_event(WORKER, json.dumps(event).encode())

    def sequence(self, keys: Sequence[bytes]) -> list[int]:
        return [int.from_bytes(key[:8], "little") for key in keys]

    def look_up(self, sequence: list[int]) -> Any:
        return self._tree.find_matches(sequence)

    def num_found(self, answer: Any) -> int:
        return max(answer.scores.values(), default=0)


if __name__ == "__main__":
    run(DynamoIndex)
