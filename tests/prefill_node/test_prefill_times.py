"""What a prefill group tells of a traced attempt's time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from node_runtime.events import SendUpdate
from node_runtime.pass_tally import MOST_PASSES, PassTally
from prefill_node.core import events as ev
from prefill_node.core.actions import RunPass
from prefill_node.server.passes import conclude
from springtide.protocol.outputs import HandedOver, SampledToken
from springtide.protocol.storage import Acquired, FetchProgress
from springtide.protocol.timings import PassTimes, PrefillTimes, StageTimes
from tests.prefill_node.test_prefill_conclusions import DONE, RUN
from tests.prefill_node.test_prefill_core import Node, only, slots, start
from tests.support.node_core import traced


def test_a_traced_prompt_tells_of_each_chunk_and_each_stage_from_when_it_came() -> None:
    node = Node()
    node.now = 10.0
    node.tell(traced(start("a", 33)))
    node.now = 10.5
    (run,) = only(node.tell(Acquired("a", slots(5), 1, 0)), RunPass)
    node.now = 10.7
    stages = (StageTimes(110.0, 100.0, 10.0), StageTimes(200.0, 90.0, 0.0))
    (run,) = only(node.tell(ev.PassDone(run.pass_id, [None], 200.0, waited_ms=10.0, stages=stages)), RunPass)
    node.now = 10.8
    (update,) = only(node.tell(ev.PassDone(run.pass_id, [SampledToken(7)], 100.0)), SendUpdate)
    times = update.update.times
    assert times.passes == (
        PassTimes(pytest.approx(500.0), pytest.approx(200.0), 8, 16, 0, 10.0, stages),
        PassTimes(pytest.approx(700.0), pytest.approx(100.0), 24, 9, 0, 0.0, ()),
    )
    assert replace(times, passes=()) == PrefillTimes(pytest.approx(800.0), pytest.approx(500.0))


def test_a_traced_fetch_tells_when_it_was_ordered_and_what_came_of_it() -> None:
    node = Node()
    node.tell(traced(start("a", 33, source_blocks=4)))
    (run,) = only(node.tell(Acquired("a", slots(5), 1, 3)) + node.tell(FetchProgress("a", 4)), RunPass)
    (update,) = only(node.tell(ev.PassDone(run.pass_id, [SampledToken(7)], 5.0)), SendUpdate)
    # Three blocks of four layers of 100 bytes.
    assert (update.update.times.fetch_at_ms, update.update.times.fetch_bytes) == (0.0, 3 * 4 * 100)


def test_the_end_of_a_traced_hand_over_is_told_and_of_an_untraced_attempt_nothing() -> None:
    told = {}
    for name, begin in (("traced", traced(start("traced", 9))), ("plain", start("plain", 9))):
        node = Node()
        node.tell(begin)
        (run,) = only(node.tell(Acquired(name, slots(2), 0, 0)), RunPass)
        done = only(node.tell(ev.PassDone(run.pass_id, [SampledToken(7)], 5.0)), SendUpdate)[0].update
        over = HandedOver(name, 800, 3.0, 2.0)
        told[name] = done.times is not None, [sent.update for sent in only(node.tell(over), SendUpdate)]
    assert told == {"traced": (True, [HandedOver("traced", 800, 3.0, 2.0)]), "plain": (False, [])}


def test_of_very_many_passes_the_first_are_told_and_the_others_counted() -> None:
    tally = PassTally(0.0)
    for number in range(MOST_PASSES + 3):
        tally.passed(number, number + 1.0, number, 1, 0)
    times = tally.times(MOST_PASSES + 3.0, 0.0)
    assert (len(times.passes), times.passes_left_out) == (MOST_PASSES, 3)


def test_a_pass_that_is_done_says_when_each_stage_was() -> None:
    stages = (StageTimes(1.0, 1.0, 0.0), StageTimes(2.0, 1.0, 0.0))
    done = conclude(RUN, (DONE, replace(DONE, tokens=(SampledToken(7),))), 2.0, stages)
    assert isinstance(done, ev.PassDone) and done.stages == stages
