"""The processes of a group's stages, as its engine process starts, loads and ends them."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

import grpc.aio

from prefill_node.stage.process import stage_socket
from springtide.config import write_config
from springtide.errors import PeerLost
from springtide.process import ProcessArguments
from springtide.protocol.stages import LoadLayers
from springtide.protocol.wire import LOAD_LAYERS
from springtide.rpc import channels, stage_pb2_grpc
from springtide.supervision import first_of

logger = logging.getLogger(__name__)

STOP_GRACE_S = 3.0


class StageProcess:
    """One further stage of a group. At most one process at a time. `number` counts from the group's first stage, which has none."""

    def __init__(self, arguments: ProcessArguments, number: int) -> None:
        self.number = number
        self.stage_id = f"{arguments.instance_id}.stage-{number}"
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None
        self._loaded: asyncio.subprocess.Process | None = None
        """The process that had its layers when it was last asked: perhaps one that has ended."""
        self._channel: grpc.aio.Channel | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def loaded(self) -> bool:
        """It runs, and has its layers."""
        return self.running and self._loaded is self._process

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.running else None

    @property
    def stub(self) -> stage_pb2_grpc.PrefillStageStub:
        assert self._channel is not None, "it has not been started"
        return stage_pb2_grpc.PrefillStageStub(self._channel)

    async def start(self) -> None:
        """Starts the process, without waiting until it serves. The process is forked on the calling thread, whose end would end it."""
        await self.close()
        stage_socket(self._arguments.run_dir, self.stage_id).unlink(missing_ok=True)
        self._process = await asyncio.create_subprocess_exec(
            *self._command(),
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, "SPRINGTIDE_PARENT_PID": str(os.getpid())},
        )
        # A Unix socket in the run directory, which is this user's alone.
        self._channel = channels.connect(f"unix:{stage_socket(self._arguments.run_dir, self.stage_id)}")
        logger.info("stage %d is process %d", self.number, self._process.pid)

    async def load(self, layers: range) -> None:
        """Returns when it has loaded its layers: at once when it has. Raises PeerLost when it ends before."""
        process = self._process
        assert process is not None
        order = LOAD_LAYERS.encode(LoadLayers(layers.start, layers.stop))
        try:
            ended: object = await first_of(process.wait(), self.stub.Load(order, wait_for_ready=True))
        except grpc.aio.AioRpcError as error:
            raise PeerLost(f"stage {self.number} could not load its layers: {error.details()}") from error
        if isinstance(ended, int):
            raise PeerLost(f"stage {self.number} ended with {ended} while it was loading")
        self._loaded = process

    async def kill(self) -> None:
        """Returns when it has ended: nothing of it writes anywhere any more."""
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()

    async def close(self) -> None:
        """Asks it to end, and sees to it. Idempotent."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close(None)
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(STOP_GRACE_S):
                    await self._process.wait()
            except TimeoutError:
                await self.kill()
        self._process = None

    def _command(self) -> list[str]:
        """The command line, with what this process was told, resolved, as files: whoever started it may have had none."""
        arguments = self._arguments
        config, info = (_beside(arguments.run_dir, self.stage_id, suffix) for suffix in ("yaml", "json"))
        write_config(arguments.config, config)
        arguments.model_info.save(info)
        return [
            *(sys.executable, "-P", "-m", "prefill_node.stage"),
            *("--config", str(config), "--model-info", str(info), "--run-dir", str(arguments.run_dir)),
            *("--node-id", arguments.node_id, "--instance-id", self.stage_id, "--bind-host", arguments.bind_host),
        ]


def _beside(run_dir: Path, stage_id: str, suffix: str) -> Path:
    return run_dir / f"{stage_id}.{suffix}"
