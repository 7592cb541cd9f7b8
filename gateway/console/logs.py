"""Lines about one request in the logs of the processes of this machine."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

MOST_LINES = 300
_MOST_BYTES = 8 << 20
"""Of the end of each log."""
_MOST_LOGS = 64
_LONGEST_LINE = 2000
_TEXT = re.compile(r"^(\d\d:\d\d:\d\d\.\d{3}) (\w+) +(.*)$")


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a process's log."""

    time: str
    level: str
    process: str
    text: str


def lines_about(directory: Path, wanted: str) -> list[LogLine]:
    """The latest of those that name `wanted`, by time. Reads files: not for an event loop."""
    found: list[LogLine] = []
    for path in sorted(directory.glob("*.log"))[:_MOST_LOGS]:
        found += [_line(path.stem, line) for line in _lines_with(path, wanted.encode())]
    found.sort(key=lambda line: line.time)
    return found[-MOST_LINES:]


def _lines_with(path: Path, wanted: bytes) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MOST_BYTES))
            end = file.read(_MOST_BYTES)
    except OSError:
        return []
    lines: list[str] = []
    at = end.find(wanted)
    while at >= 0 and len(lines) < MOST_LINES:
        first, last = end.rfind(b"\n", 0, at) + 1, end.find(b"\n", at)
        last = len(end) if last < 0 else last
        lines.append(end[first:last][:_LONGEST_LINE].decode(errors="replace"))
        at = end.find(wanted, last)
    return lines


def _line(process: str, line: str) -> LogLine:
    if line.startswith("{"):
        try:
            entry = json.loads(line)
            time = str(entry.get("time", "")).partition("T")[2].rstrip("Z")
            return LogLine(time, str(entry.get("level", "")), process, str(entry.get("message", "")))
        except (ValueError, AttributeError):
            pass
    head = _TEXT.match(line)
    if head is None:
        return LogLine("", "", process, line)
    return LogLine(head[1], head[2].lower(), process, head[3].removeprefix(f"{process} "))
