"""However much work nobody waits for, a round of the event loop has one turn of it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest

from conductor.server.turns import LONGEST_TURN_S, TURN_S, Turns

PART_S = TURN_S / 4


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Rounds:
    """Notes how many parts were done in each round of the event loop, which has so much else to do."""

    def __init__(self, clock: Clock, else_s: float = 0.0) -> None:
        self.parts: list[int] = []
        self._clock, self._else_s = clock, else_s
        self._done = 0
        self._begin()

    def work(self, parts: int) -> Generator[None, None, int]:
        for _ in range(parts):
            self._clock.now_s += PART_S
            self._done += 1
            yield
        return parts

    def _begin(self) -> None:
        self.parts.append(self._done)
        self._done = 0
        self._clock.now_s += self._else_s
        asyncio.get_running_loop().call_soon(self._begin)


async def test_a_round_has_one_turn_however_much_there_is_to_do() -> None:
    clock = Clock()
    turns, rounds = Turns(clock), Rounds(clock)
    assert await asyncio.gather(*(turns.begin(rounds.work(parts)) for parts in (40, 3, 100))) == [40, 3, 100]
    assert max(rounds.parts) <= TURN_S / PART_S + 1


async def test_who_has_waited_longest_is_next() -> None:
    clock = Clock()
    turns, rounds = Turns(clock), Rounds(clock)
    long = turns.begin(rounds.work(1000))
    await asyncio.sleep(0)
    assert await turns.begin(rounds.work(8)) == 8
    assert not long.done()
    assert await long == 1000


async def test_where_other_work_takes_long_a_turn_is_longer_but_not_without_end() -> None:
    most = {}
    for else_s in (0.0, 4 * TURN_S, 100 * TURN_S):
        clock = Clock()
        turns, rounds = Turns(clock), Rounds(clock, else_s)
        await turns.begin(rounds.work(400))
        most[else_s] = max(rounds.parts)
    assert most[0.0] < most[4 * TURN_S] < most[100 * TURN_S] <= LONGEST_TURN_S / PART_S + 1


async def test_what_work_raises_is_raised_and_ends_no_other() -> None:
    clock = Clock()
    turns, rounds = Turns(clock), Rounds(clock)

    def fails() -> Generator[None, None, None]:
        yield from rounds.work(10)
        raise ValueError("no")

    other = turns.begin(rounds.work(50))
    with pytest.raises(ValueError, match="no"):
        await turns.begin(fails())
    assert await other == 50
