"""A cluster that Ray places becomes one of another version under load, as docs/ray.md has it: head, Ray, nodes, and who has joined."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from deploy.local import rundir
from springtide import __version__
from springtide.config import TlsConfig
from tests.support.balancer import Balancer
from tests.support.clients import WORKERS, Load, Questions
from tests.support.cluster import Cluster, metrics_page
from tests.support.installation import Installation, another_version, this_installation
from tests.support.joined import JoinedNode
from tests.support.ports import ReservedPorts
from tests.support.ray_nodes import RayMachines, all_serve, cluster_on, placed_nodes, placement_of
from tests.support.reference import Reference

pytest.importorskip("ray")

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1200)]
PATIENCE_S = 200.0
NEXT = "77.0.0"
MODEL = "placed"
ASKED = [(seed, 60) for seed in range(12)]
PAUSE_S = 0.5
"""Of each client. What is started meanwhile is to have most of the machine."""
ROLES = ["decode", "decode", "prefill", "prefill"]
"""Of the nodes: one of each role more than the work needs."""
CPUS = 4
"""Of each Ray node, which has room for all."""
JOINED = {"127.0.0.11": "conductor", "127.0.0.12": "gateway", "127.0.0.13": "gateway"}
"""Machines of their own, by their addresses."""
_VERSION = re.compile(r'^springtide_build_info\{.*version="([^"]*)".*\} 1', re.MULTILINE)


@dataclass
class World:
    cluster: Cluster
    machines: RayMachines
    ports: ReservedPorts
    """Of gateways on machines of their own: HTTP and gRPC of each."""
    scratch: Path
    stack: ExitStack
    joined: dict[str, JoinedNode] = field(default_factory=dict)
    """By their addresses."""

    @property
    def gateways(self) -> list[str]:
        return [f"127.0.0.1:{number}" for number in self.ports.numbers[::2]]

    def join(self, address: str, installation: Installation) -> None:
        """Until it is ready; with all that it has been there before."""
        options = ["--run-dir", str(self.scratch / address)]
        if JOINED[address] == "gateway":
            port = 2 * [each for each, role in JOINED.items() if role == "gateway"].index(address)
            for name, number in zip(("port", "grpc_port"), self.ports.numbers[port : port + 2], strict=True):
                options += ["--set", f"server.{name}={number}"]
        node = JoinedNode(self.cluster, JOINED[address], address, *options, installation=installation)
        self.joined[address] = self.stack.enter_context(node)

    def wait_whole(self, placer: int | None = None) -> None:
        """Until all nodes are there and serve, and a placer knows that; `placer`: another than this process."""

        def whole() -> bool:
            record, ready = placement_of(self.cluster), self.cluster.ready_instances()
            roles = sorted(name.partition("-")[0] for name in ready)
            return record.placer_pid != placer and all_serve(record) and record.nodes.keys() == ready and roles == ROLES

        self.cluster.wait_until(whole, "all nodes to be there", PATIENCE_S)

    @property
    def agents(self) -> int:
        return sum(node.agents for node in self.machines.nodes)

    def versions(self) -> dict[str, str]:
        """What each process says it is, by its role and id."""
        tls = TlsConfig.model_validate(self.cluster.record.tls)
        pages = {f"{each.role} {each.member_id}": metrics_page(each.metrics_address, tls) for each in self.cluster.members()}
        return {name: " and ".join(_VERSION.findall(page)) for name, page in pages.items()}


@pytest.fixture(scope="module")
def next_version(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return another_version(tmp_path_factory.mktemp("next") / "environment", NEXT)


@pytest.fixture(scope="module")
def world(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    scratch = tmp_path_factory.mktemp("run")
    with RayMachines() as machines, ExitStack() as stack:
        machines.start_head().wait_started()
        for _ in range(2):
            machines.add(CPUS).wait_started()
        own, others = ReservedPorts(2, machines.host), ReservedPorts(4)
        stack.callback(own.release)
        stack.callback(others.release)
        join_port, valkey_port = own.numbers
        settings = {
            "model": str(model),
            "served_model_name": MODEL,
            "dtype": "float32",
            "kv": {"block_tokens": 16, "arena_size": "64MiB", "transports": ["tcp"]},
            "prefill": 2,
            "decode": 2,
            "join_port": join_port,
            "valkey_port": valkey_port,
            "run_dir": str(scratch / "head"),
            # Who leads goes on deciding for so long while Valkey, which is the head's, is started anew.
            "conductor": {"admission": "baseline", "leader_lease_s": 10.0},
        }
        one_thread = {"prefill": {"cpus": 1}, "decode": {"cpus": 1}}
        cluster = stack.enter_context(cluster_on(machines, PATIENCE_S, one_thread, **settings))
        with ExitStack() as joined:
            world = World(cluster, machines, others, scratch, joined)
            for address in JOINED:
                world.join(address, this_installation())
            world.wait_whole()
            yield world


def upgrade_head(world: World, installation: Installation) -> None:
    before, placer = placed_nodes(), placement_of(world.cluster).placer_pid
    world.cluster.kill_all()
    world.cluster.start(installation)
    world.wait_whole(placer)
    assert placed_nodes() == before, "the nodes have served on"


def upgrade_ray(world: World, installation: Installation) -> None:
    before = placed_nodes()
    for node in world.machines.nodes[1:]:
        node.stop()
        world.machines.add(CPUS, installation=installation).wait_started()
        world.cluster.wait_until(lambda: world.agents == len(ROLES), "all nodes to have agents", PATIENCE_S)
        world.wait_whole()
    assert placed_nodes() == before, "the nodes have served on"


def upgrade_nodes(world: World) -> None:
    for name, pid in placed_nodes().items():
        command = next(record.pid for record in rundir.running_clusters() if record.processes.get(name) == pid)
        os.kill(command, signal.SIGTERM)
        world.cluster.wait_until(lambda command=command: not psutil.pid_exists(command), f"{name} to leave", PATIENCE_S)
        world.wait_whole()


def upgrade_joined(world: World, installation: Installation, balancer: Balancer) -> None:
    for address in JOINED:
        node = world.joined[address]
        node.terminate()
        assert node.process.wait(PATIENCE_S) == 0, node.logs()
        world.join(address, installation)
        world.cluster.wait_until(lambda: len(balancer.ready) == 2, "the balancer to see both gateways", PATIENCE_S)


def test_a_cluster_on_ray_becomes_one_of_another_version_under_load_and_no_request_is_lost(
    world: World, next_version: Installation, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(world.versions()) == 2 * len(ROLES) + len(JOINED) + 2
    assert set(world.versions().values()) == {__version__}
    questions = Questions(MODEL)
    questions.learn(world.joined["127.0.0.12"].record.grpc_address, reference, ASKED)
    took_s: dict[str, float] = {}
    with Balancer(world.gateways) as balancer:
        world.cluster.wait_until(lambda: len(balancer.ready) == 2, "the balancer to see both gateways")
        with Load(questions, [f"{balancer.url}/v1"], logs=world.cluster.logs, pause_s=PAUSE_S) as load:
            load.wait_answered(4 * WORKERS)
            began = calm_until = time.monotonic()
            for what, step in (
                ("head", lambda: upgrade_head(world, next_version)),
                ("Ray", lambda: upgrade_ray(world, next_version)),
                ("nodes", lambda: upgrade_nodes(world)),
                ("joined", lambda: upgrade_joined(world, next_version, balancer)),
            ):
                step()
                load.wait_answered(WORKERS)
                took_s[what], began = time.monotonic() - began, time.monotonic()
    with capsys.disabled():
        took = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in took_s.items())
        print(f"\nbefore:  {load.summary(until=calm_until)}\nupgrade: {load.summary(since=calm_until)}\n({took})")
    load.check()
    said = world.versions()
    assert len(said) == 2 * len(ROLES) + len(JOINED) + 2
    assert set(said.values()) == {NEXT}, said
