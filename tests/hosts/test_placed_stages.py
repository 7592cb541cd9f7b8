"""A prefill group whose stages are placed apart, each by an order as of Ray's agents, is sent away at work. In Ray's place is the test."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.ray.orders import NodeOrder
from deploy.ray.placement import Phase, PlacedNode
from deploy.ray.record import PlacementBook, PlacementRecord
from deploy.ray.resources import Pool
from springtide.valkey import ValkeyClient
from tests.support.cluster import Cluster
from tests.support.environment import own_environment
from tests.support.generate import generate
from tests.support.joined import new_token
from tests.support.reference import Reference, random_prompt
from tests.support.waiting import wait_until

pytestmark = pytest.mark.hosts

GROUP, STAGES = "prefill-0", 2
OUTPUT_TOKENS, PROMPT_TOKENS = 4, 4000
NUM_REQUESTS = 8
"""They keep the group busy for longer than it takes to be heard of."""
DRAIN_S = 120.0


@pytest.fixture(scope="module")
def head(model: Path) -> Iterator[Cluster]:
    kv: dict[str, Any] = {"block_tokens": 16, "arena_size": "64MiB", "transports": ["tcp"]}
    settings: dict[str, Any] = {"model": str(model), "served_model_name": "placed", "dtype": "float32", "device": "cpu", "kv": kv}
    settings["prefill_node"] = {"chunk_tokens": 32}
    with Cluster(**settings, prefill=0, decode=1, join_port=0, valkey_port=0, conductor={"admission": "baseline"}) as cluster:
        yield cluster


def say(head: Cluster, phase: Phase) -> None:
    """What the placer would say of the group."""

    async def write() -> None:
        async with ValkeyClient.from_url(head.record.redis_url) as valkey:
            node = PlacedNode(GROUP, "id", Pool.PREFILL, phase)
            await PlacementBook(valkey, head.record.cluster, head.credentials).write(PlacementRecord(1, 1, {GROUP: node}))

    asyncio.run(write())


@pytest.fixture
def stages(head: Cluster, tmp_path: Path) -> Iterator[dict[psutil.Process, Path]]:
    """Their processes, each with the file of what it says, which it removes at a good end."""
    say(head, Phase.SERVING)
    token, join = new_token(head)
    started: dict[psutil.Process, Path] = {}
    try:
        for stage in range(STAGES):
            output = tmp_path / f"stage-{stage}"
            output.touch()
            settings = {"address": f"127.0.0.{2 + stage}", "drain_s": DRAIN_S, "prefill_node.threads": 1}
            order = NodeOrder("prefill", GROUP, "id", head.record.cluster, join, token, 600.0, settings, stage, STAGES)
            command = [sys.executable, "-P", "-m", "deploy.ray.node", str(output)]
            said = json.dumps(order.as_json()).encode()
            child = subprocess.run(command, input=said, stdout=subprocess.PIPE, check=True, env=own_environment())
            started[psutil.Process(int(child.stdout))] = output
        head.wait_until(lambda: GROUP in head.ready_instances(), "the group")
        yield started
    finally:
        for process in started:
            if process.is_running():
                process.kill()  # its own end with it


def leaves(output: Path) -> bool:
    return not output.exists() or f"{GROUP} leaves: it is wanted no more" in output.read_text()


def test_a_group_that_is_sent_away_ends_what_it_has_with_all_its_stages(
    head: Cluster, stages: dict[psutil.Process, Path], reference: Reference
) -> None:
    prompts = [random_prompt(seed, PROMPT_TOKENS, 10, 250) for seed in range(NUM_REQUESTS)]
    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        answers = [threads.submit(generate, head.grpc_address, head.model, prompt, OUTPUT_TOKENS) for prompt in prompts]
        head.wait_until(
            lambda: any(one.running + one.waiting == NUM_REQUESTS for one in head.status().instances if one.instance.instance_id == GROUP),
            "the group to have all of them",
        )
        say(head, Phase.LEAVING)
        wait_until(lambda: all(map(leaves, stages.values())), "both stages to know", more=head.logs)
        assert not answers[-1].done(), "it still has work"
        assert [len(answer.result().token_ids) for answer in answers] == [OUTPUT_TOKENS] * NUM_REQUESTS
    assert answers[-1].result().token_ids == reference.greedy(prompts[-1], OUTPUT_TOKENS)
    psutil.wait_procs(list(stages))
    assert not any(output.exists() for output in stages.values()), "each has ended as it should"
