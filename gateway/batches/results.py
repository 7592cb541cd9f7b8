"""The answers of one batch on the disk: appended durably as they come, each of its lines once, and read again by whoever takes over.

Every holder of a batch writes a file of its own, which is named by its epoch and begins with all that its predecessor's has. What a
predecessor that does not know yet that it is one appends to its own is part of nothing. So an answer is either in, or it has not been
given. All of this waits for the disk: for threads.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_NAME = re.compile(r"results\.(\d+)\.log")
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LineResult:
    """What has become of a line. Raises ValueError for a text of several lines."""

    line: int
    """Its number in the batch, from 0."""
    ok: bool
    """It goes into the output, and not into the errors."""
    text: str
    """The line that its client gets, without the line break."""

    def __post_init__(self) -> None:
        if "\n" in self.text:
            raise ValueError(f"the result of line {self.line} has a line break in it")

    def encoded(self) -> bytes:
        """Its line in the file, with a checksum: after a crash the last one may be anything."""
        body = f"{self.line} {int(self.ok)} {self.text}".encode()
        return b"%08x %b\n" % (zlib.crc32(body), body)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a result's text lies in the file."""

    begin: int
    end: int
    ok: bool


class ResultLog:
    """The results so far, with the file that further ones are appended to. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Opens a file that is whole, as `take_over` makes it."""
        self._path = path
        self._places: dict[int, _Place] = {}
        self._size = 0
        for line, place, self._size in _read(path):
            self._places.setdefault(line, place)
        self._file: BinaryIO = path.open("r+b")
        self._file.seek(self._size)

    @classmethod
    def take_over(cls, directory: Path, epoch: int) -> ResultLog:
        """The log of the holder with this epoch, which begins with the results of the one before; older files are removed. Raises
        FileExistsError when there is one of this epoch or a later one."""
        epochs = sorted(int(found.group(1)) for path in directory.iterdir() if (found := _NAME.fullmatch(path.name)))
        if epochs and epochs[-1] >= epoch:
            raise FileExistsError(f"{directory} has results of epoch {epochs[-1]}, which is not before {epoch}")
        path, unfinished = directory / f"results.{epoch}.log", directory / f"results.{epoch}.unfinished"
        with unfinished.open("wb") as file:
            if epochs:
                _copy_whole(directory / f"results.{epochs[-1]}.log", file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
        sync_directory(directory)
        for old in epochs:
            (directory / f"results.{old}.log").unlink(missing_ok=True)
        return cls(path)

    @property
    def answered(self) -> dict[int, bool]:
        """The lines that have a result, and whether it is an output."""
        return {line: place.ok for line, place in self._places.items()}

    def append(self, results: Sequence[LineResult]) -> None:
        """Returns when they are on the disk for good. What cannot be written as a whole counts as not written (OSError). Lines that have a
        result keep it."""
        fresh: dict[int, tuple[_Place, bytes]] = {}
        end = self._size
        for result in results:
            if result.line in self._places or result.line in fresh:
                continue
            data = result.encoded()
            text_begin = end + len(data) - 1 - len(result.text.encode())
            fresh[result.line] = _Place(text_begin, end + len(data) - 1, result.ok), data
            end += len(data)
        try:
            self._file.seek(self._size)
            self._file.write(b"".join(data for _, data in fresh.values()))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError:
            self._file.close()
            self._file = self._path.open("r+b")
            self._file.truncate(self._size)
            raise
        self._size = end
        self._places.update((line, place) for line, (place, _) in fresh.items())

    def texts(self, *, ok: bool) -> Iterator[bytes]:
        """The outputs, or the errors, in the order of the lines, each with its line break."""
        for line in sorted(self._places):
            place = self._places[line]
            if place.ok == ok:
                self._file.seek(place.begin)
                yield self._file.read(place.end - place.begin) + b"\n"

    def close(self) -> None:
        self._file.close()


def sync_directory(directory: Path) -> None:
    """Has names that were made, changed or removed in it outlast a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> Iterator[tuple[int, _Place, int]]:
    """The lines of the file up to the first that is torn: number, where it is, and where the file is whole up to."""
    position = 0
    with path.open("rb") as file:
        for raw in file:
            end = position + len(raw)
            checksum, _, body = raw[:-1].partition(b" ")
            if not raw.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(body):
                return
            line, ok, text = body.split(b" ", 2)
            yield int(line), _Place(end - 1 - len(text), end - 1, ok == b"1"), end
            position = end


def _copy_whole(source: Path, into: BinaryIO) -> None:
    """Without what is torn at its end."""
    left = max((end for _, _, end in _read(source)), default=0)
    with source.open("rb") as file:
        while left and (piece := file.read(min(_PIECE_BYTES, left))):
            into.write(piece)
            left -= len(piece)
