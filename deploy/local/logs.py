"""Follows the processes' logs: what they warn of is shown, and no log grows for ever."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_LOG_BYTES = 64 << 20
LOOK_EVERY_S = 1.0
_LOUD = ("WARNING", "ERROR", "CRITICAL")
_LEVEL = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} (\w+) ")


class LogFollower:
    """Follows one log. Processes append to it directly, so that a supervisor that is busy or stopped never blocks them."""

    def __init__(self, path: Path, everything: bool) -> None:
        self._path = path
        self._everything = everything
        self._offset = 0
        self._partial = ""
        self._loud = False

    def new_lines(self) -> Iterator[str]:
        """Lines added since the last call: all, or warnings and worse with what belongs to them (tracebacks). Takes a while where the log
        has grown too long."""
        for line in self._read():
            self._loud = self._is_loud(line)
            if self._everything or self._loud:
                yield line

    def _read(self) -> list[str]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                added = file.read(1 << 20)
        except FileNotFoundError:
            return []
        self._offset += len(added)
        if self._offset > MAX_LOG_BYTES:
            _rotate(self._path)
            self._offset = 0
        *lines, self._partial = (self._partial + added.decode(errors="replace")).split("\n")
        return lines

    def _is_loud(self, line: str) -> bool:
        if line.startswith("{"):
            try:
                return str(json.loads(line).get("level", "")).upper() in _LOUD
            except ValueError:
                return False
        head = _LEVEL.match(line)
        return head[1] in _LOUD if head else self._loud or line.startswith("Traceback ")


async def keep_bounded(path: Path) -> None:
    """Goes on for ever, for a log that nobody follows."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        await asyncio.to_thread(_bound, path)


def _bound(path: Path) -> None:
    if path.stat().st_size > MAX_LOG_BYTES:
        _rotate(path)


def remove(path: Path) -> None:
    """A log and the earlier one."""
    for each in (path, _earlier(path)):
        each.unlink(missing_ok=True)


def _rotate(path: Path) -> None:
    """Keeps one earlier log, as far as there is room. The process has the file open for appending: it goes on at the start of what is
    emptied."""
    try:
        shutil.copyfile(path, _earlier(path))
    except OSError as error:
        logger.warning("%s has grown too long, and is emptied without a whole copy: %s", path, error)
    path.write_bytes(b"")


def _earlier(path: Path) -> Path:
    return path.with_suffix(".log.1")


def last_lines(path: Path, count: int = 20) -> str:
    """The end of a log."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-count:])
    except FileNotFoundError:
        return ""
