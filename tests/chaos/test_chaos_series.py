"""A series goes through all shapes for an hour, and each of its runs counts as it went the first time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import report, series
from tests.chaos.history import History, Limits
from tests.chaos.plan import plan
from tests.chaos.shapes import SERIES, SHAPES, named


def test_it_has_every_shape_and_an_hour_of_rounds() -> None:
    assert {part for name in SERIES for part in name.split("+")} == {shape.name for shape in SHAPES}
    assert len(SERIES) >= 10
    assert sum(one.lasts_s for name in SERIES for one in plan(1, named(name).targets, series.MINUTES)) >= 3600


def test_a_bad_run_stays_in_the_table_and_one_without_a_report_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []

    def chaos(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        seed, shape, path = (command[command.index(name) + 1] for name in ("--seed", "--shape", "--report"))
        seen.append(int(seed))
        if seed == "8":
            return subprocess.CompletedProcess(command, 1)
        past = History(named(shape).topology, Limits(), (), {})
        Path(path).write_text(json.dumps(report.document(report.Run(int(seed), shape, 8.0, "", "", "abc"), past, ())))
        return subprocess.CompletedProcess(command, 1 if seed == "9" else 0)

    monkeypatch.setattr(subprocess, "run", chaos)
    assert series.run(tmp_path, 8.0, 7) == 1
    told = capsys.readouterr().out
    assert seen == list(range(7, 7 + len(SERIES))), "each once"
    assert f"exit code 1; it has no report, see {tmp_path / '8.log'}" in told and told.count("exit code 1\n") == 1
    for seed, shape in enumerate(SERIES, 7):
        assert (f"| {shape} | {seed} |" in told) == (seed != 8)


@pytest.mark.parametrize(("commit", "there", "said"), [("abc-dirty", False, "not committed"), ("abc", True, "exists already")])
def test_it_is_of_one_commit_and_covers_no_other_outcome(
    commit: str, there: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "runs"
    if there:
        directory.mkdir()
    monkeypatch.setattr(series, "commit", lambda: commit)
    monkeypatch.setattr(sys, "argv", ["series", str(directory)])
    with pytest.raises(SystemExit):
        series.main()
    assert said in capsys.readouterr().err
