"""Which lines of the processes' logs the supervisor shows."""

from pathlib import Path

import pytest

from deploy.local import logs
from deploy.local.logs import LogFollower, last_lines

TEXT = """12:00:00.001 INFO    decode-0 ready
12:00:00.002 WARNING decode-0 store lost; connecting again
12:00:00.003 INFO    decode-0 connected
12:00:00.004 ERROR   decode-0 step failed
Traceback (most recent call last):
  File "x.py", line 1
ValueError: no
12:00:00.005 INFO    decode-0 going on
"""


def test_warnings_and_errors_are_shown_with_their_tracebacks(tmp_path: Path) -> None:
    log = tmp_path / "decode-0.log"
    log.write_text(TEXT)
    shown = list(LogFollower(log, everything=False).new_lines())
    assert shown == [TEXT.splitlines()[index] for index in (1, 3, 4, 5, 6)]
    assert list(LogFollower(log, everything=True).new_lines()) == TEXT.splitlines()


def test_json_lines_are_judged_by_their_level(tmp_path: Path) -> None:
    log = tmp_path / "decode-0.log"
    loud = '{"level": "error", "message": "b"}'
    log.write_text(f'{{"level": "info", "message": "a"}}\n{loud}\n{{not json\n')
    assert list(LogFollower(log, everything=False).new_lines()) == [loud]


def test_every_line_is_shown_once_and_whole(tmp_path: Path) -> None:
    log = tmp_path / "decode-0.log"
    follower = LogFollower(log, everything=True)
    assert list(follower.new_lines()) == []
    seen = []
    for piece in ("one\ntw", "o\n", "", "three\n"):
        with log.open("a") as file:
            file.write(piece)
        seen += list(follower.new_lines())
    assert seen == ["one", "two", "three"]


def test_a_log_that_grows_too_long_is_emptied_after_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 10)
    log = tmp_path / "decode-0.log"
    follower = LogFollower(log, everything=True)
    with log.open("ab", buffering=0) as process:
        process.write(b"the first line\n")
        assert list(follower.new_lines()) == ["the first line"]
        process.write(b"second\n")
        assert list(follower.new_lines()) == ["second"]
    assert log.read_bytes() == b"second\n"
    assert (tmp_path / "decode-0.log.1").read_bytes() == b"the first line\n"


def test_a_log_that_grows_too_long_is_emptied_also_where_there_is_no_room_for_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 10)
    log = tmp_path / "decode-0.log"
    log.write_text("the first line\n")
    (tmp_path / "decode-0.log.1").mkdir()
    assert list(LogFollower(log, everything=True).new_lines()) == ["the first line"]
    assert log.read_bytes() == b""


def test_the_end_of_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "gone.log") == ""
