"""Reports take their share of the time and no more; of each instance the newest counts."""

from __future__ import annotations

import asyncio

from conductor.server.report_queue import SHARE, TURN_S, ReportQueue
from tests.support.waiting import until


class Reporter:
    """Takes its time over each report. What comes while it is not read lies there, and is read later, the newest alone."""

    def __init__(self, clock: Clock, takes_s: float, took: list[tuple[Reporter, bytes]]) -> None:
        self._clock, self._takes_s, self._took = clock, takes_s, took
        self._queue: ReportQueue | None = None
        self._unread: bytes | None = None
        self.paused = False
        self.read = 0

    def say(self, queue: ReportQueue, message: bytes) -> None:
        self._queue = queue
        if self.paused:
            self._unread = message
        else:
            self.read += 1
            queue.put(self, message)

    def report(self, message: bytes) -> None:
        self._clock.now_s += self._takes_s
        self._took.append((self, message))

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        if self._unread is not None:
            asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        message, self._unread = self._unread, None
        if message is not None and self._queue is not None:
            self.say(self._queue, message)


class Clock:
    """What it is set to, and beside that as the event loop's."""

    def __init__(self, *, runs: bool = True) -> None:
        self.now_s = 0.0
        self._runs = runs

    def __call__(self) -> float:
        return self.now_s + asyncio.get_running_loop().time() * self._runs


async def until_taken(took: list[tuple[Reporter, bytes]], count: int) -> None:
    await until(lambda: len(took) >= count, poll_s=0.001)  # in steps shorter than a turn


async def test_what_comes_seldom_is_taken_at_once() -> None:
    took: list[tuple[Reporter, bytes]] = []
    clock = Clock()
    queue, reporter = ReportQueue(clock), Reporter(clock, 1e-5, took)
    for number in range(20):
        reporter.say(queue, bytes([number]))
    assert took == [(reporter, bytes([number])) for number in range(20)]


async def test_of_what_comes_faster_than_it_can_be_taken_the_newest_counts_and_nobody_is_left_out() -> None:
    took: list[tuple[Reporter, bytes]] = []
    clock = Clock()
    queue = ReportQueue(clock)
    reporters = [Reporter(clock, TURN_S / 4, took) for _ in range(40)]
    for number in range(10):
        for reporter in reporters:
            reporter.say(queue, bytes([number]))
    assert len(took) <= 5, "a turn's worth"
    later = took.copy()
    took.clear()
    await until_taken(took, 40)
    await asyncio.sleep(0.05)
    assert len(took) == 40, "each once more, though nine more of each had come"
    assert {message for _, message in took} == {bytes([9])}
    order = [reporters.index(reporter) for reporter, _ in took]
    assert order == [*range(len(later), 40), *range(len(later))], "who has waited longest comes first"
    assert all(reporter.read <= 3 for reporter in reporters), "what comes while one waits is not read one by one"
    assert not any(reporter.paused for reporter in reporters), "nobody who has had its turn is left unread"


async def test_a_share_of_the_time_is_left_to_others() -> None:
    took: list[tuple[Reporter, bytes]] = []
    clock = Clock()
    queue = ReportQueue(clock)
    reporters = [Reporter(clock, TURN_S / 10, took) for _ in range(500)]
    began = asyncio.get_running_loop().time()
    for reporter in reporters:
        reporter.say(queue, b"")
    await until_taken(took, 500)
    work_s, elapsed_s = clock.now_s, asyncio.get_running_loop().time() - began
    assert work_s / (work_s + elapsed_s) < 1.1 * SHARE, f"{work_s} s of work in {elapsed_s} s beside it"


async def test_the_share_is_theirs_when_other_work_is_long_too() -> None:
    took: list[tuple[Reporter, bytes]] = []
    clock = Clock(runs=False)
    queue = ReportQueue(clock)
    takes_s = TURN_S / 2
    for reporter in [Reporter(clock, takes_s, took) for _ in range(1000)]:
        reporter.say(queue, b"")
    before = len(took)
    for step in range(1, 11):
        clock.now_s += 0.01  # the other work
        async with asyncio.timeout(30):
            while (len(took) - before) * takes_s < 0.7 * SHARE * step * 0.01:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    assert (len(took) - before) * takes_s < 1.2 * SHARE * clock.now_s


async def test_a_pause_in_the_middle_of_a_report_delays_the_others_little() -> None:
    took: list[tuple[Reporter, bytes]] = []
    clock = Clock()
    queue = ReportQueue(clock)
    paused, other = Reporter(clock, 600.0, took), Reporter(clock, 0.0, took)
    paused.say(queue, b"")
    other.say(queue, b"")
    await until_taken(took, 2)


async def test_of_those_who_say_more_than_can_be_taken_little_else_is_read() -> None:
    took: list[tuple[Reporter, bytes]] = []
    clock = Clock()
    queue = ReportQueue(clock)
    reporters = [Reporter(clock, TURN_S, took) for _ in range(20)]

    async def says(reporter: Reporter) -> None:
        for number in range(200):
            reporter.say(queue, number.to_bytes(1))
            await asyncio.sleep(0.002)

    await asyncio.gather(*map(says, reporters))
    async with asyncio.timeout(30):
        while {reporter for reporter, message in took if message == bytes([199])} != set(reporters):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    read = sum(reporter.read for reporter in reporters)
    assert len(took) < 2000, "of 4,000"
    assert read < 1.2 * len(took) + 2 * len(reporters)
    assert {reporter for reporter, message in took if message == bytes([199])} == set(reporters), "the last word of each counts"


async def test_what_was_discarded_is_not_taken() -> None:
    took: list[tuple[Reporter, bytes]] = []
    clock = Clock()
    queue = ReportQueue(clock)
    slow, gone, other = (Reporter(clock, 2 * TURN_S, took) for _ in range(3))
    for reporter in (slow, gone, other):
        reporter.say(queue, b"one")
    queue.discard(gone)
    queue.discard(gone)
    await until_taken(took, 2)
    await asyncio.sleep(0.05)
    assert took == [(slow, b"one"), (other, b"one")]
