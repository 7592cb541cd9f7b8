"""Drivers as processes, and what is made of their measurements."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import driven
from benchmarks.driven import OURS, Bench, Driver, DriverFailed, Job, compared, loopback_bytes, microseconds, rate, with_remarks
from benchmarks.drivers.protocol import end_group

SOCKETS = Driver("sockets", "socket_loop", OURS, over_tcp=True)
MEMCPY = Driver("memcpy", "memcpy", OURS)


def children() -> set[str]:
    """Processes below this one that run a driver."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path("/proc", name, "cmdline").read_bytes()
        except OSError:
            continue
        if b"benchmarks.drivers" in command:
            found.add(name)
    return found


def test_drivers_move_bytes_side_by_side_and_leave_nothing_behind() -> None:
    before = children()
    with Bench([Job(SOCKETS, 5, 4096)], [Job(MEMCPY, 5, 4096)]) as bench:
        for operation in ("write", "read"):
            moved = loopback_bytes()
            seconds = bench.rounds(operation, 3)
            assert loopback_bytes() - moved > 5 * 4096
            assert {name: len(rounds) for name, rounds in seconds.items()} == {"sockets": 9, "memcpy": 9}
            assert min(seconds["sockets"]) > 0
    assert children() <= before


LEAVING = """
import multiprocessing, time
if __name__ == "__main__":
    spawning = multiprocessing.get_context("spawn")
    semaphore = spawning.Semaphore()
    child = spawning.Process(target=time.sleep, args=(600,))
    child.start()
    print(semaphore._semlock.name, child.pid, flush=True)
    time.sleep(600)
"""


def runs(pid: int) -> bool:
    """One that nobody has waited for yet does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_process_that_ends_abruptly_leaves_neither_children_nor_semaphores_behind(tmp_path: Path) -> None:
    """As vLLM does with its engine core."""
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    name, child = process.stdout.readline().split()
    left = Path("/dev/shm", f"sem.{name[1:]}")
    assert left.exists() and runs(int(child))
    process.terminate()
    end_group(process)
    process.stdout.close()
    assert not left.exists() and not runs(int(child))


def test_a_peer_that_cannot_run_is_left_out_and_said_why() -> None:
    missing = Driver("a peer", "no_such_driver", OURS)
    with Bench([Job(MEMCPY, 1, 4096)], [Job(missing, 1, 4096)]) as bench:
        assert list(bench.rounds("read", 1)) == ["memcpy"]
    assert bench.left_out == ["a peer: ended with 1"]
    assert with_remarks("Notes.", bench.left_out, "") == "Notes. Left out: a peer: ended with 1."


def test_what_does_not_go_by_tcp_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driven, "loopback_bytes", lambda: 0)  # others may be using it at this moment
    claims = Driver("a liar", "memcpy", OURS, over_tcp=True)
    with pytest.raises(DriverFailed, match="not by TCP"):
        Bench([Job(claims, 1, 4096)])


def test_an_environment_that_was_not_made_is_named() -> None:
    elsewhere = Driver("a peer", "memcpy", Path(sys.prefix, "nowhere", "python"))
    with pytest.raises(DriverFailed, match="make peers"):
        Bench([Job(elsewhere, 1, 4096)])


def test_a_row_says_whether_the_median_of_the_ratios_is_what_was_wanted() -> None:
    row = compared("x", rate(2_000_000_000), [1.0, 2.0, 4.0], [2.0, 2.0, 4.0], "peer", wanted=1.5)
    assert (row.unit, row.ours, row.spread, row.peer, row.ratio, row.met) == ("GB/s", 1.0, (0.5, 2.0), 1.0, 1.0, False)
    row = compared("x", microseconds(pieces=10), [1e-3], [2e-3], "peer", wanted=1.5)
    assert (row.unit, row.ours, row.peer, row.ratio, row.met) == ("us", pytest.approx(100), pytest.approx(200), 2.0, True)
