"""The supervisor's command on a machine where something else is wrong: what it keeps running goes on."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.console import Console

from deploy.local import logs, rundir
from deploy.local.display import PlainDisplay, new_display
from deploy.local.plan import ClusterPaths, placed, processes
from deploy.local.rundir import ClusterRecord
from deploy.local.session import Machine, Session
from springtide.config import load_config
from springtide.modelinfo import ModelInfo
from tests.support.waiting import until

INFO = ModelInfo("/model", "tiny", "llama", "fingerprint-1", 8192, 2, 1, 8, 100, (0,))


def recorded() -> ClusterRecord | None:
    return next((record for record in rundir.running_clusters() if record.pid == os.getpid()), None)


@asynccontextmanager
async def running(run_dir: Path, said: io.StringIO, verbose: bool = False) -> AsyncIterator[asyncio.Task[int]]:
    """A session that keeps a Valkey, and nothing else."""
    (run_dir / "logs").mkdir(parents=True)
    config, paths = placed(load_config(environ={}), run_dir), ClusterPaths(run_dir)
    valkey = processes(config, paths, embedded_valkey=True)[:1]
    machine = Machine(config, INFO, paths, valkey, temporary=True, serves_requests=False)
    session = Session(machine, PlainDisplay(Console(file=said, width=200)), verbose, lambda record, took_s: "all is well")
    task = asyncio.create_task(session.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_process_that_dies_comes_back_where_nothing_can_be_recorded(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is recorded once that is possible."""
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    said = io.StringIO()
    async with running(short_path / "run", said) as session:
        await until(lambda: "all is well" in said.getvalue())
        record = recorded()
        assert record is not None and record.ready
        in_the_way = rundir.user_directory() / f"{os.getpid()}.json.tmp"
        in_the_way.mkdir()
        os.kill(record.processes["valkey"], signal.SIGKILL)
        await until(lambda: session.done() or said.getvalue().count("valkey: ready after") == 2)
        assert not session.done()
        assert said.getvalue().count("cannot be recorded") == 1 and recorded() == record
        in_the_way.rmdir()
        await until(lambda: recorded() != record)
        now = recorded()
        assert now is not None and now.ready and now.processes["valkey"] != record.processes["valkey"]


async def test_a_log_is_copied_beside_what_else_the_supervisor_does(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    begun, may_end, ends, copy = threading.Event(), threading.Event(), list[bool](), shutil.copyfile

    def slow(source: Path, target: Path) -> None:
        begun.set()
        ends.append(may_end.wait(10))
        copy(source, target)

    monkeypatch.setattr("shutil.copyfile", slow)
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 10_000)
    said = io.StringIO()
    async with running(short_path / "run", said, verbose=True):
        await until(lambda: "all is well" in said.getvalue())
        with (short_path / "run" / "logs" / "valkey.log").open("a") as log:
            log.write("x" * 20_000 + "\n")
        await until(begun.is_set)
        may_end.set()
        await until(lambda: ends)
    assert ends == [True]


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_who_shows_what_happens_goes_on_when_nobody_is_there_to_see_it(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = os.openpty() if terminal else os.pipe()
    with os.fdopen(writer, "w", buffering=1) as output:
        monkeypatch.setattr("sys.stdout", output)
        with new_display() as display:
            display.step("valkey", "starting")
            os.close(reader)
            with pytest.raises(OSError):  # EPIPE or EIO
                output.write("\n")
            display.step("decode-0", "starting")
            display.message("decode-0: was killed by SIGKILL; restarting")
            display.end_of_start()
            display.step("decode-0", "ready", done=True)
        monkeypatch.undo()
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), writer)  # for what is left to be written as it closes
