"""Which line of which batch runs next, and when a batch is over. Free of I/O, clock and randomness."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.batches.batch import Ending

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a line that failed for want of nodes is tried again; the pause doubles with each try."""

# ---- events ----


@dataclass(frozen=True, slots=True)
class Held:
    """This gateway looks after a batch from now on."""

    batch_id: str
    tenant: str
    made_at: float
    expires_at: float
    """On the same clock as `now`."""
    lines: Sequence[int]
    """Those that have no result yet."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A line's result is on the disk."""

    batch_id: str
    line: int


@dataclass(frozen=True, slots=True)
class NotAnswered:
    """A line came to nothing, for no fault of its own."""

    batch_id: str
    line: int


@dataclass(frozen=True, slots=True)
class OverBudget:
    """A line is more than whoever made the batch may have for now; it may fit after that time."""

    batch_id: str
    line: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A batch's client wants no more of it."""

    batch_id: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Somebody else looks after the batch, or soon may."""

    batch_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = Held | Answered | NotAnswered | OverBudget | Cancelled | Lost | Tick


# ---- actions ----


@dataclass(frozen=True, slots=True)
class RunLine:
    """The line's answer is wanted: Answered follows, NotAnswered or OverBudget, unless the batch is dropped before."""

    batch_id: str
    line: int
    tries: int = 0
    """How often it came to nothing before."""


@dataclass(frozen=True, slots=True)
class DropLines:
    """Whatever of the batch runs is wanted no more."""

    batch_id: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The batch is over: its results are to be made into files."""

    batch_id: str
    how: Ending


Action = RunLine | DropLines | Finish


@dataclass(slots=True)
class _Run:
    held: Held
    waiting: list[int]
    """A heap."""
    running: set[int] = field(default_factory=set)
    paused: dict[int, float] = field(default_factory=dict)
    """Until when, by line."""
    tries: dict[int, int] = field(default_factory=dict)
    rests_until: float = 0.0
    """None of its lines is begun before."""

    @property
    def done(self) -> bool:
        return not (self.waiting or self.running or self.paused)


class BatchesCore:
    """The batches that this gateway looks after. Of the lines that may run at once each tenant gets its share: the next is always one of
    the tenant that has fewest, of its oldest batch that has any left, in the order of the file."""

    def __init__(self, most_lines: int) -> None:
        """`most_lines` run at once."""
        self._most_lines = most_lines
        self._now = 0.0
        self._runs: dict[str, _Run] = {}

    def handle(self, event: Event, now: float) -> list[Action]:
        """`now`: seconds, never decreasing. What is about a batch that is not held changes nothing."""
        self._now = now
        actions: list[Action] = []
        match event:
            case Held():
                assert event.batch_id not in self._runs, f"{event.batch_id} is held already"
                waiting = list(event.lines)
                heapq.heapify(waiting)
                self._runs[event.batch_id] = _Run(event, waiting)
            case Answered(batch_id, line) if batch_id in self._runs:
                self._runs[batch_id].running.discard(line)
            case NotAnswered(batch_id, line) if batch_id in self._runs:
                self._pause(self._runs[batch_id], line, now)
            case OverBudget(batch_id, line, wait_s) if batch_id in self._runs:
                self._rest(self._runs[batch_id], line, now + max(wait_s, FIRST_PAUSE_S))
            case Cancelled(batch_id) if batch_id in self._runs:
                actions = self._end(batch_id, "cancelled")
            case Lost(batch_id) if self._runs.pop(batch_id, None) is not None:
                actions = [DropLines(batch_id)]
            case _:
                pass
        for batch_id, run in list(self._runs.items()):
            if now >= run.held.expires_at and not run.done:
                actions += self._end(batch_id, "expired")
            elif run.done:
                del self._runs[batch_id]
                actions.append(Finish(batch_id, "completed"))
            else:
                self._wake(run, now)
        return actions + self._start()

    @property
    def num_running(self) -> int:
        return sum(len(run.running) for run in self._runs.values())

    def validate(self) -> None:
        """Asserts the invariants."""
        assert self.num_running <= self._most_lines
        for run in self._runs.values():
            sets = [set(run.waiting), run.running, set(run.paused)]
            assert len(set().union(*sets)) == sum(map(len, sets)), "a line is in two places at once"
            assert not run.done
        if self.num_running < self._most_lines:
            assert not any(self._ready(run) for run in self._runs.values()), "a line waits while there is a place"

    def _pause(self, run: _Run, line: int, now: float) -> None:
        if line in run.running:
            run.running.remove(line)
            tries = run.tries[line] = run.tries.get(line, 0) + 1
            run.paused[line] = now + min(FIRST_PAUSE_S * 2 ** min(tries - 1, 16), LONGEST_PAUSE_S)

    @staticmethod
    def _rest(run: _Run, line: int, until: float) -> None:
        """Were its other lines tried instead, all would be read and counted over and over while none fits."""
        if line in run.running:
            run.running.remove(line)
            heapq.heappush(run.waiting, line)
            run.rests_until = max(run.rests_until, until)

    def _ready(self, run: _Run) -> bool:
        return bool(run.waiting) and run.rests_until <= self._now

    @staticmethod
    def _wake(run: _Run, now: float) -> None:
        for line in [line for line, until in run.paused.items() if until <= now]:
            del run.paused[line]
            heapq.heappush(run.waiting, line)

    def _end(self, batch_id: str, how: Ending) -> list[Action]:
        del self._runs[batch_id]
        return [DropLines(batch_id), Finish(batch_id, how)]

    def _start(self) -> list[Action]:
        actions: list[Action] = []
        running: dict[str, int] = {}
        for run in self._runs.values():
            running[run.held.tenant] = running.get(run.held.tenant, 0) + len(run.running)
        places = self._most_lines - sum(running.values())
        ready = [run for run in self._runs.values() if self._ready(run)]
        while places > 0 and ready:
            run = min(ready, key=lambda run: (running[run.held.tenant], run.held.made_at, run.held.batch_id))
            line = heapq.heappop(run.waiting)
            run.running.add(line)
            running[run.held.tenant] += 1
            places -= 1
            actions.append(RunLine(run.held.batch_id, line, run.tries.get(line, 0)))
            if not run.waiting:
                ready.remove(run)
        return actions
