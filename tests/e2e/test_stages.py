"""A cluster whose prefill group has several stages answers as one process would, and outlives the death of a stage."""

from __future__ import annotations

import concurrent.futures
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from springtide.protocol.instances import Role
from tests.support.cluster import Cluster
from tests.support.generate import generate
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE
from tests.support.reference import Reference, random_prompt
from tests.support.role_switch import switch

NUM_REQUESTS = 4
FAILURES = "springtide_prefill_failures_total"
LOST = {"code": "peer_lost"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    prefill = {"stages": 2, "chunk_tokens": 32, "threads": 1}
    with Cluster(
        model=str(model), dtype="float32", profile=TINY_PROFILE, prefill_node=prefill, conductor={"admission": "baseline"}
    ) as cluster:
        yield cluster


def stages_of(cluster: Cluster) -> list[psutil.Process]:
    pid = cluster.pid_of("prefill-0")
    assert pid is not None
    return [child for child in psutil.Process(pid).children() if child.status() != psutil.STATUS_ZOMBIE]


def stage_of(cluster: Cluster) -> psutil.Process:
    (stage,) = stages_of(cluster)
    return stage


def serve_as(cluster: Cluster, to: Role) -> None:
    """Returns when the engine of prefill-0 serves in that role."""
    switch(cluster, "prefill-0", to)
    cluster.wait_until(lambda: "prefill-0" in {m.member_id for m in cluster.members() if m.role == to}, f"prefill-0 to be a {to} engine")


def test_requests_complete_when_a_stage_is_killed_and_the_group_serves_again(cluster: Cluster, model: Path) -> None:
    reference = Reference.from_directory(model)
    prompts = [random_prompt(seed, 3000, 10, 250) for seed in range(NUM_REQUESTS)]
    stage = stage_of(cluster)
    with concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS) as threads:
        answers = [threads.submit(generate, cluster.grpc_address, cluster.model, prompt, 6) for prompt in prompts]
        cluster.wait_metric("prefill-0", "springtide_prefill_chunks_total", lambda chunks: chunks >= 20)
        os.kill(stage.pid, signal.SIGKILL)
        tokens = [answer.result().token_ids for answer in answers]

    assert cluster.metric("prefill-0", FAILURES, LOST) > 0, "the stage died when all was computed already"
    assert tokens == [reference.greedy(prompt, 6) for prompt in prompts]
    assert stage_of(cluster).pid != stage.pid
    for node in ("prefill-0", "decode-0"):
        for state in ("in_use", "quarantined"):
            cluster.wait_metric(f"{node}-store", "springtide_store_slots", lambda slots: slots == 0, labels={"state": state})


def test_stages_end_with_the_engine_that_started_them(cluster: Cluster) -> None:
    stage = stage_of(cluster)
    cluster.kill("prefill-0")
    cluster.wait_until(lambda: not stage.is_running() or stage.status() == psutil.STATUS_ZOMBIE, "the stage to end")
    cluster.wait_ready(restarted="prefill-0")
    prompt = random_prompt(9, 500, 10, 250)
    assert len(generate(cluster.grpc_address, cluster.model, prompt, 3).token_ids) == 3


def test_a_group_becomes_a_decode_node_and_a_group_again(cluster: Cluster, model: Path) -> None:
    serve_as(cluster, Role.DECODE)
    assert stages_of(cluster) == []
    serve_as(cluster, Role.PREFILL)
    assert stage_of(cluster).is_running()
    cluster.wait_until(lambda: any(one.ready and one.instance.role == "prefill" for one in cluster.status().instances), "a prefill group")
    prompt = random_prompt(10, 500, 10, 250)
    assert generate(cluster.grpc_address, cluster.model, prompt, 3).token_ids == Reference.from_directory(model).greedy(prompt, 3)
