"""A cluster without a fixed split: its instances prefill, decode and do both, and the answers are those of transformers in float32 whatever
dies meanwhile."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.generate import generate
from tests.support.models import make_tiny_llama
from tests.support.reference import Reference, random_prompt

INSTANCES = ("instance-0", "instance-1")
OUTPUT_TOKENS = 120
BLOCK_TOKENS = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 8}
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", **shape)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference.from_directory(model)


@pytest.fixture(scope="module")
def wanted(reference: Reference) -> dict[int, list[int]]:
    """What is answered to the prompt of each seed, which takes transformers a while."""
    return {seed: reference.greedy(prompt_under_load(seed), OUTPUT_TOKENS) for seed in range(10, 18)}


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    settings = {"prefill_node": {"chunk_tokens": 128}, "decode_node": {"threads": 1}, "conductor": {"admission": "baseline"}}
    settings |= {"kv": {"block_tokens": BLOCK_TOKENS}, "server": {"separate_gateway": True}}
    with Cluster(model=str(model), dtype="float32", instances=2, prefill=0, decode=0, **settings) as cluster:
        yield cluster


def prompt_of(seed: int, length: int) -> list[int]:
    return random_prompt(seed, length, 10, 250)


def prompt_under_load(seed: int) -> list[int]:
    return prompt_of(seed, 100 + 60 * (seed % 8))


def all_slots_are_back(cluster: Cluster) -> None:
    for name in INSTANCES:
        for state in ("in_use", "quarantined"):
            cluster.wait_metric(f"{name}-store", "springtide_store_slots", lambda slots: slots == 0, labels={"state": state})


def test_a_request_is_decoded_where_it_is_prefilled_and_its_next_turn_finds_all_of_it(cluster: Cluster, reference: Reference) -> None:
    def inlined() -> float:
        return sum(cluster.metric(name, "springtide_decode_inlined_prompts_total") for name in INSTANCES)

    before, first = inlined(), prompt_of(1, 300)
    answer = generate(cluster.grpc_address, cluster.model, first, 40)
    assert answer.token_ids == reference.greedy(first, 40) and answer.cached_tokens == 0
    turn = [*first, *answer.token_ids, *prompt_of(2, 30)]
    second = generate(cluster.grpc_address, cluster.model, turn, 20)
    assert second.token_ids == reference.greedy(turn, 20) and second.cached_tokens >= 300 // BLOCK_TOKENS * BLOCK_TOKENS
    assert inlined() == before + 2
    assert cluster.status().wanted_prefill is None, "there is nothing to divide between the roles"
    all_slots_are_back(cluster)


def test_a_document_that_many_ask_about_at_once_is_computed_once_at_each_instance(cluster: Cluster, reference: Reference) -> None:
    document = prompt_of(3, 3 * 512)
    prompts = [[*document, *prompt_of(50 + number, 20)] for number in range(5)]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: generate(cluster.grpc_address, cluster.model, prompt, 4), prompts))
    assert [answer.token_ids for answer in answers] == [reference.greedy(prompt, 4) for prompt in prompts]
    cached = [answer.cached_tokens for answer in answers]
    assert set(cached) <= {0, len(document)} and cached.count(0) <= len(INSTANCES), "whoever came while it was computed has waited for it"
    all_slots_are_back(cluster)


@pytest.mark.parametrize("victim", [None, "instance-0", "instance-1-store", "conductor-0"])
def test_no_request_is_lost_nor_is_a_token_wrong_when_a_process_is_killed(
    cluster: Cluster, wanted: dict[int, list[int]], victim: str | None
) -> None:
    killed: list[int] = []
    turn = threading.Lock()

    def kill_once(so_far: int) -> None:
        with turn:
            if victim is not None and so_far >= 10 and not killed:
                killed.append(cluster.kill(victim))

    def answer(seed: int) -> list[int]:
        prompt = prompt_under_load(seed)
        return generate(cluster.grpc_address, cluster.model, prompt, OUTPUT_TOKENS, on_token=kill_once).token_ids

    with concurrent.futures.ThreadPoolExecutor(len(wanted)) as threads:
        assert dict(zip(wanted, threads.map(answer, wanted), strict=True)) == wanted
    if victim is not None:
        assert killed
        cluster.wait_ready(restarted=victim)
    all_slots_are_back(cluster)
