"""What every Springtide process does at its start: a title that names its role, logs, death together with its parent, orderly SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import setproctitle
import uvloop

from springtide.config import ClusterConfig, load_config
from springtide.modelinfo import ModelInfo
from springtide.telemetry import setup_logging

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ProcessArguments:
    """The command line that all processes of a cluster have in common."""

    config: ClusterConfig
    model_info: ModelInfo
    run_dir: Path
    node_id: str
    instance_id: str
    bind_host: str

    @property
    def store_socket(self) -> Path:
        """The node's store serves gRPC to its engine here."""
        return self.run_dir / f"{self.node_id}.store.sock"

    @property
    def arena_socket(self) -> Path:
        """The node's store hands out its arena's file descriptor here."""
        return self.run_dir / f"{self.node_id}.arena.sock"


def parse_arguments(description: str) -> ProcessArguments:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (YAML)")
    parser.add_argument("--model-info", type=Path, required=True, help="JSON of springtide.modelinfo.ModelInfo")
    parser.add_argument("--run-dir", type=Path, required=True, help="sockets of this machine's processes")
    parser.add_argument("--node-id", default="", help="whose store and arena")
    parser.add_argument("--instance-id", default="", help="this process's own id; default: the node's")
    parser.add_argument("--bind-host", default="127.0.0.1", help="address to serve on and to be reached at")
    arguments = parser.parse_args()
    return ProcessArguments(
        config=load_config(arguments.config, environ={}),
        model_info=ModelInfo.load(arguments.model_info),
        run_dir=arguments.run_dir,
        node_id=arguments.node_id,
        instance_id=arguments.instance_id or arguments.node_id,
        bind_host=arguments.bind_host,
    )


def run(role: str, arguments: ProcessArguments, main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Runs `main(stop)` in a uvloop until it returns; SIGTERM and SIGINT set `stop`. Exits with 1, logged, when it raises."""
    setproctitle.setproctitle(f"springtide {role} {arguments.instance_id}".rstrip())
    setup_logging(arguments.instance_id or role, arguments.config.log.level, arguments.config.log.format)
    die_with_parent()
    uvloop.run(_until_signalled(main))


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it ends; exits at once when that has already happened."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    expected = os.environ.get("SPRINGTIDE_PARENT_PID")
    if expected is not None and int(expected) != parent:
        sys.exit(1)


async def _until_signalled(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await main(stop)
