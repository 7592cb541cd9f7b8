"""The processes of a cluster that is played, beside real ones: its Conductors as they are launched, and who plays nodes and gateways."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.driven import CHECKOUT
from benchmarks.drivers.select_springtide import MODEL
from benchmarks.fake_nodes import SECRET, Announced, Done
from benchmarks.live_cluster import BLOCK_TOKENS, LiveCluster
from springtide.credentials import Credentials
from springtide.membership import Member, Membership
from springtide.protocol.status import ClusterStatus

START_S = 240
CLUSTER = "springtide"
CREDENTIALS = Credentials(SECRET.encode(), CLUSTER)
_STOP_S = 30
_METRICS = re.compile(r"^springtide_conductor_(\w+) (\S+)$", re.MULTILINE)


@contextmanager
def running(module: str, arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """`python -m MODULE ARGUMENTS` until it is left."""
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=_STOP_S)


@contextmanager
def conductor(redis_url: str, name: str = "conductor-0", replicas: int = 1) -> Iterator[subprocess.Popen[str]]:
    """One of so many Conductors."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)
        MODEL.save(run_dir / "model.json")
        settings = {
            "redis_url": redis_url,
            "cluster": CLUSTER,
            "server": {"separate_gateway": True},
            "conductor": {"replicas": replicas},
            "kv": {"block_tokens": BLOCK_TOKENS},
            "cluster_secret": SECRET,
            "slo": {"ttft_ms": 1e9},
            # Those who play the nodes share the machine and may be held up: a row says how many reports were; no node is lost by it.
            "silence_s": 30.0,
            "log": {"level": "error"},
        }
        (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
        files = ["--config", run_dir / "config.yaml", "--model-info", run_dir / "model.json", "--run-dir", run_dir]
        with running("conductor", [*map(str, files), "--instance-id", name]) as process:
            yield process


class Nodes:
    """All engines and stores of the cluster, in one process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.announced = Announced(**self._line())

    def done(self) -> Done:
        """So far."""
        print(file=self.process.stdin, flush=True)
        return Done(**self._line())

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the nodes ended with {self.process.wait()}"
        said: dict[str, Any] = json.loads(line)
        return said


@contextmanager
def nodes(redis_url: str, live: LiveCluster, lengths: Sequence[int]) -> Iterator[Nodes]:
    """Those of the cluster, with prompts of these lengths in their stores, announced when they are entered."""
    with running("benchmarks.fake_nodes", [redis_url, CLUSTER, str(live.workers), str(live.live), *map(str, lengths)]) as process:
        yield Nodes(process)


@contextmanager
def gateways(redis_url: str, live: LiveCluster) -> Iterator[subprocess.Popen[str]]:
    """Those whose attempts the live ones are, in one process."""
    with running("benchmarks.fake_gateways", [redis_url, CLUSTER, str(live.workers), str(live.live)]) as process:
        yield process


async def announced(membership: Membership, process: subprocess.Popen[str]) -> Member:
    """The Conductor that runs in this process, as soon as it says so."""
    async with asyncio.timeout(START_S):
        while True:
            assert process.poll() is None, f"the Conductor ended with {process.returncode}"
            found = [member for member in await membership.members() or [] if member.pid == process.pid]
            if found:
                return found[0]
            await asyncio.sleep(0.1)


def knows_all(status: ClusterStatus, live: LiveCluster) -> bool:
    """Whether who says this could place a request at every instance, and knows all attempts that live, and no others."""
    return sum(instance.ready for instance in status.instances) == 2 * live.workers and status.attempts_live == live.live


def metrics_of(member: Member) -> Mapping[str, float]:
    """A Conductor's metrics without labels, by their names without prefix."""
    with urllib.request.urlopen(f"http://{member.metrics_address}/metrics") as page:
        return {name: float(value) for name, value in _METRICS.findall(page.read().decode())}


def processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
