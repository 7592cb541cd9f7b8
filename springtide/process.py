"""What every Springtide process does at its start: a title that names its role, logs, death together with its parent, orderly SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import setproctitle
import uvloop

from springtide.config import SECRET_VARIABLE, ClusterConfig, load_config
from springtide.errors import ConfigError, SpringtideError, UnsupportedModel
from springtide.metrics import show_build, watch_event_loop
from springtide.modelinfo import ModelInfo
from springtide.supervision import first_of
from springtide.telemetry import setup_logging

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
FLUSH_S = 1.0
_BEAT_S = 1.0
_MOST_FILES = 1 << 20


@dataclass(frozen=True, slots=True)
class ProcessArguments:
    """The command line that all processes of a cluster have in common."""

    config: ClusterConfig
    model_info: ModelInfo
    run_dir: Path
    node_id: str
    instance_id: str
    bind_host: str
    metrics_port: int = 0
    """Of this process's metrics, at `bind_host`; 0 takes a free one."""
    stage: int = 0
    """Of a prefill group whose stages are on nodes of their own: which one is here."""
    beat_file: Path | None = None
    """Touched every second for as long as the event loop turns."""
    prefills: bool = False
    """An engine that decodes prefills for all, too."""

    @property
    def store_socket(self) -> Path:
        """The node's store serves gRPC to its engine here."""
        return self.run_dir / f"{self.node_id}.store.sock"

    @property
    def arena_socket(self) -> Path:
        """The node's store hands out its arena's file descriptor here."""
        return self.run_dir / f"{self.node_id}.arena.sock"


def stage_id(group: str, stage: int) -> str:
    """The id of a stage's processes. The first one's are the group's."""
    return f"{group}.stage-{stage}" if stage else group


def parse_arguments(description: str) -> ProcessArguments:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (YAML)")
    parser.add_argument("--model-info", type=Path, required=True, help="JSON of springtide.modelinfo.ModelInfo")
    parser.add_argument("--run-dir", type=Path, required=True, help="sockets of this machine's processes")
    parser.add_argument("--node-id", default="", help="whose store and arena")
    parser.add_argument("--instance-id", default="", help="this process's own id; default: the node's")
    parser.add_argument("--bind-host", default="127.0.0.1", help="address to serve on and to be reached at")
    parser.add_argument("--metrics-port", type=int, default=0, help="port of this process's metrics; default: a free one")
    parser.add_argument("--stage", type=int, default=0, help="which stage of a prefill group over several nodes is here")
    parser.add_argument("--prefills", action="store_true", help="an engine that decodes prefills for all, too")
    parser.add_argument("--beat-file", type=Path, help="a file to touch every second, by which others see that this process does not hang")
    arguments = parser.parse_args()
    return ProcessArguments(
        config=load_config(arguments.config, environ={name: os.environ[name] for name in (SECRET_VARIABLE,) if name in os.environ}),
        model_info=ModelInfo.load(arguments.model_info),
        run_dir=arguments.run_dir,
        node_id=arguments.node_id,
        instance_id=arguments.instance_id or arguments.node_id,
        bind_host=arguments.bind_host,
        metrics_port=arguments.metrics_port,
        stage=arguments.stage,
        beat_file=arguments.beat_file,
        prefills=arguments.prefills,
    )


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """What a process imports within is there to its end: the garbage collector looks through it neither now, which would take a fifth of
    the time of a start with torch, nor later, in the middle of a step."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run(role: str, arguments: ProcessArguments, main: Callable[[asyncio.Event], Awaitable[None]]) -> NoReturn:
    """Runs `main(stop)` in a uvloop until it returns; SIGTERM and SIGINT set `stop`. Does not return: the process ends with 0, or with 1,
    logged, when `main` raises."""
    setproctitle.setproctitle(f"springtide {role} {arguments.instance_id}".rstrip())
    setup_logging(arguments.instance_id or role, arguments.config.log.level, arguments.config.log.format)
    die_with_parent()
    raise_file_limit()
    show_build(role)
    if arguments.beat_file is not None:
        arguments.beat_file.touch()
    code = 1
    try:
        uvloop.run(_until_signalled(main, arguments.beat_file))
        code = 0
    except* (ConfigError, UnsupportedModel) as group:
        for mistake in _leaves(group):
            logger.error("%s", mistake)
    except* Exception:
        logger.exception("%s has failed", role)
    end_process(code)


def end_process(code: int = 1) -> NoReturn:
    """Ends the process at once, from any thread. Tearing the interpreter down with torch in it takes most of a second of processor time,
    and frees nothing that the kernel would not. With an error, whoever started the process starts it afresh."""
    within(FLUSH_S, logging.shutdown)
    os._exit(code)


def within(seconds: float, work: Callable[[], object]) -> None:
    """Returns then at the latest. Who writes to a log waits for other writers, one of which may hang."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)


def raise_file_limit() -> int:
    """Lets this process have as many files open as the system allows it, and returns how many those are. The limit that a shell sets by
    default is for programs that cannot deal with numbers above it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def start_python(
    module: str, *arguments: str, stdin: int = subprocess.DEVNULL, stdout: int | None = None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts `python -m module`, a process that calls `die_with_parent`: it ends when the calling thread does, at the latest. Returns when
    it has come to its program, which may take milliseconds. Raises OSError.

    Not asyncio's subprocesses: uvloop forks, and amid the threads of gRPC what is forked may never come to its program.
    """
    command = (sys.executable, "-P", "-m", module, *arguments)
    environment = {**os.environ, "SPRINGTIDE_PARENT_PID": str(os.getpid())}
    return subprocess.Popen(command, stdin=stdin, stdout=stdout, pass_fds=pass_fds, env=environment)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it ends; exits at once when that has already happened."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    expected = os.environ.get("SPRINGTIDE_PARENT_PID")
    if expected is not None and int(expected) != parent:
        sys.exit(1)


def _leaves(group: BaseExceptionGroup[SpringtideError]) -> Iterator[SpringtideError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


async def _until_signalled(main: Callable[[asyncio.Event], Awaitable[None]], beat_file: Path | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await first_of(main(stop), watch_event_loop(), *([] if beat_file is None else [_beat(beat_file)]))


async def _beat(file: Path) -> None:
    """Goes on for ever."""
    while True:
        os.utime(file)
        await asyncio.sleep(_BEAT_S)
