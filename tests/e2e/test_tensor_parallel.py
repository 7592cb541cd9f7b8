"""A cluster whose engines are several ranks each answers as one process would, whatever the degrees on either side."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import Cluster
from tests.support.generate import generate
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE
from tests.support.reference import Reference, random_prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference.from_directory(model)


def ranks_of(cluster: Cluster, name: str) -> list[psutil.Process]:
    pid = cluster.pid_of(name)
    assert pid is not None
    return [child for child in psutil.Process(pid).children(recursive=True) if "tensor_parallel" in " ".join(child.cmdline())]


def new_cluster(model: Path, prefill: dict[str, int], decode: dict[str, int]) -> Cluster:
    settings = {"prefill_node": {"threads": 1, "chunk_tokens": 64, **prefill}, "decode_node": {"threads": 1, **decode}}
    return Cluster(model=str(model), dtype="float32", profile=TINY_PROFILE, **settings)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    """Whose decode node has two ranks."""
    with new_cluster(model, {}, {"tensor_parallel": 2}) as cluster:
        yield cluster


def answers_as_transformers_does(cluster: Cluster, reference: Reference) -> None:
    prompts = [random_prompt(seed, 150, 10, 250) for seed in range(2)]
    for prompt in (*prompts, prompts[0]):
        assert generate(cluster.grpc_address, cluster.model, prompt, 8).token_ids == reference.greedy(prompt, 8)


def test_more_ranks_in_the_prefill_group_give_the_tokens_of_transformers(model: Path, reference: Reference) -> None:
    with new_cluster(model, {"tensor_parallel": 2, "stages": 2}, {}) as cluster:
        answers_as_transformers_does(cluster, reference)
        assert (len(ranks_of(cluster, "prefill-0")), len(ranks_of(cluster, "decode-0"))) == (2, 0)


def test_more_ranks_in_the_decode_node_give_the_tokens_of_transformers(cluster: Cluster, reference: Reference) -> None:
    answers_as_transformers_does(cluster, reference)
    assert (len(ranks_of(cluster, "prefill-0")), len(ranks_of(cluster, "decode-0"))) == (0, 1)


def test_an_engine_that_loses_a_rank_is_started_afresh(cluster: Cluster, reference: Reference) -> None:
    prompt = random_prompt(9, 100, 10, 250)
    (rank,), engine = ranks_of(cluster, "decode-0"), cluster.pid_of("decode-0")
    os.kill(rank.pid, signal.SIGKILL)
    cluster.wait_until(lambda: cluster.pid_of("decode-0") not in (None, engine), "the engine to be started afresh")
    cluster.wait_ready()
    assert generate(cluster.grpc_address, cluster.model, prompt, 8).token_ids == reference.greedy(prompt, 8)
    assert len(ranks_of(cluster, "decode-0")) == 1


def test_ranks_end_with_the_engine_that_started_them(cluster: Cluster) -> None:
    (rank,) = ranks_of(cluster, "decode-0")
    cluster.kill("decode-0")
    cluster.wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, "the rank to end")
    cluster.wait_ready(restarted="decode-0")
