"""A cluster that is told to stop is gone within five seconds and leaves nothing behind, or ends what it has first."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.cluster import Cluster, hanging
from tests.support.profiles import DEMO_PROFILE
from tests.support.reference import random_prompt

pytestmark = pytest.mark.alone

WITHIN_S = 5.0


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize(
    ("number", "settings"), [(signal.SIGINT, {}), (signal.SIGTERM, {"drain_s": 0})], ids=["ctrl-c", "sigterm, drain_s 0"]
)
def test_a_cluster_stops_in_time_in_the_middle_of_a_stream(number: signal.Signals, settings: dict[str, float]) -> None:
    before = shared_memory()
    with Cluster(**settings, profile=DEMO_PROFILE) as cluster:
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


def test_a_cluster_that_has_time_for_it_answers_whatever_has_come_before_it_stops() -> None:
    """A stream in its middle, a request of which nothing is computed yet, and one that comes before balancers have seen that it stops."""
    settings = {"drain_s": 60.0, "silence_s": 60.0, "profile": DEMO_PROFILE}
    with Cluster(**settings) as cluster, httpx.Client(base_url=cluster.url, timeout=60) as http, ExitStack() as answers:
        supervisor, request = cluster.supervisor, {"model": cluster.model, "ignore_eos": True, "stream": True}
        prefill = cluster.pid_of("prefill-0")
        assert prefill is not None

        def ask(seed: int, num_tokens: int) -> httpx.Response:
            """Returns once it is accepted."""
            body = {**request, "prompt": random_prompt(seed, 300), "max_tokens": num_tokens}
            return answers.enter_context(http.stream("POST", "/v1/completions", json=body))

        def leaving() -> bool:
            return bool(http.get("/ready").json().get("error", {}).get("code") == "leaving")

        streams = [ask(1, 600).iter_lines()]
        assert next(streams[0]).startswith("data: ")
        with hanging([prefill]):
            streams.append(ask(2, 20).iter_lines())
            supervisor.terminate()
            cluster.wait_until(leaving, "the gateway to say that it leaves")
            late = ask(3, 20)
            assert late.status_code == httpx.codes.OK, late.read()
            streams.append(late.iter_lines())
        for each in streams:
            *lines, last = [line for line in each if line]
            assert last == "data: [DONE]" and not [line for line in lines if '"error"' in line]
        assert supervisor.wait(60) == 0
