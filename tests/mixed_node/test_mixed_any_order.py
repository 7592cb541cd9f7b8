"""The mixed core under random orders of events: what holds whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.mixed_core import World


@pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "overlap"])
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_the_order_of_events_each_attempt_ends_once_and_gives_its_slots_back(overlap: bool, data: st.DataObject) -> None:
    world = World(data, overlap=overlap)
    world.play()
    for name in world.begun:
        assert world.ended[name] + world.computed[name] >= 1 or name in world.excused
