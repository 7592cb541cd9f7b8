"""One supervised process: started with its log, watched until it ends, started again as its RestartPolicy says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deploy.local import exec_child
from deploy.local.plan import ProcessSpec
from deploy.local.restarts import GiveUp, Restart, RestartPolicy, describe_exit


class StartFailed(Exception):
    """A process never became ready; the message says which and why."""

    def __init__(self, name: str, reason: str, log: Path) -> None:
        super().__init__(f"{name} {reason}")
        self.log = log


def dies_with_us(command: Sequence[str]) -> tuple[str, ...]:
    """The command that runs `command` such that the kernel kills it when this process dies, however that happens."""
    return (sys.executable, "-I", "-S", exec_child.__file__, str(os.getpid()), *command)


class Child:
    """A child of the supervisor. It owns at most one operating system process at a time."""

    def __init__(self, spec: ProcessSpec, log: Path, on_change: Callable[[Child, str], None]) -> None:
        self.spec = spec
        self.log = log
        self.ready = False
        self.ready_after_s = 0.0
        self._on_change = on_change
        self._policy = RestartPolicy()
        self._process: asyncio.subprocess.Process | None = None
        self._started_at = 0.0
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The id of the running process, if there is one."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def mark_ready(self) -> None:
        self.ready = True
        self.ready_after_s = time.monotonic() - self._started_at
        self._policy.became_ready()
        self._on_change(self, f"ready after {self.ready_after_s:.1f} s")

    async def keep_running(self) -> None:
        """Returns once `stop` was called and the process has ended. Raises StartFailed."""
        try:
            while not self._stopping.is_set():
                how = await self._run()
                self.ready = False
                if not self._stopping.is_set():
                    await self._after_exit(how)
        finally:
            self._ended.set()

    def stop(self) -> None:
        """Asks the process to end, and starts no other."""
        self._stopping.set()
        self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def ended(self) -> None:
        await self._ended.wait()

    async def _run(self) -> str:
        """Returns how the process has ended, once it has."""
        try:
            process = await self._start()
        except OSError as error:  # the machine may have no room just now for a process, or for its log
            return f"could not be started ({error})"
        if self._stopping.is_set():  # it was asked to while the process was being made
            self.signal(signal.SIGKILL)
        return describe_exit(await process.wait())

    async def _start(self) -> asyncio.subprocess.Process:
        """The process is forked on the calling thread, the main one: the kernel kills children when the thread that made them ends."""
        environment = {**os.environ, **self.spec.environment, "SPRINGTIDE_PARENT_PID": str(os.getpid())}
        self._started_at = time.monotonic()
        self._policy.started(self._started_at)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *dies_with_us(self.spec.command),
                stdin=asyncio.subprocess.PIPE if self.spec.stdin else asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal is for the supervisor, which stops the others in order
            )
        if self._process.stdin is not None:
            self._process.stdin.write(self.spec.stdin)
            self._process.stdin.close()
        self._on_change(self, "starting")
        return self._process

    async def _after_exit(self, how: str) -> None:
        match self._policy.exited(how, time.monotonic()):
            case GiveUp(reason):
                raise StartFailed(self.spec.name, reason, self.log)
            case Restart(after_s):
                self._on_change(self, f"{how}; restarting")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(after_s):
                        await self._stopping.wait()
