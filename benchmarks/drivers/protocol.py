"""How a benchmark commands a driver.

A driver sets itself up, proves itself (moves the bytes of its job once each way and compares them), and prints `{"ready": true}`. Then each
line `OPERATION TIMES` on its standard input is answered by a JSON list of so many durations in seconds. It ends when its input does. What a
driver's libraries print goes to its standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TextIO

import psutil

STOP_TIMEOUT_S = 10
POLL_S = 0.05


class Job(Protocol):
    """What a driver was set up for."""

    def verify(self) -> None:
        """Moves the bytes once each way. Raises AssertionError when those that came are not those that were sent."""

    def measure(self, operation: str, times: int) -> list[float]:
        """Seconds that each of `times` repetitions of the operation took."""

    def close(self) -> None:
        """Ends what was started for it."""


def run(
    open_job: Callable[[Sequence[str]], Job], serve_target: Callable[[Sequence[str]], tuple[dict[str, Any], object]] | None = None
) -> None:
    """The main program of a driver; both functions are given the command line's arguments. As `target` (see Target) it calls
    `serve_target`, which returns what to announce, and what has to live as long as the process."""
    replies = _take_standard_output()
    if sys.argv[1:2] == ["target"]:
        assert serve_target is not None
        announcement, _served = serve_target(sys.argv[2:])
        print(json.dumps(announcement), file=replies, flush=True)
        sys.stdin.read()
        return
    try:
        with contextlib.closing(open_job(sys.argv[1:])) as job:
            job.verify()
            print(json.dumps({"ready": True}), file=replies, flush=True)
            for line in sys.stdin:
                operation, times = line.split()
                print(json.dumps(job.measure(operation, int(times))), file=replies, flush=True)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=replies, flush=True)
        sys.exit(1)


def repeat(work: Callable[[], object], times: int) -> list[float]:
    """Seconds that each of `times` calls took."""
    durations = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        durations.append(time.perf_counter() - started)
    return durations


class Target:
    """The other side: this driver once more, as a child process that serves."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", module, "target", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the target ended with {self._process.wait()} before it was ready")
        self.announced: dict[str, Any] = json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        end(self._process)


def end(process: subprocess.Popen[Any]) -> None:
    """Waits for a process that was told to stop; kills it when it does not."""
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_group(process: subprocess.Popen[Any]) -> None:
    """Ends a process that leads a group (`start_new_session`), as `end`. What it started is told to stop then, and killed when it does not.
    Killed at once, Python's resource tracker, which is among them, would leave the group's semaphores and memory in /dev/shm."""
    end(process)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline and _runs(process.pid):
            time.sleep(POLL_S)
        os.killpg(process.pid, signal.SIGKILL)


def _runs(group: int) -> bool:
    """Whether any process of the group runs; those that nobody has waited for yet do not."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _take_standard_output() -> TextIO:
    """Standard output for this protocol alone: whoever else prints there is led to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies
