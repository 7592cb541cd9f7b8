"""The lines of a batch's input: found and checked, piece by piece beside the event loop, and read one by one."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.batches.batch import MAX_ERRORS, InputError
from gateway.bodies import SideThread
from springtide.errors import InvalidRequest

MAX_LINES = 50_000
_PIECE_BYTES = 256 << 10
_MAX_ID_LENGTH = 512

CheckLine = Callable[[bytes], str]
"""Reads a line and returns the id that its client gives it. Raises InvalidRequest, naming the field."""


@dataclass(slots=True)
class InputLines:
    """Where the lines of a file are, those without anything left out."""

    path: Path
    begins: array[int] = field(default_factory=lambda: array("Q"))
    ends: array[int] = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self.begins)

    def read(self, line: int) -> bytes:
        """Waits for the disk."""
        with self.path.open("rb") as file:
            file.seek(self.begins[line])
            return file.read(self.ends[line] - self.begins[line])


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    """In the file, from 1."""
    begin: int
    raw: bytes


async def find_lines(
    path: Path, max_line_bytes: int, side_thread: SideThread, check: CheckLine | None
) -> tuple[InputLines, tuple[InputError, ...]]:
    """The lines of the file, and what is wrong with them: without `check`, which a file has passed that is read again, only what keeps it
    from being read. Raises OSError."""
    lines, errors, names = InputLines(path), list[InputError](), set[str]()
    pieces = _pieces(path, max_line_bytes)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None and len(errors) < MAX_ERRORS:
        if isinstance(piece, InputError):
            errors.append(piece)
            break
        if len(lines) + len(piece) > MAX_LINES:
            errors.append(InputError("too_many_lines", f"a batch may have {MAX_LINES} lines"))
            break
        for line in piece:
            lines.begins.append(line.begin)
            lines.ends.append(line.begin + len(line.raw))
        if check is not None:
            errors += await side_thread.run(sum(len(line.raw) for line in piece), _checked, piece, check, names)
    if not len(lines) and not errors:
        errors.append(InputError("empty_file", "the file has no line"))
    return lines, tuple(errors)


def _checked(piece: Sequence[_Line], check: CheckLine, names: set[str]) -> list[InputError]:
    errors = []
    for line in piece:
        try:
            name = check(line.raw)
            if not 0 < len(name) <= _MAX_ID_LENGTH:
                raise InvalidRequest(f"custom_id must have 1 to {_MAX_ID_LENGTH} characters", param="custom_id", code="invalid_custom_id")
            if name in names:
                raise InvalidRequest(f"custom_id {name!r} is that of another line", param="custom_id", code="duplicate_custom_id")
            names.add(name)
        except InvalidRequest as error:
            errors.append(InputError(error.code or "invalid_line", error.message, line.number, error.param))
    return errors


def _pieces(path: Path, max_line_bytes: int) -> Iterator[list[_Line] | InputError]:
    """The lines that have anything in them, some at a time."""
    piece: list[_Line] = []
    held = number = position = 0
    with path.open("rb") as file:
        while raw := file.readline(max_line_bytes + 2):
            number += 1
            begin, position = position, position + len(raw)
            text = raw.rstrip(b"\r\n")
            if len(text) > max_line_bytes:
                yield piece
                yield InputError("line_too_long", f"a line may have {max_line_bytes} bytes", number)
                return
            if text.strip():
                piece.append(_Line(number, begin, text))
                held += len(text)
            if held >= _PIECE_BYTES:
                yield piece
                piece, held = [], 0
    if piece:
        yield piece
