"""A cluster that is told to stop is gone within five seconds and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.cluster import Cluster
from tests.support.reference import random_prompt

pytestmark = pytest.mark.alone

WITHIN_S = 5.0


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_cluster_stops_in_time_in_the_middle_of_a_stream(number: signal.Signals) -> None:
    before = shared_memory()
    with Cluster() as cluster:
        supervisor = cluster.supervisor
        children = supervisor.children(recursive=True)
        run_dir = Path(cluster.record.run_dir)
        request = {"model": cluster.model, "prompt": random_prompt(1, 300), "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=request, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            supervisor.send_signal(number)
            asked = time.monotonic()
            _, alive = psutil.wait_procs([supervisor, *children], timeout=WITHIN_S)
            assert not alive, f"{[process.cmdline() for process in alive]} after {time.monotonic() - asked:.1f} s"
            ends = [line for line in lines if '"error"' in line]
        assert len(ends) == 1, "the running stream ends with one error"
    assert not run_dir.exists()
    assert shared_memory() <= before
