"""A record is written beside the decisions, and is whole up to its end, however slow or full the disk is."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from conductor import metrics
from conductor.server.record_file import RecordFile
from springtide.errors import ConfigError

LINE = "x" * 1023 + "\n"


def unrecorded() -> float:
    (metric,) = metrics.UNRECORDED_EVENTS.collect()
    return metric.samples[0].value


class SlowDisk:
    """A pipe: what is written to it waits, once it is full, until somebody reads."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        self.file = os.fdopen(writer, "w")
        self.read = ""
        self._thread = threading.Thread(target=self._read_all)

    def _read_all(self) -> None:
        with os.fdopen(self._reader) as reader:
            self.read = reader.read()

    def recover(self) -> None:
        self._thread.start()

    def contents(self) -> str:
        self._thread.join()
        return self.read


def test_nobody_waits_for_a_slow_disk_and_a_close_loses_nothing() -> None:
    disk = SlowDisk()
    record = RecordFile(disk.file)
    lines = [f"{number} {LINE}" for number in range(1_000)]
    for line in lines:
        record.write(line)
    disk.recover()
    record.close()
    assert disk.contents() == "".join(lines)


def test_a_record_that_falls_too_far_behind_ends_without_a_gap() -> None:
    disk, before = SlowDisk(), unrecorded()
    record = RecordFile(disk.file, most_waiting=200 * len(LINE))
    for number in range(1_000):
        record.write(f"{number:03} {LINE[4:]}")
    disk.recover()
    record.write(LINE)
    record.close()
    kept = disk.contents().splitlines()
    assert 200 <= len(kept) < 1_000
    assert [int(line[:3]) for line in kept] == list(range(len(kept)))
    assert unrecorded() - before == 1_001 - len(kept)


def test_a_full_disk_ends_the_record_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with Path("/dev/full").open("w") as file:
        record = RecordFile(file)
        for _ in range(100):
            record.write(LINE)
        record.close()
        record.write(LINE)
        record.close()
    assert "/dev/full ends here: No space left" in caplog.text


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"conductor\.record_dir: cannot write to .*file"):
        RecordFile.create(tmp_path / "file", "conductor-0")
