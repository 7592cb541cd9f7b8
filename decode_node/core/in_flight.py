"""The steps and the loads in flight: launched, and not ended yet; and the releases that wait for their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from decode_node.core.actions import LoadAhead, RunStep
from decode_node.core.attempt import DecodeAttempt
from springtide.ids import AttemptId
from springtide.protocol.storage import Release


@dataclass(slots=True)
class StepInFlight:
    """A step that has been launched. `attempts[i]` is row i's, those in idle capacity the last; it may have ended since. `releases`: of
    those whose slots no later step uses."""

    run: RunStep
    attempts: tuple[DecodeAttempt, ...]
    objective_ms: float
    """What was left, when it was launched, of the least objective of those in it; inf: none of them has one."""
    releases: dict[AttemptId, Release] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """It is of sequences in idle capacity alone."""
        return self.attempts[0].idle


class StepsInFlight:
    """Steps run one after another in the order in which they were launched: the first runs now."""

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepInFlight]:
        return iter(self._steps)

    def launch(self, batch: Iterable[DecodeAttempt], drafts: Sequence[int], now: float) -> RunStep:
        """Begins a step of these attempts, so many tokens of each of which may be guessed."""
        attempts = tuple(batch)
        objective_ms = min(attempt.left_ms(now) for attempt in attempts)
        run = RunStep(self._next_id, tuple(attempt.row(most) for attempt, most in zip(attempts, drafts, strict=True)))
        self._next_id += 1
        for attempt, most in zip(attempts, drafts, strict=True):
            attempt.ahead += 1
            attempt.drafted_ahead += most
            attempt.last_drafted = most
            attempt.ready_since = None
        self._steps.append(StepInFlight(run, attempts, objective_ms))
        return run

    @property
    def last(self) -> StepInFlight:
        """The one that was launched last: there is one."""
        return self._steps[-1]

    def end(self, step_id: int) -> StepInFlight | None:
        """Takes off the first one, when it is that one."""
        if not self._steps or self._steps[0].run.step_id != step_id:
            return None
        step = self._steps.popleft()
        for attempt, row in zip(step.attempts, step.run.rows, strict=True):
            attempt.ahead -= 1
            attempt.drafted_ahead -= row.most_drafted
        return step

    @property
    def idle_work(self) -> bool:
        """Whether one is of sequences in idle capacity alone."""
        return any(step.idle for step in self._steps)

    def hold_back(self, attempt: DecodeAttempt) -> bool:
        """Keeps its release until the last step that uses its slots has ended; False when none does."""
        for step in reversed(self._steps):
            if attempt in step.attempts:
                step.releases[attempt.attempt_id] = Release(attempt.attempt_id)
                return True
        return False

    def held_back(self) -> Sequence[AttemptId]:
        """The attempts whose releases wait."""
        return [attempt_id for step in self._steps for attempt_id in step.releases]

    def store_lost(self) -> None:
        """There is nobody left to release to; the steps' own memory stays mapped until they have ended."""
        for step in self._steps:
            step.releases.clear()


class LoadsInFlight:
    """Loads read the slots of their attempts, beside the steps."""

    def __init__(self) -> None:
        self._releases: dict[AttemptId, Release | None] = {}
        """What waits for the end, by attempt."""

    @property
    def attempt_ids(self) -> Collection[AttemptId]:
        return self._releases.keys()

    def launch(self, attempt: DecodeAttempt) -> LoadAhead:
        """Begins to load the attempt's prompt."""
        self._releases[attempt.attempt_id] = None
        return LoadAhead(attempt.attempt_id, attempt.slots[: attempt.request.num_blocks])

    def end(self, attempt_id: AttemptId) -> Release | None:
        """Takes off the attempt's; returns what waited for it."""
        return self._releases.pop(attempt_id, None)

    def hold_back(self, attempt: DecodeAttempt) -> bool:
        """Keeps its release until it is loaded; False when it is not in flight."""
        if attempt.attempt_id not in self._releases:
            return False
        self._releases[attempt.attempt_id] = Release(attempt.attempt_id)
        return True

    def held_back(self) -> Sequence[AttemptId]:
        """The attempts whose releases wait."""
        return [attempt_id for attempt_id, release in self._releases.items() if release is not None]

    def store_lost(self) -> None:
        """There is nobody left to release to; the memory that is read stays mapped until they have ended."""
        self._releases.clear()
