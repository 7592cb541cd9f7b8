"""The results of a batch on the disk: what was told to be there is there once, whatever the machine was doing when it stopped."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batches.results import LineResult, ResultLog

TEXTS = st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)), max_size=30)


def result(line: int, ok: bool = True, text: str | None = None) -> LineResult:
    return LineResult(line, ok, text if text is not None else f'{{"line":{line}}}')


def outputs(log: ResultLog) -> list[bytes]:
    return list(log.texts(ok=True))


def test_outputs_and_errors_come_in_the_order_of_the_lines(tmp_path: Path) -> None:
    log = ResultLog.take_over(tmp_path, 1)
    log.append([result(5), result(1, ok=False), result(0)])
    log.append([result(3)])
    assert outputs(log) == [b'{"line":0}\n', b'{"line":3}\n', b'{"line":5}\n']
    assert list(log.texts(ok=False)) == [b'{"line":1}\n'] and log.answered == {5: True, 1: False, 0: True, 3: True}


def test_a_line_that_has_a_result_keeps_it(tmp_path: Path) -> None:
    log = ResultLog.take_over(tmp_path, 1)
    log.append([result(1, text="first"), result(1, text="second")])
    log.append([result(1, text="third"), result(2)])
    log.close()
    assert outputs(ResultLog.take_over(tmp_path, 2)) == [b"first\n", b'{"line":2}\n']


def test_what_a_predecessor_adds_to_its_own_after_it_was_taken_over_is_part_of_nothing(tmp_path: Path) -> None:
    old = ResultLog.take_over(tmp_path, 1)
    old.append([result(0)])
    new = ResultLog.take_over(tmp_path, 2)
    old.append([result(1, text="late")])
    new.append([result(1, text="own")])
    assert outputs(new) == [b'{"line":0}\n', b"own\n"]
    new.close()
    assert outputs(ResultLog.take_over(tmp_path, 3)) == [b'{"line":0}\n', b"own\n"]


def test_nobody_takes_over_from_a_successor(tmp_path: Path) -> None:
    ResultLog.take_over(tmp_path, 3)
    with pytest.raises(FileExistsError):
        ResultLog.take_over(tmp_path, 3)
    with pytest.raises(FileExistsError):
        ResultLog.take_over(tmp_path, 2)


def test_who_died_while_it_took_over_has_taken_nothing_with_it(tmp_path: Path) -> None:
    ResultLog.take_over(tmp_path, 1).append([result(0)])
    (tmp_path / "results.2.unfinished").write_bytes(b"half of")
    assert outputs(ResultLog.take_over(tmp_path, 2)) == [b'{"line":0}\n']


def test_a_text_of_two_lines_is_none() -> None:
    with pytest.raises(ValueError, match="line break"):
        LineResult(0, True, "a\nb")


def test_what_cannot_be_written_as_a_whole_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ResultLog.take_over(tmp_path, 1)
    log.append([result(0)])
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="full"):
            log.append([result(1), result(2)])
    assert log.answered == {0: True}
    log.append([result(2)])
    log.close()
    assert outputs(ResultLog.take_over(tmp_path, 2)) == [b'{"line":0}\n', b'{"line":2}\n']


def full(descriptor: int) -> None:
    raise OSError("the disk is full")


@patch("os.fsync", lambda descriptor: None)  # It is bytes that are lost here.
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_after_a_crash_at_any_byte_all_that_was_told_is_there_once(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("batch")
    told: dict[int, str] = {}
    epoch = 0
    for _ in range(data.draw(st.integers(1, 4), label="holders")):
        epoch += data.draw(st.integers(1, 3), label="epochs later")
        log = ResultLog.take_over(directory, epoch)
        assert {line: text for line, text in read(log).items() if line in told} == told, "what was told is there"
        # A result that a crash left whole before anybody was told of it stands as well.
        told = read(log)
        for _ in range(data.draw(st.integers(0, 3), label="writes")):
            fresh = [result(line, text=data.draw(TEXTS)) for line in data.draw(st.lists(st.integers(0, 20), unique=True, max_size=4))]
            log.append(fresh)
            told = {**{one.line: one.text for one in fresh}, **told}
        log.close()
        path = directory / f"results.{epoch}.log"
        whole = path.read_bytes()
        lost = [result(line, text=data.draw(TEXTS)) for line in range(30, 30 + data.draw(st.integers(0, 2), label="unconfirmed"))]
        begun = b"".join(one.encoded() for one in lost)
        garbage = data.draw(st.binary(max_size=20) | st.just(bytes(64)), label="garbage")
        path.write_bytes(whole + begun[: data.draw(st.integers(0, len(begun)), label="torn at")] + garbage)
    log = ResultLog.take_over(directory, epoch + 1)
    found = read(log)
    assert {line: found[line] for line in told} == told
    assert len(list(directory.iterdir())) == 1


def read(log: ResultLog) -> dict[int, str]:
    texts = [text[:-1].decode() for text in log.texts(ok=True)]
    return dict(zip(sorted(log.answered), texts, strict=True))
