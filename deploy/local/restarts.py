"""Whether and when a process that has ended is started again. Pure: times come in, decisions go out."""

from __future__ import annotations

import signal
from dataclasses import dataclass

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
STABLE_AFTER_S = 10.0
"""A process that ran for so long has earned a fresh start: its next restart is quick again."""
TRIES_TO_BECOME_READY = 2


@dataclass(frozen=True, slots=True)
class Restart:
    after_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The verdict on a process that has never been ready, and gives no sign that it ever will be."""

    reason: str


class RestartPolicy:
    """The history of one process. Call `started`, `became_ready` and `exited` as these happen."""

    def __init__(self) -> None:
        self._tries = 0
        self._started_at = 0.0
        self._delay_s = FIRST_DELAY_S
        self._ever_ready = False

    def started(self, now: float) -> None:
        self._tries += 1
        self._started_at = now

    def became_ready(self) -> None:
        self._ever_ready = True

    def exited(self, how: str, now: float) -> Restart | GiveUp:
        """Also of a process that could not even be made. `how`: in words."""
        if not self._ever_ready and self._tries >= TRIES_TO_BECOME_READY:
            return GiveUp(f"{how} and was not ready once in {self._tries} starts")
        if now - self._started_at >= STABLE_AFTER_S:
            self._delay_s = FIRST_DELAY_S
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, LONGEST_DELAY_S)
        return Restart(delay_s)


def describe_exit(returncode: int) -> str:
    """`exited with 1` or `was killed by SIGKILL`, from a subprocess's return code."""
    if returncode >= 0:
        return f"exited with {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"
