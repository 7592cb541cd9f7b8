"""What a pass says of the time that it took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.batch import SequenceChunk
from engine.device.streams import CopyTimes
from prefill_node.stage import compute as stage
from prefill_node.stage.compute import Hooks, PassPart
from springtide.ids import AttemptId
from springtide.protocol.stages import StageOutcome

COMPUTING_S, WAITING_S = 3.0, 2.0


class Clock:
    """Of the wall. A device's clock follows it, a thread's own only while it computes."""

    def __init__(self) -> None:
        self.now = self.computed = 0.0


class Runner:
    """Two layers, each of which takes so long."""

    def __init__(self, clock: Clock, waiting_counts: bool) -> None:
        self.clock, self.waiting_counts = clock, waiting_counts

    def work_clock(self) -> float:
        return self.clock.now if self.waiting_counts else self.clock.computed

    def copy_times(self) -> CopyTimes:
        return CopyTimes(load_waited_ms=7.0)

    def forward_layers(self, batch: Any, hidden: Any, hooks: Hooks) -> torch.Tensor:
        for layer in range(2):
            hooks.before(layer)
            self.clock.now += COMPUTING_S
            self.clock.computed += COMPUTING_S
            hooks.after(layer)
        return torch.zeros(1)


@pytest.mark.parametrize("waiting_counts", [False, True])
def test_waiting_for_a_prefix_is_no_work_whatever_the_runner_s_clock_counts(monkeypatch: pytest.MonkeyPatch, waiting_counts: bool) -> None:
    clock = Clock()
    monkeypatch.setattr(stage, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def wait(attempt_id: AttemptId, layer: int, timeout_s: float) -> None:
        clock.now += WAITING_S

    part = PassPart(0, [SequenceChunk([1], 0, (0,))], AttemptId("a"), (), None)
    runner: Any = Runner(clock, waiting_counts)
    result = stage.compute(runner, part, None, None, Hooks(part, 0, wait, 60.0, lambda end: None))
    assert result.outcome is StageOutcome.DONE
    assert (result.busy_ms, result.waited_ms) == (2000 * COMPUTING_S, 2000 * WAITING_S + 7.0)
