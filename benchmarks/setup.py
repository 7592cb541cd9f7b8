"""What a new user waits for, in a fresh clone of this checkout's last commit: installing, starting, testing (`make bench-setup`)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.driven import CHECKOUT, plain
from benchmarks.results import Row, write

STARTS = 5
READY_LINE = "springtide chat"
"""Printed last, when the endpoint takes requests."""
INSTALL, START = "`make .venv`, wheels in pip's cache", "`make serve`, installed, until the endpoint takes requests"
TESTS_LINE = re.compile(r"^=+ .*\bpassed\b.* in ([\d.]+)s", re.MULTILINE)


def make(clone: Path, target: str) -> tuple[float, str]:
    """Seconds that `make TARGET` took, and what it printed. Raises CalledProcessError when it fails, having shown that."""
    started = time.monotonic()
    done = subprocess.run(["make", target], cwd=clone, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout)
        done.check_returncode()
    return time.monotonic() - started, done.stdout


def serve(clone: Path) -> tuple[float, float]:
    """Seconds from `make serve` to its endpoint, and from Ctrl-C to its end."""
    started = time.monotonic()
    server = subprocess.Popen(["make", "serve", "ARGS=--port 0"], cwd=clone, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert server.stdout is not None
    if not any(READY_LINE in line for line in server.stdout):
        raise RuntimeError(f"make serve ended with {server.wait()} before it was ready")
    ready_s = time.monotonic() - started
    started = time.monotonic()
    os.killpg(server.pid, signal.SIGINT)
    server.communicate()
    return ready_s, time.monotonic() - started


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="springtide-setup-") as scratch:
        clone = Path(scratch, "springtide")
        subprocess.run(["git", "clone", "--quiet", CHECKOUT, clone], check=True)
        install_s, _ = make(clone, ".venv")
        starts, stops = zip(*(serve(clone) for _ in range(STARTS)), strict=True)
        whole_s, output = make(clone, "test")
    runs_s = [float(seconds) for seconds in TESTS_LINE.findall(output)]
    assert runs_s, output[-2000:]
    rows = [
        Row(INSTALL, "s", install_s),
        plain(START, "s", starts),
        plain("Ctrl-C, until everything has ended", "s", stops),
        Row("`make test`: the tests", "s", sum(runs_s)),
        Row("`make test`: development tools, linters and types besides", "s", whole_s - sum(runs_s)),
    ]
    notes = "In a fresh clone of the last commit, one command after the other."
    print(write("setup", "make bench-setup", rows, notes, (START,)))


if __name__ == "__main__":
    main()
