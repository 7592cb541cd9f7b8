"""One run of the processes of this machine: started, watched, shown, and stopped in order when the command is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import setproctitle

from deploy.local import rundir
from deploy.local.children import Child, StartFailed
from deploy.local.display import Display
from deploy.local.logs import LogFollower, last_lines
from deploy.local.plan import ClusterPaths, ProcessSpec, client_host
from deploy.local.readiness import ReadinessProbe
from deploy.local.rundir import LONGEST_SOCKET_NAME, ClusterRecord, RunDir
from deploy.local.supervisor import Supervisor
from springtide.config import ClusterConfig, write_config
from springtide.errors import ConfigError
from springtide.modelinfo import ModelInfo
from springtide.process import raise_file_limit
from springtide.supervision import end, first_of, supervised

LOG_POLL_S = 0.2
WRITE_AGAIN_S = 1.0
Work: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Machine:
    """What is to run here, of a cluster that may be here alone."""

    config: ClusterConfig
    info: ModelInfo
    paths: ClusterPaths
    processes: Sequence[ProcessSpec]
    temporary: bool
    """The run directory is ours to remove."""
    beside: Mapping[str, Work] = field(default_factory=dict)
    """What this process does itself meanwhile, by names."""
    while_wanted: Work | None = None
    """Returns once the machine is to leave, of which no signal says so."""
    serves_requests: bool = True
    """There is a gateway here, and as many nodes as it takes to answer: the machine is ready when that says so."""
    ca_dir: Path | None = None
    join_address: str = ""

    @property
    def served_model_name(self) -> str:
        return self.config.served_model_name or self.info.name

    def record(self, url: str) -> ClusterRecord:
        config, server = self.config, self.config.server
        return ClusterRecord(
            pid=os.getpid(),
            created=psutil.Process().create_time(),
            url=url,
            grpc_address=f"{client_host(server.host)}:{server.grpc_port}",
            redis_url=str(config.redis_url),
            cluster=config.cluster,
            cluster_secret=config.cluster_secret.get_secret_value() if config.cluster_secret is not None else "",
            run_dir=str(self.paths.run_dir),
            temporary=self.temporary,
            ready=False,
            processes={},
            tls={name: str(path) for name in ("certificate", "key", "ca") if (path := getattr(config.tls, name)) is not None},
            ca_dir="" if self.ca_dir is None else str(self.ca_dir),
            join_address=self.join_address,
        )


@contextlib.contextmanager
def own_run_dir(title: str, wanted: Path | None, longest_socket: str = LONGEST_SOCKET_NAME) -> Iterator[RunDir]:
    """The run directory of this process, which is called `title` from here on: claimed as RunDir.claim says, released at the end, of which
    SIGTERM is one. Raises ConfigError."""
    setproctitle.setproctitle(title)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the event loop takes over: from here on there is something to remove
    rundir.sweep()
    run_dir = RunDir.claim(wanted, longest_socket)
    try:
        yield run_dir
    finally:
        run_dir.release()


class Session:
    """Lives in the main thread's event loop. `greeting(record, seconds until ready)` is said when everything is ready."""

    def __init__(self, machine: Machine, display: Display, verbose: bool, greeting: Callable[[ClusterRecord, float], str]) -> None:
        self._machine = machine
        self._display = display
        self._verbose = verbose
        self._greeting = greeting
        self._stop = asyncio.Event()
        self._signalled = False
        self._changed = asyncio.Event()
        self._followers: dict[str, LogFollower] = {}
        self._supervisor = Supervisor(machine.paths.log, self._on_change, machine.config.drain_s)
        self._probe = ReadinessProbe(machine.config)
        self._record = machine.record(self._probe.url)
        self._recorded = True
        """The record is in its file as it is."""

    async def run(self) -> int:
        """Until SIGTERM or SIGINT, or it is wanted no more. Returns the exit code."""
        raise_file_limit()  # the head has a connection of each machine to Valkey, and whoever reaches the join port may open some
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._on_signal)
        try:
            async with contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(self._probe)
                for name, work in self._machine.beside.items():
                    await stack.enter_async_context(_background(work, name))
                if (while_wanted := self._machine.while_wanted) is not None:
                    await stack.enter_async_context(_background(partial(self._leave_after, while_wanted), "see whether it is wanted"))
                await stack.enter_async_context(self._supervisor)
                await stack.enter_async_context(_background(self._follow_logs, "follow logs"))
                await stack.enter_async_context(_background(self._keep_recorded, "keep recorded"))
                await first_of(self._serve(), self._stop.wait())
        except StartFailed as failure:
            self._display.message(f"springtide could not start: {failure}. The end of its log:\n{last_lines(failure.log)}")
            return 1
        assert self._stop.is_set(), "serving ends by an exception only"
        self._display.message("stopped")
        return 0

    def _on_signal(self) -> None:
        """Whoever sends a second one wants no more patience; one that comes when the machine leaves by itself is no second one."""
        if self._signalled:
            self._supervisor.kill()
        self._signalled = True
        self._leave()

    async def _leave_after(self, while_wanted: Work) -> None:
        await while_wanted()
        self._leave()

    def _leave(self) -> None:
        """Begins to, unless that has begun."""
        if not self._stop.is_set():
            drain_s = self._machine.config.drain_s
            self._display.message(f"stopping; what runs has {drain_s:g} s to end" if drain_s else "stopping")
        self._stop.set()

    async def _serve(self) -> None:
        began = time.monotonic()
        machine = self._machine
        self._write_record()
        write_config(machine.config, machine.paths.config)
        machine.info.save(machine.paths.model_info)
        self._display.step("model", f"{machine.served_model_name}, {machine.info.architecture}, {machine.config.dtype}", done=True)
        self._supervisor.start(machine.processes)
        async with _background(lambda: self._supervisor.watch_readiness(self._probe), "watch readiness"):
            await first_of(self._supervisor.watch(), self._all_ready())
            self._record = replace(self._record, ready=True)
            self._write_record()
            self._display.end_of_start()
            self._display.message(self._greeting(self._record, time.monotonic() - began))
            await self._supervisor.watch()

    async def _all_ready(self) -> None:
        while not all(child.ready for child in self._supervisor.children):
            self._changed.clear()
            await self._changed.wait()
        if not self._machine.serves_requests:
            self._display.step("cluster", "every process is ready", done=True)
            return
        self._display.step("cluster", "every process is ready")
        await self._probe.wait_for_gateway()
        self._display.step("cluster", "takes requests", done=True)

    async def _follow_logs(self) -> None:
        while True:
            await asyncio.sleep(LOG_POLL_S)
            for line in await asyncio.to_thread(_new_lines, list(self._followers.values())):
                self._display.message(line)

    async def _keep_recorded(self) -> None:
        while True:
            await asyncio.sleep(WRITE_AGAIN_S)
            if not self._recorded:
                self._write_record()

    def _on_change(self, child: Child, change: str) -> None:
        self._changed.set()
        name = child.spec.name
        self._display.step(name, change, done=child.ready)
        if child.spec.role != "valkey" or self._verbose:  # its warnings are about the machine's settings
            self._followers.setdefault(name, LogFollower(child.log, self._verbose))
        self._write_record()

    def _write_record(self) -> None:
        pids = {child.spec.name: child.pid for child in self._supervisor.children if child.pid}
        self._record = replace(self._record, processes=pids)
        try:
            rundir.write_record(self._record)
        except (OSError, ConfigError) as error:
            # Others may not find the cluster, which runs as well without it.
            if self._recorded:
                self._display.message(f"what runs here cannot be recorded, which is tried again: {error}")
            self._recorded = False
        else:
            self._recorded = True


def _new_lines(followers: Sequence[LogFollower]) -> list[str]:
    return [line for follower in followers for line in follower.new_lines()]


@contextlib.asynccontextmanager
async def _background(work: Work, name: str) -> AsyncIterator[None]:
    task = supervised(work, name)
    try:
        yield
    finally:
        await end(task)
