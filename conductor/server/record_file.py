"""A Conductor's record on disk, written by a thread of its own: a slow disk must not hold up decisions."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TextIO

from conductor import metrics
from springtide.errors import ConfigError

logger = logging.getLogger(__name__)

_MOST_WAITING = 128 << 20
"""Characters that wait for the disk: what 20,000 requests of usual length make."""


class RecordFile:
    """A record's file. Lines are in it soon after `write`, in its order; when `close` returns, all are.

    A record with a gap could not be replayed. So it ends for good where a line finds no room to wait in, or the disk fails; up to there it
    is whole.
    """

    def __init__(self, file: TextIO, most_waiting: int = _MOST_WAITING) -> None:
        """The file is this record's from now on."""
        self._name = file.name
        self._most_waiting = most_waiting
        self._changed = threading.Condition()
        """Guards what follows."""
        self._lines: list[str] = []
        self._num_chars = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(file,), name="conductor-record", daemon=True)
        self._thread.start()

    @classmethod
    def create(cls, directory: Path, name: str) -> RecordFile:
        """A record in a file that did not exist, `name`.jsonl. Raises ConfigError when it cannot be made."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            return cls((directory / f"{name}.jsonl").open("x"))
        except OSError as error:
            raise ConfigError(f"conductor.record_dir: cannot write to {directory}: {error.strerror}") from None

    def write(self, line: str) -> None:
        """Does not wait for the disk."""
        with self._changed:
            if not self._ended and self._num_chars + len(line) > self._most_waiting:
                self._end(f"{self._num_chars} characters wait for the disk already")
            if self._ended:
                metrics.UNRECORDED_EVENTS.inc()
                return
            self._lines.append(line)
            self._num_chars += len(line)
            self._changed.notify()

    def close(self) -> None:
        """Waits until everything is written. Idempotent."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    def _end(self, why: str) -> None:
        self._ended = True
        logger.error("the record %s ends here: %s", self._name, why)

    def _run(self, file: TextIO) -> None:
        try:
            with file:
                while lines := self._take():
                    file.writelines(lines)
                    file.flush()
        except OSError as error:
            with self._changed:
                metrics.UNRECORDED_EVENTS.inc(len(self._lines))
                self._lines = []
                self._end(error.strerror or type(error).__name__)

    def _take(self) -> list[str]:
        """What waits, as soon as there is something; nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._ended)
            lines, self._lines, self._num_chars = self._lines, [], 0
            return lines
