"""Keeps the processes of one machine running, and takes them all down in order."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from deploy.local.children import Child
from deploy.local.plan import OTHERS_END_S, STOP_ORDER, ProcessSpec
from deploy.local.readiness import ReadinessProbe
from springtide.supervision import end

STOP_GRACE_S = 3.0
"""From SIGTERM for the first process to SIGKILL for whatever is left."""
STOP_STAGE_GRACE_S = 1.0
"""How long one stage may hold up the next."""
KILL_GRACE_S = 1.0
POLL_S = 0.1


class Supervisor:
    """Children are made by `start` and die with this object's context (or with the process, by the kernel's hand).

    Use it in the main thread's event loop only, see Child. `on_change(child, what happened)` is told of every start, death and readiness.
    """

    def __init__(self, log_path: Callable[[str], Path], on_change: Callable[[Child, str], None], drain_s: float = 0.0) -> None:
        self._log_path = log_path
        self._drain_s = drain_s
        self._on_change = on_change
        self._tasks: list[asyncio.Task[None]] = []
        self.children: list[Child] = []

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.shut_down()

    def start(self, specs: Sequence[ProcessSpec]) -> None:
        for spec in specs:
            child = Child(spec, self._log_path(spec.name), self._on_change)
            self.children.append(child)
            self._tasks.append(asyncio.create_task(child.keep_running(), name=f"keep {spec.name} running"))

    async def watch(self) -> None:
        """Never returns. Raises StartFailed when a process cannot be made to run."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def watch_readiness(self, probe: ReadinessProbe) -> None:
        """Marks children ready as they become so, for ever; asks nothing while all are."""
        while True:
            waiting = [(child.spec, child.pid) for child in self.children if not child.ready and child.pid]
            if waiting:
                self._mark(await probe.ready(waiting), {spec.name: pid for spec, pid in waiting})
            await asyncio.sleep(POLL_S)

    def _mark(self, ready: set[str], asked_about: dict[str, int]) -> None:
        for child in self.children:
            if child.spec.name in ready and child.pid == asked_about[child.spec.name]:
                child.mark_ready()

    async def shut_down(self) -> None:
        """SIGTERM stage by stage, SIGKILL for what is left after the grace. Who ends what it has first is waited for. Idempotent."""
        deadline = time.monotonic() + STOP_GRACE_S
        for roles in STOP_ORDER:
            stage = [child for child in self.children if child.spec.role in roles]
            for child in stage:
                child.stop()
            drain_s = self._drain_s if any(child.spec.drains for child in stage) else 0.0
            drain_s += max((OTHERS_END_S.get(child.spec.role, 0.0) for child in stage), default=0.0)
            if drain_s:
                began = time.monotonic()
                await _all_ended(stage, drain_s + STOP_STAGE_GRACE_S)
                deadline += time.monotonic() - began
            else:
                await _all_ended(stage, min(STOP_STAGE_GRACE_S, deadline - time.monotonic()))
        await _all_ended(self.children, deadline - time.monotonic())
        self.kill()
        await _all_ended(self.children, KILL_GRACE_S)
        await end(*self._tasks)

    def kill(self) -> None:
        """Ends every child at once, without ceremony."""
        for child in self.children:
            child.stop()
            child.signal(signal.SIGKILL)


async def _all_ended(children: Sequence[Child], timeout_s: float) -> None:
    waits = [asyncio.create_task(child.ended()) for child in children]
    if waits:
        _, pending = await asyncio.wait(waits, timeout=max(0.0, timeout_s))
        for wait in pending:
            wait.cancel()
