"""The decode core under random orders of events: what holds whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.decode_core import World


@pytest.mark.parametrize("pages", [None, 8], ids=["in the arena", "loads ahead"])
@pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "overlap"])
@given(st.data())
@settings(max_examples=100, deadline=None)
def test_whatever_the_order_of_events_each_attempt_ends_once_and_gives_its_slots_back(
    overlap: bool, pages: int | None, data: st.DataObject
) -> None:
    world = World(data, overlap=overlap, pages=pages)
    world.play()
    for name in world.begun:
        assert (world.ended[name] == 1) or (name in world.excused)
