"""The mixed core under random orders of events: what holds whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node_runtime import events
from tests.support.mixed_core import NUM_SLOTS, World


@pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "overlap"])
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_the_order_of_events_each_attempt_ends_once_and_gives_its_slots_back(overlap: bool, data: st.DataObject) -> None:
    world = World(data, overlap=overlap)
    for _ in range(data.draw(st.integers(1, 100), label="steps")):
        choices = [
            *world.possible() * 3,
            "start",
            "start",
            "tick",
            "quiet",
            *(["abort", "abort", "end_session", "lose_store"] if world.begun else []),
        ]
        getattr(world, data.draw(st.sampled_from(choices), label="next"))()
    world.tell(events.Quiet(False))
    for _ in range(3000):
        choices = world.possible()
        if choices:
            getattr(world, choices[0])()
        elif world.core.has_work:
            world.now += 31.0
            world.tick()
        else:
            break
    assert not world.core.has_work
    assert world.store.held == {} and len(world.store.free) == NUM_SLOTS
    for name in world.begun:
        assert world.ended[name] + world.computed[name] >= 1 or name in world.excused
