"""The processes of a group's stages, as its engine process starts, loads and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio

from prefill_node.stage.process import stage_socket
from springtide.config import write_config
from springtide.errors import PeerLost
from springtide.process import ProcessArguments, stage_id, start_python
from springtide.protocol.stages import LoadLayers
from springtide.protocol.wire import LOAD_LAYERS
from springtide.rpc import channels, stage_pb2_grpc
from springtide.supervision import first_of

logger = logging.getLogger(__name__)

STOP_GRACE_S = 3.0


class Stage(ABC):
    """One further stage of a group, as its engine process deals with it. `number` counts from the group's first stage."""

    def __init__(self, arguments: ProcessArguments, number: int) -> None:
        self.number = number
        self.stage_id = stage_id(arguments.instance_id, number)

    @property
    @abstractmethod
    def stub(self) -> stage_pb2_grpc.PrefillStageStub:
        """Of the process that has its layers."""

    @abstractmethod
    async def start(self) -> None:
        """Begins what takes a while until it serves. Raises OSError."""

    @abstractmethod
    async def have(self, layers: range) -> None:
        """Returns when it runs and has its layers: at once when it does. Raises OSError, PeerLost."""

    @abstractmethod
    async def kill(self) -> None:
        """Ends what it is at; when this returns it is in no formation any more."""

    @abstractmethod
    async def close(self) -> None:
        """Lets go of it. Idempotent."""


class StageProcess(Stage):
    """A stage on the engine's own node. At most one process at a time."""

    def __init__(self, arguments: ProcessArguments, number: int) -> None:
        super().__init__(arguments, number)
        self._arguments = arguments
        self._process: _Process | None = None
        self._loaded: _Process | None = None
        """The process that had its layers when it was last asked: perhaps one that has ended."""
        self._channel: grpc.aio.Channel | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.runs

    @property
    def loaded(self) -> bool:
        """It runs, and has its layers."""
        return self.running and self._loaded is self._process

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.runs else None

    @property
    def stub(self) -> stage_pb2_grpc.PrefillStageStub:
        assert self._channel is not None, "it has not been started"
        return stage_pb2_grpc.PrefillStageStub(self._channel)

    async def start(self) -> None:
        """Starts the process, without waiting until it serves. Raises OSError."""
        await self.close()
        stage_socket(self._arguments.run_dir, self.stage_id).unlink(missing_ok=True)
        self._process = _Process(*self._command())
        pid = await self._process.started()
        # A Unix socket in the run directory, which is this user's alone.
        self._channel = channels.connect(f"unix:{stage_socket(self._arguments.run_dir, self.stage_id)}")
        logger.info("stage %d is process %d", self.number, pid)

    async def have(self, layers: range) -> None:
        """A stage may run and not have its layers: whoever had it started was cancelled while it loaded."""
        if self.loaded:
            return
        if not self.running:
            await self.start()
        await self.load(layers)

    async def load(self, layers: range) -> None:
        """Returns when it has loaded its layers: at once when it has. Raises PeerLost when it ends before."""
        process = self._process
        assert process is not None
        order = LOAD_LAYERS.encode(LoadLayers(layers.start, layers.stop, self._arguments.config.prefill_node.stages))
        try:
            ended: object = await first_of(process.ended(), self.stub.Load(order, wait_for_ready=True))
        except grpc.aio.AioRpcError as error:
            raise PeerLost(f"stage {self.number} could not load its layers: {error.details()}") from error
        if isinstance(ended, int):
            raise PeerLost(f"stage {self.number} ended with {ended} while it was loading")
        self._loaded = process

    async def kill(self) -> None:
        """Returns when it has ended: nothing of it writes anywhere any more."""
        if self._process is not None:
            await self._process.send(signal.SIGKILL)
            await self._process.ended()

    async def close(self) -> None:
        """Asks it to end, and sees to it. Idempotent."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close(None)
        if self._process is None:
            return
        await self._process.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await self._process.ended()
        except TimeoutError:
            await self.kill()
        self._process = None

    def _command(self) -> list[str]:
        """The module and its arguments, with what this process was told, resolved, as files: whoever started it may have had none."""
        arguments = self._arguments
        config, info = (_beside(arguments.run_dir, self.stage_id, suffix) for suffix in ("yaml", "json"))
        write_config(arguments.config, config)
        arguments.model_info.save(info)
        return [
            "prefill_node.stage",
            *("--config", str(config), "--model-info", str(info), "--run-dir", str(arguments.run_dir)),
            *("--node-id", arguments.node_id, "--instance-id", self.stage_id, "--bind-host", arguments.bind_host),
        ]


class _Process:
    """A process, of Python, which a thread starts and waits for: that thread's end would end it."""

    def __init__(self, *command: str) -> None:
        """`command` is the module and its arguments."""
        self._command = command
        self._loop = asyncio.get_running_loop()
        self._process: asyncio.Future[subprocess.Popen[bytes]] = self._loop.create_future()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._run, name=f"process of {command[0]}", daemon=True).start()

    @property
    def runs(self) -> bool:
        return not self._ended.done()

    @property
    def pid(self) -> int | None:
        """None: it is still being started."""
        return self._process.result().pid if self._process.done() else None

    async def started(self) -> int:
        """Its id. Raises OSError."""
        return (await asyncio.shield(self._process)).pid

    async def ended(self) -> int:
        """What it has returned, once it has; 127 where it could not be started."""
        return await asyncio.shield(self._ended)

    async def send(self, number: signal.Signals) -> None:
        """Has no effect on one that has ended, or could not be started."""
        with contextlib.suppress(OSError):
            process = await asyncio.shield(self._process)
            if self.runs:
                process.send_signal(number)

    def _run(self) -> None:
        try:
            process = start_python(*self._command)
        except OSError as error:
            self._tell(self._ended.set_result, 127)
            self._tell(self._process.set_exception, error)
            return
        self._tell(self._process.set_result, process)
        self._tell(self._ended.set_result, process.wait())

    def _tell(self, tell: Callable[[Any], None], what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is over
            self._loop.call_soon_threadsafe(tell, what)


def _beside(run_dir: Path, stage_id: str, suffix: str) -> Path:
    return run_dir / f"{stage_id}.{suffix}"
