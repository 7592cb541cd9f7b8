"""Who is listened to, and for how long."""

from __future__ import annotations

import asyncio
import time

import pytest

from conductor.server import silence
from conductor.server.silence import Silence, Silences

LOOK_S = 0.02


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "LOOK_EVERY_S", LOOK_S)


async def test_who_is_not_heard_in_time_ends_the_waiting() -> None:
    with pytest.raises(TimeoutError, match="nothing was heard for"):
        async with Silence(Silences(0.1)):
            await asyncio.Event().wait()


async def test_who_is_heard_now_and_then_is_waited_for() -> None:
    async with Silence(Silences(0.2)) as one:
        for _ in range(10):
            await asyncio.sleep(0.05)
            one.heard()


async def test_an_observer_that_was_held_up_itself_blames_nobody() -> None:
    async with Silence(Silences(0.2)) as one:
        for _ in range(3):
            time.sleep(0.4)  # noqa: ASYNC251 - whatever holds up an event loop
            await asyncio.sleep(0)
            one.heard()


async def test_of_many_only_those_are_lost_who_are_silent() -> None:
    silences, lost = Silences(0.2), list[int]()

    async def listen(number: int) -> None:
        try:
            async with Silence(silences) as one:
                for _ in range(30):
                    await asyncio.sleep(LOOK_S)
                    if number % 2:
                        one.heard()
        except TimeoutError:
            lost.append(number)

    await asyncio.gather(*map(listen, range(20)))
    assert sorted(lost) == list(range(0, 20, 2))


async def test_nobody_looks_once_there_is_nobody_left() -> None:
    silences = Silences(0.1)
    async with Silence(silences):
        pass
    with pytest.raises(TimeoutError):
        async with Silence(silences) as one:
            await asyncio.Event().wait()
    one.heard()
    assert silences._next_look is None and not silences._heard, "what is heard too late is not waited for again"
    async with Silence(silences) as one:
        for _ in range(20):
            await asyncio.sleep(LOOK_S)
            one.heard()
