from __future__ import annotations

import asyncio
import time

import pytest

from springtide import clock
from springtide.clock import ObservedTime, Silence


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "LOOK_EVERY_S", 0.02)


async def test_who_is_not_heard_in_time_ends_the_waiting() -> None:
    with pytest.raises(TimeoutError, match="nothing was heard for"):
        async with Silence(0.1):
            await asyncio.Event().wait()


async def test_who_is_heard_now_and_then_is_waited_for() -> None:
    async with Silence(0.2) as one:
        for _ in range(10):
            await asyncio.sleep(0.05)
            one.heard()


async def test_an_observer_that_was_held_up_itself_blames_nobody() -> None:
    async with Silence(0.2) as one:
        for _ in range(3):
            time.sleep(0.4)  # noqa: ASYNC251 - whatever holds up an event loop
            await asyncio.sleep(0)
            one.heard()


def test_a_pause_of_the_observer_counts_as_one_look() -> None:
    observed = ObservedTime(most_s=0.5)
    for now in (10.0, 10.25, 10.5, 70.0, 70.25):
        observed.look(now)
    assert observed.now == 0.25 + 0.25 + 0.5 + 0.25
