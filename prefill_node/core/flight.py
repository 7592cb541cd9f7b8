"""The passes that are under way in the stages of a group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prefill_node.core.actions import RunPass
from springtide.ids import AttemptId
from springtide.protocol import storage


@dataclass(slots=True)
class Pass:
    """`discarded`: attempts for which its results count for nothing. `releases`: of attempts that ended since it began."""

    run: RunPass
    behind: RunPass | None
    """The pass before it was under way when it began."""
    late: bool
    """There had been room for it before it began."""
    left: bool = False
    """The first stage is done with it."""
    discarded: set[AttemptId] = field(default_factory=set)
    releases: dict[AttemptId, storage.Release] = field(default_factory=dict)

    def runs(self, attempt_id: AttemptId) -> bool:
        return any(row.attempt_id == attempt_id for row in self.run.rows)


class IdleTime:
    """For how long no pass has been under way, in all."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since: float | None = None

    def saw(self, idle: bool, now: float) -> None:
        """From now on, no pass is under way or one is."""
        if self._since is not None:
            self._total_s += now - self._since
        self._since = now if idle else None

    def until(self, now: float) -> float:
        """Seconds."""
        return self._total_s + (now - self._since if self._since is not None else 0.0)


def most_passes(stages: int) -> int:
    """That a group has under way: one for each of its stages, and where there are several one that waits between them. Without it every
    stage would wait for the slowest one of each pass, and it is now this stage and now that one."""
    return stages + 1 if stages > 1 else 1


class Flight:
    """At most `most_passes`, the oldest first. Every stage takes them in this order, and in this order they end: so a pass that is void may
    be followed by one that writes the same slots, whatever the stages are at."""

    def __init__(self, stages: int) -> None:
        self._stages, self._most = stages, most_passes(stages)
        self._passes: dict[int, Pass] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._passes)

    def __iter__(self) -> Iterator[Pass]:
        return iter(self._passes.values())

    @property
    def has_room(self) -> bool:
        """The first stage waits for a pass, and so does the memory of the others."""
        return len(self._passes) < self._most and all(one.left for one in self)

    @property
    def next_id(self) -> int:
        return self._next_id

    @property
    def waiting(self) -> Sequence[RunPass]:
        """Those that have left the first stage and for which, all further ones being at older passes, there is no stage."""
        return [one.run for one in self if one.left][self._stages - 1 :]

    def begin(self, run: RunPass, late: bool) -> None:
        """`late`: as of Pass."""
        assert run.pass_id == self._next_id and self.has_room
        self._passes[run.pass_id] = Pass(run, behind=self._last.run if self._last is not None else None, late=late)
        self._next_id += 1

    def leave(self, pass_id: int) -> None:
        """Of a pass that has ended: nothing."""
        if pass_id in self._passes:
            self._passes[pass_id].left = True

    def end(self, pass_id: int) -> Pass | None:
        """None when it has ended before."""
        return self._passes.pop(pass_id, None)

    def runs(self, attempt_id: AttemptId) -> bool:
        return any(one.runs(attempt_id) for one in self)

    def discard(self, attempt_ids: Iterable[AttemptId]) -> None:
        """What the passes under way compute of these counts for nothing."""
        for one in self:
            one.discarded.update(attempt_id for attempt_id in attempt_ids if one.runs(attempt_id))

    def hold(self, release: storage.Release) -> bool:
        """Keeps it for the end of the last pass that writes the attempt's slots; False when there is none."""
        for one in reversed(self._passes.values()):
            if one.runs(release.attempt_id):
                one.releases[release.attempt_id] = release
                return True
        return False

    def holds(self, attempt_id: AttemptId) -> bool:
        """The slots of an attempt that has ended are still being written."""
        return any(attempt_id in one.releases for one in self)

    def lose_store(self) -> None:
        """There is nobody left to release to; the memory of the passes stays mapped until they have ended."""
        for one in self:
            one.discarded.update(row.attempt_id for row in one.run.rows)
            one.releases.clear()

    def tokens_of(self, attempt_id: AttemptId, left: bool = False) -> int:
        """That will count once the passes under way are done; with `left`, of those that have left the first stage."""
        return sum(
            len(row.chunk.token_ids)
            for one in self
            for row in one.run.rows
            if row.attempt_id == attempt_id and attempt_id not in one.discarded and (one.left or not left)
        )

    @property
    def _last(self) -> Pass | None:
        return next(reversed(self._passes.values()), None)
