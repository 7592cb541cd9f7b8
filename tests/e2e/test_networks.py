"""Prefill node, decode node, Conductor and gateway each in a network of its own: they reach each other by their addresses alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from tests.support.generate import Generated, generate
from tests.support.models import make_tiny_llama
from tests.support.netns import Switch
from tests.support.profiles import TINY_PROFILE
from tests.support.reference import Reference, random_prompt
from tests.support.scattered import ScatteredCluster

OUTPUT_TOKENS, BLOCK_TOKENS = 24, 16
CACHED_TOKENS = 496
"""Of a prompt of 500, in whole blocks."""
SETTINGS = {
    "dtype": "float32",
    "profile": TINY_PROFILE,
    "kv.block_tokens": BLOCK_TOKENS,
    "kv.arena_size": "64MiB",
    "conductor.admission": "baseline",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference.from_directory(model)


@pytest.fixture(scope="module")
def cluster(switch: Switch, model: Path) -> Iterator[ScatteredCluster]:
    with ScatteredCluster(switch, model, **SETTINGS) as cluster:
        yield cluster


def prompt_of(seed: int, length: int) -> list[int]:
    return random_prompt(seed, length, 10, 250)


def ask(cluster: ScatteredCluster, prompt: list[int], num_tokens: int = OUTPUT_TOKENS, **options) -> Generated:
    return generate(cluster.grpc_address, cluster.model, prompt, num_tokens, **options)


def test_a_request_through_all_networks_is_answered_as_by_transformers(cluster: ScatteredCluster, reference: Reference) -> None:
    prompt = prompt_of(1, 300)
    wanted = reference.greedy(prompt, OUTPUT_TOKENS)
    cold, cached = ask(cluster, prompt), ask(cluster, prompt)
    assert cold.token_ids == cached.token_ids == wanted
    assert (cold.cached_tokens, cached.cached_tokens) == (0, 288)


def test_keys_and_values_cross_from_one_network_to_the_other(cluster: ScatteredCluster, reference: Reference) -> None:
    metric, over_tcp = "springtide_messenger_bytes_total", {"transport": "tcp"}
    before = cluster.metric("store", metric, over_tcp)
    prompt = prompt_of(2, 500)
    assert ask(cluster, prompt).token_ids == reference.greedy(prompt, OUTPUT_TOKENS)
    assert cluster.metric("store", metric, over_tcp) - before >= 500 * 3 * 2 * 2 * 16 * 4, "K and V of 500 tokens: 3 layers, 2 heads of 16"
    assert cluster.metric("store", metric, {"transport": "shm"}) == 0


def test_a_stream_goes_on_while_the_conductor_is_cut_off(cluster: ScatteredCluster, reference: Reference) -> None:
    """A request that comes meanwhile waits, and is served afterwards."""
    prompts = [prompt_of(seed, 100) for seed in (3, 4)]
    conductor, under_way, half_way = cluster.networks["conductor"], Event(), Event()

    def on_token(count: int) -> None:
        under_way.set()
        if count >= 400:
            half_way.set()

    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(ask, cluster, prompts[0], 800, on_token=on_token)
        assert under_way.wait(30)
        conductor.cut()
        try:
            waiting = threads.submit(ask, cluster, prompts[1])
            assert half_way.wait(30), "the stream stands still"
            assert not waiting.done()
        finally:
            conductor.mend()
        assert running.result().token_ids == reference.greedy(prompts[0], 800)
        assert waiting.result().token_ids == reference.greedy(prompts[1], OUTPUT_TOKENS)


@pytest.mark.parametrize(("stages", "arena_size"), [(2, "1MiB"), (3, "512KiB")])
def test_a_prefill_group_with_each_stage_in_a_network_of_its_own_is_exact(
    switch: Switch, model: Path, reference: Reference, tmp_path: Path, stages: int, arena_size: str
) -> None:
    """What its stores have lost, each of them reads for its own layers from the decode node's; and what their arenas have no room for, from
    its own SSD."""
    prompt, others = prompt_of(5, 500), [prompt_of(seed, 500) for seed in range(6, 10)]
    settings = {**SETTINGS, "prefill_node.chunk_tokens": 128, "kv.arena_size": arena_size}
    settings |= {"kv.ssd_dir": str(tmp_path), "kv.ssd_size": "64MiB", "kv.demote_below": 1.0, "kv.demote_until": 1.0}
    with ScatteredCluster(switch, model, stages=stages, **settings) as cluster:
        cold, cached = ask(cluster, prompt), ask(cluster, prompt)
        cluster.lose_blocks_of_group()
        remote = ask(cluster, prompt)
        fetched = cluster.metric("prefill", "springtide_prefill_cached_tokens_total", {"source": "fetched"})
        first = []
        for number, other in enumerate(others, 2):
            first.append(ask(cluster, other))
            everything = (stages - 1) * number * CACHED_TOKENS // BLOCK_TOKENS
            cluster.wait_until(lambda least=everything: on_ssd(cluster) >= least, "the SSDs to have what the arenas may lose")
        again = [ask(cluster, other) for other in others]
        read_bytes = cluster.metric("layer-store", "springtide_store_ssd_read_bytes_total")
        declined = cluster.metric("store", "springtide_store_ssd_declined_blocks_total")
    assert cold.token_ids == cached.token_ids == remote.token_ids == reference.greedy(prompt, OUTPUT_TOKENS)
    assert (cold.cached_tokens, cached.cached_tokens, remote.cached_tokens, fetched) == (0, CACHED_TOKENS, CACHED_TOKENS, CACHED_TOKENS)
    wanted = [reference.greedy(other, OUTPUT_TOKENS) for other in others]
    assert [answer.token_ids for answer in first] == [answer.token_ids for answer in again] == wanted
    missing = sum(CACHED_TOKENS - answer.cached_tokens for answer in again)
    assert read_bytes > 0, "an arena has room for four of the five"
    assert missing <= declined * BLOCK_TOKENS, (
        "what was not read would have come later than it was computed, from a disk as slow as this one"
    )


def on_ssd(cluster: ScatteredCluster) -> float:
    """The blocks that the SSDs of the group's stages have together, without the first stage's."""
    return cluster.metric("layer-store", "springtide_store_slots", {"tier": "ssd", "state": "cached"})
