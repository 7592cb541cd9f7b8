"""`springtide up`: brings a cluster up on this machine, keeps it up until it is told to stop, leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import setproctitle

from deploy.local import rundir
from deploy.local.children import Child, StartFailed
from deploy.local.display import Display
from deploy.local.logs import LogFollower, last_lines
from deploy.local.plan import ClusterPaths, check_redis, client_host, placed, processes, resolve
from deploy.local.readiness import ReadinessProbe
from deploy.local.rundir import ClusterRecord, RunDir
from deploy.local.supervisor import Supervisor
from engine.formats.files import describe
from springtide.capacity import check_memory, context_tokens, memory_bytes
from springtide.config import ClusterConfig, write_config
from springtide.modelinfo import ModelInfo
from springtide.supervision import first_of, supervised

LOG_POLL_S = 0.2
QUESTION = "Why is the sky blue?"


def run_up(config: ClusterConfig, display: Display, *, verbose: bool) -> int:
    """Runs a cluster in the foreground until SIGTERM or SIGINT; returns the exit code.

    Raises ConfigError or UnsupportedModel before anything is started.
    """
    info = describe(config.model, config.max_context)
    check_memory(config.kv, config.prefill + config.decode, memory_bytes())
    context = context_tokens(config, info)
    if config.redis_url is not None:
        check_redis(config.redis_url)
    resolved = resolve(config)
    setproctitle.setproctitle("springtide supervisor")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the event loop takes over: from here on there is something to remove
    rundir.sweep()
    run_dir = RunDir.claim(config.run_dir)
    try:
        cluster = _Cluster(placed(resolved, run_dir.path), info, ClusterPaths(run_dir.path), config.redis_url is None, run_dir.temporary)
        with display:
            if context < info.context_length:
                display.message(
                    f"kv.arena_size: {config.kv.arena_size} bytes a node hold {context} tokens, fewer than the context of {info.name}, "
                    f"{info.context_length}: a prompt and its output may have {context} together"
                )
            return asyncio.run(_Session(cluster, display, verbose).run())
    finally:
        run_dir.release()


@dataclass(frozen=True, slots=True)
class _Cluster:
    config: ClusterConfig
    info: ModelInfo
    paths: ClusterPaths
    embedded_valkey: bool
    temporary: bool

    @property
    def served_model_name(self) -> str:
        return self.config.served_model_name or self.info.name

    def record(self, url: str) -> ClusterRecord:
        server = self.config.server
        return ClusterRecord(
            pid=os.getpid(),
            created=psutil.Process().create_time(),
            url=url,
            grpc_address=f"{client_host(server.host)}:{server.grpc_port}",
            redis_url=str(self.config.redis_url),
            cluster=self.config.cluster,
            cluster_secret=self.config.cluster_secret.get_secret_value() if self.config.cluster_secret is not None else "",
            run_dir=str(self.paths.run_dir),
            temporary=self.temporary,
            ready=False,
            processes={},
        )


class _Session:
    """One run of a cluster, in the main thread's event loop."""

    def __init__(self, cluster: _Cluster, display: Display, verbose: bool) -> None:
        self._cluster = cluster
        self._display = display
        self._verbose = verbose
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._followers: dict[str, LogFollower] = {}
        self._supervisor = Supervisor(cluster.paths.log, self._on_change)
        self._probe = ReadinessProbe(cluster.config)
        self._record = cluster.record(self._probe.url)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._on_signal)
        try:
            async with self._probe, self._supervisor, _background(self._follow_logs, "follow logs"):
                await first_of(self._serve(), self._stop.wait())
        except StartFailed as failure:
            self._display.message(f"springtide could not start: {failure}. The end of its log:\n{last_lines(failure.log)}")
            return 1
        assert self._stop.is_set(), "serving ends by an exception only"
        self._display.message("stopped")
        return 0

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._supervisor.kill()
        else:
            self._display.message("stopping")
        self._stop.set()

    async def _serve(self) -> None:
        began = time.monotonic()
        self._write_record()
        config, paths = self._cluster.config, self._cluster.paths
        write_config(config, paths.config)
        self._cluster.info.save(paths.model_info)
        self._display.step("model", f"{self._cluster.served_model_name}, {self._cluster.info.architecture}, {config.dtype}", done=True)
        self._supervisor.start(processes(config, paths, self._cluster.embedded_valkey))
        async with _background(lambda: self._supervisor.watch_readiness(self._probe), "watch readiness"):
            await first_of(self._supervisor.watch(), self._all_ready())
            self._record = replace(self._record, ready=True)
            self._write_record()
            self._display.end_of_start()
            self._greet(time.monotonic() - began)
            await self._supervisor.watch()

    async def _all_ready(self) -> None:
        while not all(child.ready for child in self._supervisor.children):
            self._changed.clear()
            await self._changed.wait()
        self._display.step("cluster", "every process is ready")
        await self._probe.wait_for_gateway()
        self._display.step("cluster", "takes requests", done=True)

    async def _follow_logs(self) -> None:
        while True:
            await asyncio.sleep(LOG_POLL_S)
            for follower in self._followers.values():
                for line in follower.new_lines():
                    self._display.message(line)

    def _on_change(self, child: Child, change: str) -> None:
        name = child.spec.name
        self._display.step(name, change, done=child.ready)
        if child.spec.role != "valkey" or self._verbose:  # its warnings are about the machine's settings
            self._followers.setdefault(name, LogFollower(child.log, self._verbose))
        self._write_record()
        self._changed.set()

    def _write_record(self) -> None:
        pids = {child.spec.name: child.pid for child in self._supervisor.children if child.pid}
        self._record = replace(self._record, processes=pids)
        rundir.write_record(self._record)

    def _greet(self, took_s: float) -> None:
        name, url = self._cluster.served_model_name, self._probe.url
        body = json.dumps({"model": name, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0})
        curl = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        chat = f"{_own_command()} chat --url {url} {shlex.quote(QUESTION)}"
        self._display.message(
            f"\nSpringtide serves {name} on {url} (ready after {took_s:.1f} s; gRPC on {self._record.grpc_address}; "
            f"logs in {self._cluster.paths.run_dir / 'logs'})\n\n  {curl}\n\n  {chat}\n\nCtrl-C stops it."
        )


def _own_command() -> str:
    """How the user can call this program again: by its name if that is on the PATH, else by the path of it."""
    program = Path(sys.argv[0])
    if program.name != "springtide":
        return f"{shlex.quote(sys.executable)} -m deploy.cli"
    found = shutil.which("springtide")
    if found is not None and Path(found).resolve() == program.resolve():
        return "springtide"
    with contextlib.suppress(ValueError):
        return shlex.quote(str(program.absolute().relative_to(Path.cwd())))
    return shlex.quote(str(program.absolute()))


@contextlib.asynccontextmanager
async def _background(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> AsyncIterator[None]:
    task = supervised(work, name)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
