"""What a decode node tells of a traced attempt's time."""

from __future__ import annotations

import pytest

from decode_node.core import events as ev
from decode_node.core.actions import Action, RunStep
from node_runtime.events import SendUpdate
from springtide.protocol.outputs import SampledToken
from springtide.protocol.storage import Ingested
from springtide.protocol.timings import DecodeTimes
from tests.support.decode_core import Node, only, start
from tests.support.node_core import traced


def told(actions: list[Action]) -> list[DecodeTimes]:
    return [times for reply in only(actions, SendUpdate) for times in reply.update.times]


def step(node: Node, actions: list[Action], elapsed_ms: float) -> list[Action]:
    (run,) = only(actions, RunStep)
    node.now += elapsed_ms / 1000
    return node.tell(ev.StepDone(run.step_id, [[SampledToken(5)] for _ in run.rows], elapsed_ms))


def test_a_traced_output_tells_what_its_time_went_into_with_its_first_step_and_its_last() -> None:
    node = Node()
    node.now = 5.0
    node.tell(traced(start("a", 10, max_tokens=5)))
    node.now = 5.25
    actions = node.tell(Ingested("a", 100))
    told_by_step = []
    for elapsed_ms in (10.0, 40.0, 20.0, 30.0):
        actions = step(node, actions, elapsed_ms)
        told_by_step.append(told(actions))
    assert told_by_step == [
        [DecodeTimes("a", pytest.approx(260.0), 0.0, pytest.approx(250.0), 1, 10.0, 10.0)],
        [],
        [],
        [DecodeTimes("a", pytest.approx(350.0), 0.0, pytest.approx(250.0), 4, 100.0, 40.0)],
    ]


def test_of_an_untraced_output_nothing_is_told() -> None:
    node = Node()
    actions = node.join(start("a", 10, max_tokens=3))
    seen = step(node, actions, 10.0)
    seen += step(node, seen, 10.0)
    assert told(seen) == []
