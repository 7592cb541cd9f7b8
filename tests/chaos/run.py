"""One run: a calm reference, then rounds of faults, each with a calm point at its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence, Set
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from tests.chaos.checks import differing
from tests.chaos.client import Clients
from tests.chaos.cluster import ClusterUnderTest
from tests.chaos.history import Aftermath, Answer, Exchange, History, Limits
from tests.chaos.injectors import Nemesis, mount_disk, wake
from tests.chaos.observe import Observer
from tests.chaos.plan import Round, plan
from tests.chaos.reference import calm_answers, nudged
from tests.chaos.shapes import MODEL, SSD_BYTES, Shape
from tests.chaos.workload import Item, catalogue, flood
from tests.support.models import make_tiny_llama


class Run:
    """`directory` takes the model, the logs and the sockets, and is left for the caller to remove."""

    def __init__(self, seed: int, shape: Shape, minutes: float, directory: Path, limits: Limits, say: Callable[[str], None]) -> None:
        self._seed = seed
        self._shape = shape
        self._directory = directory
        self._say = say
        self._items = catalogue(seed)
        self._rounds = plan(seed, shape.targets, minutes)
        self._limits = limits
        self._floods = 0
        self._flooding: set[asyncio.Task[Exchange]] = set()
        self._began_at = 0.0

    async def execute(self) -> History:
        """Raises what shows that this suite itself is at fault; the cluster's faults are in the history."""
        model = make_tiny_llama(self._directory / "model", **MODEL)
        history = History(self._shape.topology, self._limits, self._items, await self._reference(model))
        shared_memory = set(os.listdir("/dev/shm"))
        cluster = ClusterUnderTest(self._shape, model, self._directory / "chaos", self._disk())
        with cluster:
            self._began_at = time.monotonic()
            self._say(f"{self._shape.name}: {len(self._rounds)} rounds of {self._rounds[0].lasts_s:.0f} s, logs in {cluster.logs}")
            clients = Clients(cluster.urls, self._clock, self._limits.end_s)
            observer = Observer(cluster, self._clock)
            nemesis = Nemesis(cluster, self._clock, lambda size: self._flood(clients, cluster, size), self._ssd_dir)
            try:
                async with _background(observer.watch(), observer.watch_own_stalls()):
                    for one in self._rounds:
                        if not await self._round(one, cluster, clients, nemesis, observer, history):
                            break
            finally:
                with contextlib.suppress(psutil.Error, AssertionError):
                    wake(cluster.everything().values())
                await clients.close()
                observer.close()
            history.exchanges, history.injections, history.samples = clients.exchanges, nemesis.injections, observer.samples
            history.own_stalls = observer.own_stalls
            history.aftermath = await asyncio.to_thread(_stop, cluster, shared_memory)
        history.nudged = await self._nudged(model, {exchange.item.key for exchange, _ in differing(history)})
        return history

    def _clock(self) -> float:
        return time.monotonic() - self._began_at

    @property
    def _ssd_dir(self) -> Path | None:
        return self._directory / "ssd" if self._shape.ssd else None

    def _disk(self) -> Path | None:
        if self._ssd_dir is not None:
            self._ssd_dir.mkdir()
            mount_disk(self._ssd_dir, SSD_BYTES * len(self._shape.targets.disks))
        return self._ssd_dir

    async def _reference(self, model: Path) -> dict[str, Answer]:
        began_at = time.monotonic()
        answers = await self._calm(model, "calm", self._items)
        self._say(f"reference: {len(answers)} answers of a calm cluster in {time.monotonic() - began_at:.0f} s")
        return answers

    async def _nudged(self, model: Path, keys: Set[str]) -> dict[str, tuple[Answer, ...]]:
        """By item: whether rounding decides is asked only of those that were answered otherwise than by the reference."""
        if not keys:
            return {}
        self._say(f"{len(keys)} requests were answered otherwise than by the reference: does rounding decide?")
        items = tuple(item for item in self._items if item.key in keys)
        models = {f"nudged-{sign:+d}": nudged(model, self._directory / f"model{sign:+d}", sign) for sign in (1, -1)}
        answers = [await self._calm(other, name, items) for name, other in models.items()]
        return {key: tuple(one[key] for one in answers) for key in keys}

    async def _calm(self, model: Path, name: str, items: Sequence[Item]) -> dict[str, Answer]:
        """The answers of a calm cluster, which has this directory."""
        with ClusterUnderTest(self._shape.calm, model, self._directory / name) as cluster:
            clients = Clients(cluster.urls, time.monotonic, self._limits.end_s)
            try:
                return await calm_answers(clients, "gateway-0", items)
            finally:
                await clients.close()

    async def _round(
        self, one: Round, cluster: ClusterUnderTest, clients: Clients, nemesis: Nemesis, observer: Observer, history: History
    ) -> bool:
        """False: the cluster is no more."""
        over = asyncio.Event()
        seed = self._seed * 1000 + one.number
        running = [asyncio.create_task(clients.run(f"client-{n}", seed, n, self._items, over)) for n in range(self._shape.clients)]
        begins_at = time.monotonic()
        began_s = self._clock()
        faults = []
        for fault in one.faults:
            await asyncio.sleep(begins_at + fault.at_s - time.monotonic())
            if not cluster.alive:
                break
            faults.append(asyncio.create_task(nemesis.inject(fault)))
        await asyncio.gather(*faults)
        await asyncio.sleep(begins_at + one.lasts_s - time.monotonic() if cluster.alive else 0.0)
        over.set()
        history.rounds.append((began_s, self._clock()))
        await asyncio.gather(*running, *self._flooding)
        self._flooding.clear()
        if not cluster.alive:
            history.died = f"springtide up ended by itself in round {one.number}"
            return False
        point = await observer.calm_point(ssd=self._shape.ssd and one is self._rounds[-1])
        history.calm_points.append(point)
        self._say(f"round {one.number + 1}: {len(one.faults)} faults, {len(clients.exchanges)} requests so far, {len(point.leaks)} leaks")
        return True

    def _flood(self, clients: Clients, cluster: ClusterUnderTest, size: int) -> None:
        self._floods += 1
        items: tuple[Item, ...] = flood(self._seed, self._floods, size)
        gateways = sorted(cluster.urls)
        for index, item in enumerate(items):
            sending = clients.send("flood", gateways[index % len(gateways)], item)
            self._flooding.add(asyncio.create_task(sending))


@asynccontextmanager
async def _background(*coroutines: object) -> AsyncIterator[None]:
    """Raises what one of them failed with."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]  # type: ignore[call-overload]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


def _stop(cluster: ClusterUnderTest, shared_memory: set[str]) -> Aftermath:
    """Of a cluster that idles."""
    problem: str | None = None
    with contextlib.suppress(psutil.Error, AssertionError):
        cluster.note_processes()
    try:
        cluster.stop()
    except subprocess.TimeoutExpired as error:
        problem = f"springtide up did not stop within {error.timeout:g} s of SIGTERM"
    left = tuple(" ".join(process.cmdline()) for process in cluster.left_over())
    return Aftermath(left, tuple(sorted(set(os.listdir("/dev/shm")) - shared_memory)), problem)
