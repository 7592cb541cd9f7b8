"""However much work nobody waits for, a round of the event loop has one turn of it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, cast

import pytest
from conductor_support import make_core

from conductor.server.grpc_service import ConductorService
from conductor.server.leadership import OnlyConductor
from conductor.server.runner import CoreRunner
from conductor.server.turns import LONGEST_TURN_S, TURN_S, Turns
from springtide.clock import MonotonicClock
from springtide.rpc import conductor_pb2

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

    def work(self, parts: int, part_s: float = PART_S) -> Generator[None, None, int]:
        for _ in range(parts):
            self._clock.now_s += part_s
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
    for else_s in (0.0, 4 * TURN_S, 100 * TURN_S, 100 * LONGEST_TURN_S):
        clock = Clock()
        turns, rounds = Turns(clock), Rounds(clock, else_s)
        await turns.begin(rounds.work(4000))
        most[else_s] = max(rounds.parts)
    assert most[0.0] < most[4 * TURN_S] < most[100 * TURN_S] < most[100 * LONGEST_TURN_S] <= LONGEST_TURN_S / PART_S + 1


@pytest.mark.parametrize("else_s", [0.002, 0.02, 0.2])
async def test_its_share_of_the_time_is_about_a_fifth_however_long_other_work_takes(else_s: float) -> None:
    clock = Clock()
    turns, rounds = Turns(clock), Rounds(clock, else_s)
    await turns.begin(rounds.work(20_000))
    assert 0.15 < 20_000 * PART_S / clock.now_s < 0.25


@pytest.mark.parametrize("part_s", [PART_S, 2 * TURN_S])
async def test_what_is_awaited_goes_before_what_is_not_but_does_not_keep_it_from_its_end(part_s: float) -> None:
    clock = Clock()
    turns, rounds = Turns(clock), Rounds(clock)
    others = [turns.begin(rounds.work(400)) for _ in range(3)]
    await asyncio.sleep(0)
    assert await turns.begin(rounds.work(300), awaited=True) == 300
    assert not any(other.done() for other in others)
    endless = turns.begin(rounds.work(10**9, part_s), awaited=True)
    assert await asyncio.gather(*others) == [400] * 3
    endless.cancel()


@pytest.mark.parametrize("what", ["advance", "renew"])
async def test_what_a_gateway_tells_is_not_kept_waiting_by_what_else_there_is_to_do(what: str) -> None:
    class Connection:
        def send(self, message: bytes) -> None:
            answered.set()

    answered, clock = asyncio.Event(), Clock()
    runner = CoreRunner(make_core(), MonotonicClock())
    runner.turns, rounds = Turns(clock), Rounds(clock)
    others = [runner.turns.begin(rounds.work(400)) for _ in range(20)]
    ended = conductor_pb2.AttemptReport(progress=conductor_pb2.Progress(attempt_id="a", phase=conductor_pb2.PHASE_FINISHED))
    question = conductor_pb2.ScheduleQuestion(number=1)
    if what == "advance":
        question.advance.CopyFrom(conductor_pb2.AdvanceRequest(gateway_id="g", reports=[ended] * 100))
    else:
        question.renew.gateway_id = "g"
    ConductorService(runner, OnlyConductor(""), "tiny").answer(cast(Any, Connection()), question)
    await answered.wait()
    assert len(rounds.parts) < len(others)
    for other in others:
        other.cancel()


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
