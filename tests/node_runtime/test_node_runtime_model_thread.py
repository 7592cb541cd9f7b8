from __future__ import annotations

import subprocess
import sys
import threading
from math import inf

import pytest

from node_runtime import model_thread
from node_runtime.model_thread import Watchdog
from tests.support.engine_nodes import WAIT_S
from tests.support.waiting import wait_until


def test_only_what_is_seen_again_and_again_goes_on() -> None:
    seen, first, second = model_thread.ObservedSpan(every_s=2.0), object(), object()
    assert [seen.look(first) for _ in range(4)] == [0.0, 2.0, 4.0, 6.0]
    assert [seen.look(second) for _ in range(2)] == [0.0, 2.0], "other work begins anew"
    for _ in range(5):
        seen.look(None)
    assert [seen.look(first) for _ in range(2)] == [0.0, 2.0], "and so does work after none"


def test_work_that_takes_too_long_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_thread, "LOOK_EVERY_S", 0.01)
    told = threading.Semaphore(0)
    dog = Watchdog(told.release)
    with dog.during("slow work", 0.05):
        assert told.acquire(timeout=WAIT_S)
        assert not told.acquire(timeout=0.2)
    dog.close()


def test_work_stalls_before_it_hangs_and_no_longer_once_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_thread, "LOOK_EVERY_S", 0.01)

    dog = Watchdog(lambda: pytest.fail("it does not hang"))
    with dog.during("slow work", inf, 0.05):
        wait_until(lambda: dog.stalled, "it to stall", WAIT_S)
        assert "slow work" in dog.stalled
    assert not dog.stalled
    dog.close()


def test_a_log_that_nobody_reads_does_not_keep_a_process_from_ending() -> None:
    script = """
import logging, threading
from springtide.process import end_process
logging.basicConfig()
threading.Thread(target=lambda: (logging.getLogger().handlers[0].acquire(), threading.Event().wait()), daemon=True).start()
end_process(3)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=WAIT_S).returncode == 3
