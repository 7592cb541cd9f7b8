"""What the engines of one machine show each other without a word: that one wants quiet, and that one does idle work.

Each has a file in the run directory, the same pages of memory for all who look. It costs nobody a message, so that idle work may look
between two layers. What is shown holds for a moment, unless it is shown again: of who has died, nothing does.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)

SHOWN_S = 1.0
"""What is shown holds for so long: four ticks."""
_SUFFIX = ".sign"
_BYTES = 16
_QUIET, _IDLE = 0, 1


class Neighbours:
    """An engine's own sign, and those of the others in the same run directory. Their run directory is what tells that engines share a
    machine. `show` and `look` belong to one thread; the rest may be asked by any."""

    def __init__(self, run_dir: Path, instance_id: str) -> None:
        self._directory = run_dir
        self._path = run_dir / f"{instance_id}{_SUFFIX}"
        self._own = _map(self._path, create=True)
        self._own[:] = bytes(_BYTES)
        self._signs = memoryview(self._own).cast("q")
        self._shown = (False, False)
        self._shown_at = 0
        self._others: dict[tuple[str, int], memoryview] = {}
        self.look()

    def show(self, quiet: bool, idle: bool) -> None:
        """Shows that quiet is wanted, and that idle work is under way, from now on, for a moment."""
        now = time.monotonic_ns()
        if (quiet, idle) != self._shown or now - self._shown_at >= SHOWN_S / 4 * 1e9:
            until = now + int(SHOWN_S * 1e9)
            self._signs[_QUIET], self._signs[_IDLE] = until if quiet else 0, until if idle else 0
            self._shown, self._shown_at = (quiet, idle), now

    def look(self) -> None:
        """Finds out who is there."""
        found: dict[tuple[str, int], memoryview] = {}
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX) and entry.name != self._path.name:
                    key = (entry.name, entry.inode())
                    signs = self._others.get(key) or _read(Path(entry.path))
                    if signs is not None:
                        found[key] = signs
        self._others = found

    @property
    def want_quiet(self) -> bool:
        """Whether any other does."""
        return self._any(_QUIET)

    @property
    def do_idle_work(self) -> bool:
        """Whether any other does."""
        return self._any(_IDLE)

    def close(self) -> None:
        """Shows nothing any more."""
        self._path.unlink(missing_ok=True)
        self._signs[_QUIET] = self._signs[_IDLE] = 0

    def _any(self, which: int) -> bool:
        now = time.monotonic_ns()
        return any(signs[which] > now for signs in self._others.values())


def _map(path: Path, *, create: bool) -> mmap.mmap:
    """Raises OSError, ValueError for a file that is too short."""
    file = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        if create:
            os.ftruncate(file, _BYTES)
        return mmap.mmap(file, _BYTES)
    finally:
        os.close(file)


def _read(path: Path) -> memoryview | None:
    """None for what is not there any more, or not yet as long as it is to be."""
    try:
        return memoryview(_map(path, create=False)).cast("q")
    except (OSError, ValueError):
        return None
