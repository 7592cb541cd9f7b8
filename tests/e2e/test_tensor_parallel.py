"""A cluster whose engines are several ranks each answers as one process would, whatever the degrees on either side."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import Cluster
from tests.support.generate import generate
from tests.support.models import make_tiny_llama
from tests.support.reference import Reference, random_prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4)


def ranks_of(cluster: Cluster, name: str) -> list[psutil.Process]:
    pid = cluster.pid_of(name)
    assert pid is not None
    return [child for child in psutil.Process(pid).children(recursive=True) if "tensor_parallel" in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("prefill", "decode"), [({"tensor_parallel": 2, "stages": 2}, {}), ({}, {"tensor_parallel": 2})], ids=["prefill", "decode"]
)
def test_unequal_degrees_give_the_tokens_of_transformers(model: Path, prefill: dict[str, int], decode: dict[str, int]) -> None:
    reference = Reference.from_directory(model)
    prompts = [random_prompt(seed, 150, 10, 250) for seed in range(2)]
    settings = {"prefill_node": {"threads": 1, "chunk_tokens": 64, **prefill}, "decode_node": {"threads": 1, **decode}}
    with Cluster(model=str(model), dtype="float32", **settings) as cluster:
        for prompt in (*prompts, prompts[0]):
            assert generate(cluster.grpc_address, cluster.model, prompt, 8).token_ids == reference.greedy(prompt, 8)
        assert len(ranks_of(cluster, "prefill-0")) == (2 if prefill else 0)
        assert len(ranks_of(cluster, "decode-0")) == (1 if decode else 0)


def test_an_engine_that_loses_a_rank_is_started_afresh(model: Path) -> None:
    prompt = random_prompt(9, 100, 10, 250)
    settings = {"prefill_node": {"threads": 1}, "decode_node": {"threads": 1, "tensor_parallel": 2}}
    with Cluster(model=str(model), dtype="float32", **settings) as cluster:
        (rank,), engine = ranks_of(cluster, "decode-0"), cluster.pid_of("decode-0")
        os.kill(rank.pid, signal.SIGKILL)
        cluster.wait_until(lambda: cluster.pid_of("decode-0") not in (None, engine), "the engine to be started afresh")
        cluster.wait_ready()
        assert generate(cluster.grpc_address, cluster.model, prompt, 8).token_ids == Reference.from_directory(model).greedy(prompt, 8)
        assert len(ranks_of(cluster, "decode-0")) == 1


def test_ranks_end_with_the_engine_that_started_them(model: Path) -> None:
    with Cluster(model=str(model), dtype="float32", decode_node={"threads": 1, "tensor_parallel": 2}) as cluster:
        (rank,) = ranks_of(cluster, "decode-0")
        cluster.kill("decode-0")
        cluster.wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, "the rank to end")
        cluster.wait_ready(restarted="decode-0")
