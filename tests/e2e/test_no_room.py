"""A cluster that is healthy and full: what it has accepted waits, and ends with the tokens that it would have had."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from gateway.prepare import MAX_GENERATIONS
from tests.support.cluster import Cluster
from tests.support.generate import generate
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE
from tests.support.reference import random_prompt

pytestmark = pytest.mark.alone

BLOCK_TOKENS = 16
SLOTS = 40
LONGEST = SLOTS * BLOCK_TOKENS
MAX_BATCH = 4
OUTPUT_TOKENS = 400
"""With its prompt, more than half of the arena: of sixteen streams, one or two have room."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096}
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", **shape)


def slot_bytes(slots: int) -> int:
    """Of a float32 model with two layers, two KV heads and a head size of 16."""
    return slots * 2 * 2 * BLOCK_TOKENS * 2 * 16 * 4


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    with Cluster(
        model=str(model),
        dtype="float32",
        profile=TINY_PROFILE,
        prefill=1,
        decode=1,
        prefill_node={"chunk_tokens": 64, "threads": 1},
        decode_node={"threads": 1, "max_batch": MAX_BATCH},
        kv={"arena_size": slot_bytes(SLOTS), "block_tokens": BLOCK_TOKENS, "tenant_quotas": {"small": slot_bytes(SLOTS // 2)}},
    ) as cluster:
        yield cluster


def tokens_of(cluster: Cluster, prompts: Sequence[Sequence[int]], at_once: int) -> list[list[int]]:
    with concurrent.futures.ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(lambda prompt: generate(cluster.grpc_address, cluster.model, prompt, OUTPUT_TOKENS).token_ids, prompts))


def test_streams_that_have_no_room_together_all_end_with_their_tokens(cluster: Cluster) -> None:
    prompts = [random_prompt(seed, 40 + 5 * seed, 10, 250) for seed in range(16)]
    assert tokens_of(cluster, prompts, at_once=16) == tokens_of(cluster, prompts, at_once=1)
    cluster.wait_until(lambda: not cluster.status().attempts_live, "nothing to run any more")


def test_a_tenants_streams_take_turns_in_its_quota_and_others_pass_by(cluster: Cluster) -> None:
    body = {"model": cluster.model, "max_tokens": 240, "temperature": 0, "ignore_eos": True}

    def complete(number: int) -> tuple[int, int, float]:
        tenant = "small" if number < 6 else "other"
        prompt = random_prompt(100 + number, 40, 10, 250)
        answer = httpx.post(
            f"{cluster.url}/v1/completions", json={**body, "prompt": prompt}, headers={"x-springtide-tenant": tenant}, timeout=120
        )
        return answer.status_code, answer.json()["usage"]["completion_tokens"], time.monotonic()

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(complete, range(8)))
    assert [(status, tokens) for status, tokens, _ in answers] == [(200, 240)] * 8
    assert max(ended for *_, ended in answers[6:]) < max(ended for *_, ended in answers[:6])


def test_many_more_outputs_than_a_batch_has_places_wait_for_one(cluster: Cluster) -> None:
    """By the default rules of admission, whose objectives are far from missed."""
    prompts = [random_prompt(200 + number, 4, 10, 250) for number in range(150)]
    body = {"model": cluster.model, "prompt": prompts, "n": 2, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert len(choices) == 300 and {choice["finish_reason"] for choice in choices} == {"length"}
    assert all(choices[2 * number]["text"] == choices[2 * number + 1]["text"] for number in range(150))


def test_as_many_outputs_as_a_request_may_have_are_served_and_one_more_is_refused(cluster: Cluster) -> None:
    body = {"model": cluster.model, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "n": 2}
    answer = httpx.post(f"{cluster.url}/v1/completions", json={**body, "prompt": [[7, 8, 9]] * (MAX_GENERATIONS // 2)}, timeout=120)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert len(choices) == MAX_GENERATIONS and len({choice["text"] for choice in choices}) == 1
    answer = httpx.post(f"{cluster.url}/v1/completions", json={**body, "prompt": [[7, 8, 9]] * (MAX_GENERATIONS // 2 + 1)}, timeout=30)
    assert answer.status_code == 400 and f"more than {MAX_GENERATIONS} outputs" in answer.json()["error"]["message"]


def test_two_hundred_streams_at_once_are_all_served(cluster: Cluster) -> None:
    body = {"model": cluster.model, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with (
        httpx.Client(timeout=120, limits=httpx.Limits(max_connections=200)) as client,
        concurrent.futures.ThreadPoolExecutor(200) as threads,
    ):
        prompts = [random_prompt(500 + number, 6, 10, 250) for number in range(200)]
        answers = list(threads.map(lambda prompt: client.post(f"{cluster.url}/v1/completions", json={**body, "prompt": prompt}), prompts))
    assert [answer.status_code for answer in answers] == [200] * 200, {answer.text for answer in answers if answer.status_code != 200}


def test_what_can_never_have_room_is_refused_before_it_begins(cluster: Cluster) -> None:
    body = {"model": cluster.model, "prompt": [7] * 100, "stream": True}
    answer = httpx.post(f"{cluster.url}/v1/completions", json={**body, "max_tokens": LONGEST - 99}, timeout=30)
    assert answer.status_code == 400 and str(LONGEST) in answer.json()["error"]["message"]


def test_a_deadline_that_cannot_be_kept_is_found_out_by_then(cluster: Cluster) -> None:
    body = {"model": cluster.model, "prompt": [7] * 100, "max_tokens": 500, "ignore_eos": True, "temperature": 0}
    begun = time.monotonic()
    answer = httpx.post(f"{cluster.url}/v1/completions", json={**body, "deadline_ms": 100}, timeout=30)
    assert answer.status_code in (429, 504) and answer.headers["x-request-id"]
    assert time.monotonic() - begun < 10
