"""A cluster whose arenas are small and whose SSDs are not: what comes back from SSD gives the same tokens in float32."""

from __future__ import annotations

import pytest

from springtide.modelinfo import KVSpec
from tests.support.cluster import Cluster
from tests.support.generate import generate
from tests.support.profiles import DEMO_PROFILE
from tests.support.reference import random_prompt

BLOCK_TOKENS = 64
DEMO = KVSpec(30, 3, 64, "float32", BLOCK_TOKENS)
PROMPT_BLOCKS = 5
OUTPUT_TOKENS = 4
ARENA_BLOCKS = 11
STORES = ("prefill-0-store", "decode-0-store")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    kv = {
        "arena_size": ARENA_BLOCKS * DEMO.bytes_per_slot,
        "ssd_dir": str(tmp_path_factory.mktemp("ssd")),
        "ssd_size": 512 << 20,
        "demote_below": 1.0,
        "demote_until": 1.0,
    }
    with Cluster(dtype="float32", kv=kv, profile=DEMO_PROFILE, conductor={"admission": "baseline"}) as cluster:
        yield cluster


def promoted(cluster: Cluster) -> float:
    return sum(cluster.metric(store, "springtide_store_ssd_promoted_blocks_total") for store in STORES)


def on_ssd(cluster: Cluster, store: str) -> float:
    return cluster.metric(store, "springtide_store_slots", {"tier": "ssd", "state": "cached"})


def test_prompts_that_left_the_arena_and_a_restart_are_answered_from_the_ssd(cluster: Cluster) -> None:
    prompts = [random_prompt(seed=seed, length=PROMPT_BLOCKS * BLOCK_TOKENS + 9) for seed in range(4)]
    wanted: list[list[int]] = []

    def ask(prompt: list[int]):
        return generate(cluster.grpc_address, cluster.model, prompt, OUTPUT_TOKENS)

    for number, prompt in enumerate(prompts, 1):
        cold = ask(prompt)
        assert cold.cached_tokens == 0
        wanted.append(cold.token_ids)
        metric, labels = "springtide_store_slots", {"tier": "ssd", "state": "cached"}
        cluster.wait_metric("prefill-0-store", metric, lambda blocks, least=number * PROMPT_BLOCKS: blocks >= least, labels)
    assert on_ssd(cluster, "prefill-0-store") > ARENA_BLOCKS, "more than the arena holds"

    before = promoted(cluster)
    for prompt, tokens in zip(prompts, wanted, strict=True):
        again = ask(prompt)
        assert again.token_ids == tokens and again.cached_tokens == PROMPT_BLOCKS * BLOCK_TOKENS
    assert promoted(cluster) > before

    for store in STORES:
        cluster.kill(store)
        cluster.wait_ready(restarted=store)
    for prompt, tokens in zip(prompts, wanted, strict=True):
        again = ask(prompt)
        assert again.token_ids == tokens and again.cached_tokens == PROMPT_BLOCKS * BLOCK_TOKENS
    assert promoted(cluster) >= PROMPT_BLOCKS, "counted since the restart"
