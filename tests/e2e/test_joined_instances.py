"""Machines that join as instances, which is what they are unless they say otherwise: each prefills and decodes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from tests.support import streams
from tests.support.cluster import Cluster
from tests.support.generate import generate
from tests.support.joined import JoinedNode, ready
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE
from tests.support.reference import Reference, random_prompt

OUTPUT_TOKENS = 24
LONG = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference.from_directory(model)


@pytest.fixture(scope="module")
def head(model: Path) -> Iterator[Cluster]:
    """Without an engine of its own."""
    kv = {"block_tokens": 16, "arena_size": "64MiB", "transports": ["tcp"]}
    with Cluster(
        model=str(model),
        served_model_name="joined",
        dtype="float32",
        profile=TINY_PROFILE,
        device="cpu",
        kv=kv,
        prefill=0,
        decode=0,
        join_port=0,
        valkey_port=0,
        conductor={"admission": "baseline"},
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def instance(head: Cluster) -> Iterator[JoinedNode]:
    with JoinedNode(head, "instance", "127.0.0.2", says_role=False) as node:
        head.wait_until(lambda: ready(head.url), "the cluster to take requests")
        yield node


def prompt_of(seed: int, length: int = 100) -> list[int]:
    return random_prompt(seed, length, 10, 250)


def test_one_machine_that_has_joined_is_enough_to_answer(head: Cluster, instance: JoinedNode, reference: Reference) -> None:
    prompt = prompt_of(1, 300)
    wanted = reference.greedy(prompt, OUTPUT_TOKENS)
    cold, cached = (generate(head.grpc_address, "joined", prompt, OUTPUT_TOKENS) for _ in range(2))
    assert cold.token_ids == cached.token_ids == wanted
    assert (cold.cached_tokens, cached.cached_tokens) == (0, 288)
    assert head.ready_instances() == {"instance-2", "instance-2.prefill"}
    assert "is in the cluster 'springtide' as a store and an engine that prefills and decodes, at 127.0.0.2" in instance.log


def test_requests_end_where_they_are_when_an_instance_leaves(head: Cluster, instance: JoinedNode, reference: Reference) -> None:
    begun = Event()
    with ThreadPoolExecutor(4) as threads, JoinedNode(head, "instance", "127.0.0.3") as leaving:
        names = {leaving.name, f"{leaving.name}.prefill"}
        head.wait_until(lambda: names <= head.ready_instances(), "the Conductor to know it")
        running = [threads.submit(streams.stream, head, prompt_of(seed), LONG, begun.set) for seed in range(10, 14)]
        assert begun.wait(60)
        head.wait_until(lambda: any(each.running for each in head.status().instances if each.instance.instance_id in names), "work there")
        leaving.terminate()
        ends = [each.result() for each in running]
        assert all(end.finish_reasons == ("length",) and not end.errors and end.tokens == LONG for end in ends)
        assert leaving.process.wait(60) == 0
    head.wait_until(lambda: not names & head.ready_instances(), "it to be gone from the cluster")
    assert generate(head.grpc_address, "joined", prompt_of(20), OUTPUT_TOKENS).token_ids == reference.greedy(prompt_of(20), OUTPUT_TOKENS)


def test_a_machine_of_one_kind_may_be_beside_it(head: Cluster, instance: JoinedNode, reference: Reference) -> None:
    with JoinedNode(head, "decode", "127.0.0.4") as decode, ThreadPoolExecutor(6) as threads:
        head.wait_until(lambda: decode.name in head.ready_instances(), "the Conductor to know it")
        answers = threads.map(lambda seed: generate(head.grpc_address, "joined", prompt_of(seed, 200), OUTPUT_TOKENS), range(30, 36))
        for seed, answer in zip(range(30, 36), answers, strict=True):
            assert answer.token_ids == reference.greedy(prompt_of(seed, 200), OUTPUT_TOKENS)
