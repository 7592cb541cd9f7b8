"""The passes in flight in the stages of a group: launched, and not ended yet; and the releases that wait for their end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prefill_node.core.actions import RunPass
from prefill_node.core.attempt import PrefillAttempt
from springtide.ids import AttemptId
from springtide.protocol.storage import Push, Release


@dataclass(slots=True)
class PassInFlight:
    """A pass that has been launched. `discarded`: attempts for which its results count for nothing. `releases`: of attempts that ended
    since then."""

    run: RunPass
    behind: RunPass | None
    """The pass before it, if that was in flight when it began."""
    late: bool
    """There had been room for it before it began."""
    began_at: float
    left: bool = False
    """The first stage is done with it."""
    gives_way: bool | None = False
    """It has been told to give way; None: it never is."""
    discarded: set[AttemptId] = field(default_factory=set)
    releases: dict[AttemptId, Release] = field(default_factory=dict)

    def runs(self, attempt_id: AttemptId) -> bool:
        """Whether a row of it is the attempt's."""
        return any(row.attempt_id == attempt_id for row in self.run.rows)


class IdleTime:
    """The time for which no pass has been in flight, in all."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since: float | None = None

    def saw(self, idle: bool, now: float) -> None:
        """From now on, no pass is in flight or one is."""
        if self._since is not None:
            self._total_s += now - self._since
        self._since = now if idle else None

    def until(self, now: float) -> float:
        """Returns seconds."""
        return self._total_s + (now - self._since if self._since is not None else 0.0)


def most_passes(stages: int) -> int:
    """How many passes a group has in flight: one for each of its stages, and where there are several one that waits between them. Without
    it every stage would wait for the slowest one of each pass, and it is now this stage and now that one."""
    return stages + 1 if stages > 1 else 1


class PassesInFlight:
    """The passes: at most `most_passes`, the oldest first. Every stage takes them in this order, and in this order they end: so a pass that
    is void may be followed by one that writes the same slots, whatever the stages are at."""

    def __init__(self, stages: int) -> None:
        self._stages, self._most = stages, most_passes(stages)
        self._passes: dict[int, PassInFlight] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._passes)

    def __iter__(self) -> Iterator[PassInFlight]:
        return iter(self._passes.values())

    @property
    def has_room(self) -> bool:
        """Whether the first stage waits for a pass, and so does the memory of the others."""
        return not self._passes or (len(self._passes) < self._most and all(one.left for one in self))

    @property
    def waiting(self) -> Sequence[RunPass]:
        """The passes that have left the first stage and for which, all further ones being at older passes, there is no stage."""
        return [one.run for one in self if one.left][self._stages - 1 :]

    def launch(
        self,
        chosen: Sequence[tuple[PrefillAttempt, int]],
        pushes: tuple[Push, ...],
        predicted_ms: float,
        late: bool,
        stays: bool,
        now: float,
    ) -> RunPass:
        """Begins a pass of the next tokens of these attempts. `late`: as of PassInFlight. `stays`: it gives way to nobody."""
        assert self.has_room
        awaits = next((attempt.attempt_id for attempt, _ in chosen if attempt.fetching), None)
        assert awaits is None or len(chosen) == 1, "an attempt whose prefix arrives runs alone"
        rows = tuple(attempt.row(num_tokens) for attempt, num_tokens in chosen)
        for attempt, num_tokens in chosen:
            attempt.launched += num_tokens
        run = RunPass(self._next_id, rows, pushes, awaits, predicted_ms, all(attempt.idle for attempt, _ in chosen))
        behind = self._last.run if self._last is not None else None
        self._passes[run.pass_id] = PassInFlight(run, behind, late, now, gives_way=None if stays or not run.idle else False)
        self._next_id += 1
        return run

    def give_way(self) -> Sequence[int]:
        """Tells those that are to be broken off and have not been told; returns them."""
        told = [one for one in self if one.gives_way is False]
        for one in told:
            one.gives_way = True
        return [one.run.pass_id for one in told]

    @property
    def idle_work(self) -> bool:
        """Whether any is of idle work."""
        return bool(self._passes) and any(one.run.idle for one in self)

    def leave(self, pass_id: int) -> None:
        """The first stage is done with the pass; one that has ended: nothing."""
        if pass_id in self._passes:
            self._passes[pass_id].left = True

    def end(self, pass_id: int) -> PassInFlight | None:
        """Takes the pass off; None when it has ended before."""
        return self._passes.pop(pass_id, None)

    def runs(self, attempt_id: AttemptId) -> bool:
        """Whether a row of any is the attempt's."""
        return any(one.runs(attempt_id) for one in self)

    def discard(self, attempt_id: AttemptId) -> None:
        """What the passes in flight compute of the attempt counts for nothing."""
        for one in self:
            if one.runs(attempt_id):
                one.discarded.add(attempt_id)

    def hold_back(self, attempt: PrefillAttempt) -> bool:
        """Keeps its release until the last pass that writes its slots has ended; False when there is none."""
        for one in reversed(self._passes.values()):
            if one.runs(attempt.attempt_id):
                one.releases[attempt.attempt_id] = Release(attempt.attempt_id)
                return True
        return False

    def held_back(self) -> Sequence[AttemptId]:
        """The attempts whose releases wait."""
        return [attempt_id for one in self for attempt_id in one.releases]

    def store_lost(self) -> None:
        """There is nobody left to release to; the memory of the passes stays mapped until they have ended."""
        for one in self:
            one.discarded.update(row.attempt_id for row in one.run.rows)
            one.releases.clear()

    def tokens_of(self, attempt_id: AttemptId, left: bool = False) -> int:
        """The attempt's tokens that will count once the passes in flight are done; with `left`, of those that have left the first stage."""
        tokens = 0
        for one in self._passes.values():
            if (one.left or not left) and attempt_id not in one.discarded:
                tokens += sum(len(row.chunk.token_ids) for row in one.run.rows if row.attempt_id == attempt_id)
        return tokens

    @property
    def _last(self) -> PassInFlight | None:
        return next(reversed(self._passes.values()), None)
