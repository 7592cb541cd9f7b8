"""The console of a real cluster, whose gateway is a process of its own: what it shows is what happened."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support.cluster import Cluster
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE
from tests.support.waiting import wait_until

PROMPT = [7 + number % 240 for number in range(200)]
OUTPUT_TOKENS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    tiny = {"model": str(make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")), "dtype": "float32", "profile": TINY_PROFILE}
    kv = {"arena_size": "128MiB", "block_tokens": 32}
    with Cluster(**tiny, prefill=1, decode=2, server={"separate_gateway": True}, kv=kv, max_context=1000) as cluster:
        # It takes requests with one of either kind.
        cluster.wait_until(lambda: cluster.ready_instances() == {"prefill-0", "decode-0", "decode-1"}, "all of them to be ready")
        yield cluster


@pytest.fixture(scope="module")
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=60) as http:
        yield http


def ask(http: httpx.Client, model: str) -> str:
    """A request's id."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def state_with(http: httpx.Client, wanted: Callable[[Any], bool]) -> Any:
    """The state, once it is as wanted: what came of a request is told a moment later."""
    state: Any = None

    def as_wanted() -> bool:
        nonlocal state
        state = http.get("/console/state").json()
        return wanted(state)

    wait_until(as_wanted, "the state", more=lambda: str(state), poll_s=0.2)
    return state


def test_a_request_is_shown_with_its_path_and_what_came_of_it(cluster: Cluster, http: httpx.Client) -> None:
    model = cluster.model
    first, second = ask(http, model), ask(http, model)

    def ended(state: Any) -> bool:
        rows = {row["request"]: row for row in state["tables"]["decisions"].values()}
        return all(rows.get(request_id, {}).get("phase") == "finished" for request_id in (first, second))

    state = state_with(http, ended)
    rows = {row["request"]: row for row in state["tables"]["decisions"].values()}
    assert (rows[first]["tokens"], rows[first]["actual"]["output_tokens"]) == (len(PROMPT), OUTPUT_TOKENS)
    assert rows[first]["actual"]["cached_tokens"] < rows[second]["actual"]["cached_tokens"] == 192
    assert rows[second]["actual"]["ttft_ms"] > 0 and rows[second]["actual"]["tbt_ms"] > 0
    assert set(state["tables"]["instances"]) == {"prefill-0", "decode-0", "decode-1"} and state["ready"]
    assert sum(bucket[3] for bucket in state["tables"]["history"].values()) == 2


def test_it_says_why_and_what_the_logs_have(cluster: Cluster, http: httpx.Client) -> None:
    request_id = ask(http, cluster.model)
    (told,) = http.get("/console/explain", params={"request": request_id}).json()["decisions"]
    assert told["prefills"][0]["instance_id"] == "prefill-0"
    assert {row["instance_id"] for row in told["decodes"]} == {"decode-0", "decode-1"}

    def logged() -> set[str]:
        return {line["process"] for line in http.get("/console/logs", params={"request": request_id}).json()["lines"]}

    wait_until(lambda: "gateway-0" in logged(), "the gateway's line", poll_s=0.2)


def test_the_terminal_shows_the_same(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "deploy.cli", "top", "--once", "--url", cluster.url]
    said = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "140"}, timeout=60)
    assert said.returncode == 0, said.stderr
    assert all(name in said.stdout for name in ("prefill-0", "decode-0", "decode-1", "ready"))


def test_a_node_that_is_gone_is_shown_as_such(cluster: Cluster, http: httpx.Client) -> None:
    cluster.kill("decode-1")
    state_with(http, lambda state: state["pools"]["decode"]["ready"] < 2)
    state_with(http, lambda state: state["pools"]["decode"]["ready"] == 2)
