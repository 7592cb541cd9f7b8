"""The Conductor's core: a prefill instance and a decode node for a prompt whose blocks are hashed already, its work booked at both.

There are so many of each; every prefill instance holds its share of some prompts. Arguments: admission rule, workers, blocks of a prompt.
Operations: `select`; and `empty`, the end of an attempt that nobody knows of, which is a call that does nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from benchmarks.drivers.hashing import BLOCK_TOKENS
from benchmarks.drivers.holdings import HOT, PROMPTS, Holdings
from benchmarks.drivers.protocol import run
from conductor.core.conductor import ConductorCore
from conductor.core.settings import ConductorSettings
from conductor.core.types.events import Decided, InstanceUp, LoadReported, StoreWatched
from springtide.config import ClusterConfig
from springtide.cost import DecodeCost, PrefillCost
from springtide.ids import AttemptId, BlockKey, GatewayId, Incarnation, InstanceId, NodeId, RequestId
from springtide.modelinfo import ModelInfo
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.instances import InstanceRef, Load, Role
from springtide.protocol.scheduling import Schedule
from springtide.protocol.storage import BlocksStored, SnapshotPart, Tier

MODEL = ModelInfo("/model", "model", "llama", "fingerprint", 1 << 20, 32, 8, 128, 128_000, (0,))
UNKNOWN = AttemptId("unknown")
LOADS = {
    Role.PREFILL: Load(slots_total=1_000_000, slots_available=1_000_000, prefill_cost=PrefillCost(5.0, 0.05, 1e-7)),
    Role.DECODE: Load(slots_total=1_000_000, slots_available=1_000_000, max_batch=64, decode_cost=DecodeCost(10.0, 0.1, 1e-5)),
}


def new_core(holdings: Holdings, admission: str) -> ConductorCore:
    """A core with so many idle instances of either role and what prefill instances hold; all else by the configuration's defaults."""
    config = ClusterConfig.model_validate({"kv": {"block_tokens": BLOCK_TOKENS}, "conductor": {"admission": admission}})
    core = ConductorCore(ConductorSettings.of(config, MODEL))
    for role in Role:
        for worker in range(holdings.workers):
            name = f"{role.value}-{worker}"
            core.handle(StoreWatched(NodeId(name), f"{name}:2"), 0.0)
            core.handle(SnapshotPart(NodeId(name), Incarnation(1), 0, (), Tier.DRAM, complete=True), 0.0)
            core.handle(InstanceUp(InstanceRef(InstanceId(name), role, f"{name}:1", NodeId(name), f"{name}:2"), 1), 0.0)
            core.handle(LoadReported(InstanceId(name), 1, LOADS[role]), 0.0)
    for sequence, (prompt, keys) in enumerate((prompt, holdings.keys(prompt)) for prompt in range(PROMPTS)):
        for worker in range(holdings.workers):
            held = tuple(BlockKey(key) for key in keys[: holdings.holders(prompt).get(worker, 0)])
            core.handle(BlocksStored(NodeId(f"prefill-{worker}"), Incarnation(1), sequence + 1, held, Tier.DRAM), 0.0)
    return core


class SpringtideSelect:
    def __init__(self, arguments: Sequence[str]) -> None:
        self.holdings = Holdings(*map(int, arguments[-2:]))
        self._core = new_core(self.holdings, arguments[0])
        self._keys = [[BlockKey(key) for key in self.holdings.keys(prompt)] for prompt in range(2 * HOT)]
        self._ids = itertools.count()

    def verify(self) -> None:
        assert self._select()

    def measure(self, operation: str, times: int) -> list[float]:
        return [self._select() if operation == "select" else self._end_nothing() for _ in range(times)]

    def _select(self) -> float:
        number = next(self._ids)
        keys, attempt_id, now = self._keys[number % len(self._keys)], AttemptId(str(number)), number / 1000
        tokens = len(keys) * BLOCK_TOKENS + 1
        started = time.perf_counter()
        (decided,) = self._core.handle(Schedule(attempt_id, RequestId(attempt_id), GatewayId("g"), keys, tokens, 100), now)
        seconds = time.perf_counter() - started
        assert isinstance(decided, Decided)
        assert decided.assignment is not None
        self._core.handle(Progress(attempt_id, Phase.FAILED), now)
        return seconds

    def _end_nothing(self) -> float:
        now = next(self._ids) / 1000
        started = time.perf_counter()
        actions = self._core.handle(Progress(UNKNOWN, Phase.FAILED), now)
        seconds = time.perf_counter() - started
        assert not actions
        return seconds

    def close(self) -> None:
        pass


if __name__ == "__main__":
    run(SpringtideSelect)
