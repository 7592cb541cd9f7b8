"""`springtide store` on a running cluster: what it shows is what requests have left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.cluster import Cluster
from tests.support.command import Result, springtide
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE

BLOCK_TOKENS = 16
PROMPT = "the same words over and over again, so that there are many blocks. " * 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = make_tiny_llama(tmp_path_factory.mktemp("model"))
    kv = {"block_tokens": BLOCK_TOKENS, "arena_size": "4MiB"}
    with Cluster(model=str(model), dtype="float32", profile=TINY_PROFILE, kv=kv) as cluster:
        yield cluster


def run(cluster: Cluster, *arguments: str) -> Result:
    return springtide("store", *arguments, "--url", cluster.url, COLUMNS="80")


def ask(cluster: Cluster, *arguments: str) -> list[dict[str, Any]]:
    result = run(cluster, *arguments, "--json")
    assert result.returncode == 0, result.stderr
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows


def complete(cluster: Cluster, prompt: str) -> dict[str, Any]:
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    usage: dict[str, Any] = response.json()["usage"]
    return usage


def test_an_operator_sees_pins_evicts_and_verifies(cluster: Cluster) -> None:
    blocks = complete(cluster, PROMPT)["prompt_tokens"] // BLOCK_TOKENS
    (chain,) = ask(cluster, "ls", "--prompt", PROMPT, "--store", "prefill-0")
    assert (chain["blocks"], chain["tokens"], chain["pin"]) == (blocks, blocks * BLOCK_TOKENS, "")
    pins = ask(cluster, "pin", "--prompt", PROMPT, "--ttl", "2h")
    assert {(row["kind"], row["blocks"]) for row in pins} == {("soft", blocks)}
    (pinned,) = ask(cluster, "evict", "--all", "--store", "prefill-0")
    assert (pinned["evicted"], pinned["kept"]) == (0, blocks)
    assert [(row["store"], row["pin_id"]) for row in ask(cluster, "pins")] == [(row["store"], row["pin_id"]) for row in pins]
    ask(cluster, "unpin", "--prompt", PROMPT)
    (named,) = ask(cluster, "evict", chain["key"][:10], "--store", "prefill-0")
    assert (named["evicted"], named["kept"]) == (1, 0)
    assert ask(cluster, "evict", "--prompt", PROMPT, "--store", "prefill-0")[0]["evicted"] == blocks - 1
    assert ask(cluster, "ls", "--store", "prefill-0") == []
    stats = {row["store"]: row for row in ask(cluster, "stat")}
    assert stats["prefill-0"]["slots_free"] == stats["prefill-0"]["slots_total"]
    assert [row["verdict"] for row in ask(cluster, "verify")] == ["sound", "sound"]


@pytest.mark.parametrize("command", [("ls",), ("stat",), ("pins",), ("pin", "--prompt", PROMPT, "--hard"), ("verify",), ("evict", "--all")])
def test_tables_fit_80_columns(cluster: Cluster, command: tuple[str, ...]) -> None:
    complete(cluster, PROMPT)
    run(cluster, "pin", "--prompt", PROMPT)
    result = run(cluster, *command)
    assert result.returncode == 0, result.stderr
    assert all(len(line) <= 80 for line in result.stdout.splitlines()), result.stdout
    assert "prefill-0" in result.stdout
    run(cluster, "unpin", "--prompt", PROMPT)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("stat", "--store", "nobody"), 2, "--store nobody: there is no such store; there are decode-0, prefill-0"),
        (("ls", "xyz"), 2, "'xyz' is no block key"),
        (("pin",), 2, "name blocks: by KEY, or by --prompt, --chat or --tokens"),
        (("pin", "00" * 16), 1, "none of the 1 blocks is held here"),
        (("pin", "--tokens", "1,2"), 2, "has 2 tokens and no full block of 16"),
        (("pin", "--tokens", "1,a"), 2, "--tokens 1,a: write token ids"),
        (("pin", "--prompt", PROMPT, "--ttl", "soon"), 2, "--ttl soon: write a time such as 90s"),
        (("unpin", "none"), 1, "there is no pin 'none' here"),
        (("evict", "--all", "abc"), 2, "--all evicts everything: name no blocks beside it"),
    ],
)
def test_what_cannot_be_done_is_said_by_name(cluster: Cluster, arguments: tuple[str, ...], code: int, message: str) -> None:
    complete(cluster, PROMPT)
    result = run(cluster, *arguments)
    assert (result.returncode, result.stdout) == (code, "")
    assert message in " ".join(result.stderr.split())


def test_a_cluster_that_is_not_there_is_said() -> None:
    command = [sys.executable, "-m", "deploy.cli", "store", "stat", "--url", "http://127.0.0.1:9"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "no cluster of this user on this machine serves at http://127.0.0.1:9" in result.stderr
