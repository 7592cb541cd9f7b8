"""A prefill group whose stages are machines of their own, networks apart: cut off from the rest, and mended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from springtide.protocol.status import InstanceStatus
from tests.support.cluster import members_of, status_of
from tests.support.generate import generate
from tests.support.hosts import HEAD_NAME, Hosts, Running, wait_until, with_settings
from tests.support.netns import Unavailable
from tests.support.reference import Reference, random_prompt

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(os.geteuid() != 0, reason="wants root, for namespaces"), pytest.mark.timeout(420)]

MODEL, GROUP = "stages", "long"
MBIT_PER_S, DELAY_MS = 200.0, 1.0
JOIN_PORT, GRPC_PORT = 8002, 8001
STAGES = ("first", "second")
OUTPUT_TOKENS = 16


@dataclass
class Group:
    hosts: Hosts
    head: Running
    stages: list[Running]

    def logs(self) -> str:
        return "\n".join(running.logs() for running in (self.head, *self.stages))

    def status(self) -> InstanceStatus | None:
        """What the Conductor says of it, if it knows it."""
        record = self.head.record
        try:
            status = status_of(members_of(record.redis_url, record.cluster, record.credentials), record.credentials)
        except (grpc.RpcError, AssertionError):
            return None
        return next((each for each in status.instances if each.instance.instance_id == GROUP), None)

    def is_ready(self) -> bool:
        return (status := self.status()) is not None and status.ready

    def works(self) -> bool:
        return (status := self.status()) is not None and status.running > 0

    def ask(self, prompt: list[int]) -> list[int]:
        return generate(f"{self.head.host.address}:{GRPC_PORT}", MODEL, prompt, OUTPUT_TOKENS).token_ids


@pytest.fixture(scope="module")
def group(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    try:
        hosts = Hosts(("head", *STAGES), tmp_path_factory.mktemp("hosts"), MBIT_PER_S, DELAY_MS)
    except Unavailable as why:
        pytest.skip(str(why))
    try:
        yield started(hosts, model)
    finally:
        hosts.close()


def started(hosts: Hosts, model: Path) -> Group:
    given = with_settings(model, MODEL, {"prefill_node.chunk_tokens": 64})
    place = ("--address", hosts.head.address, "--host", "0.0.0.0", "--prefill", "0", "--decode", "1")
    head = Running(hosts.head, "head", "up", *place, *given)
    head.start()
    head.wait_ready()
    token = str(json.loads(hosts.head.run("token", "create", "--json"))["token"])
    stages = []
    for number, name in enumerate(STAGES):
        place = ("--group", GROUP, "--stage", f"{number}/{len(STAGES)}", "--set", "prefill_node.threads=1")
        stage = Running(hosts.hosts[name], "stage", "node", "prefill", "--join", f"{HEAD_NAME}:{JOIN_PORT}", *place)
        stage.start("--token", token)
        stages.append(stage)
    group = Group(hosts, head, stages)
    for stage in stages:
        stage.wait_ready()
    wait_until(group.is_ready, "the Conductor to know the group", group.logs)
    return group


@pytest.mark.parametrize(("seed", "name", "how"), [(10, "second", "cut"), (20, "second", "swallow"), (30, "first", "swallow")])
def test_a_group_without_the_network_of_one_of_its_stages_is_gone_and_forms_again(
    group: Group, reference: Reference, seed: int, name: str, how: str
) -> None:
    """What it was computing, and what comes meanwhile, is answered when it is back."""
    before, under_way, meanwhile = (random_prompt(seed + number, 1500, 10, 250) for number in range(3))
    assert group.ask(before) == reference.greedy(before, OUTPUT_TOKENS)
    network = group.hosts.hosts[name].network
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(group.ask, under_way)
        wait_until(group.works, "the group to compute it", group.logs)
        getattr(network, how)()
        try:
            wait_until(lambda: not group.is_ready(), "the Conductor to miss the group", group.logs)
            second = threads.submit(group.ask, meanwhile)
            assert not first.done()
        finally:
            network.mend()
        assert first.result() == reference.greedy(under_way, OUTPUT_TOKENS)
        assert second.result() == reference.greedy(meanwhile, OUTPUT_TOKENS)
    wait_until(group.is_ready, "the group to be there again", group.logs)
