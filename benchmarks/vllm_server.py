"""`vllm serve` on the CPU, as processes that benchmarks start, stop and hold still."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from benchmarks.check_vllm import TCMALLOC, TCMALLOC_PACKAGE
from benchmarks.checkpoint import CACHE
from benchmarks.driven import CHECKOUT, PEERS_VLLM, DriverFailed, console
from benchmarks.drivers.protocol import end_group

START_TIMEOUT_S = 300.0
"""The first start compiles the model."""
POLL_S = 0.2
RESET_TIMEOUT_S = 10.0
OPENMP = PEERS_VLLM.parents[1] / "lib" / "libiomp5.so"
MOST_SEQUENCES = 128
"""vLLM's own default on a CPU. It takes no chunk of fewer tokens than it may have sequences."""
BYTES_OF_A_SERVER = 6 << 30
"""Memory that has to be free before a further one is started."""


def environment(cpus: Sequence[int], kv_bytes: int) -> dict[str, str]:
    """The variables of vLLM, however it is started: so much memory for keys and values, a thread on each of these cores, and the
    libraries that it wants preloaded."""
    return {
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(filter(None, (find_library(TCMALLOC), str(OPENMP)))),
        "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_bytes >> 30),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_NO_USAGE_STATS": "1",
    }


def preloaded() -> str:
    """What `environment` has preloaded, for the notes; says on the console what is missing."""
    if find_library(TCMALLOC) is not None:
        return "tcmalloc and Intel's OpenMP library preloaded"
    console.print(f"tcmalloc, which vLLM wants, is not there; on Debian and Ubuntu: apt-get install {TCMALLOC_PACKAGE}", style="red")
    return "Intel's OpenMP library preloaded, tcmalloc not (it is not installed)"


class VllmServer:
    """`with VllmServer(directory, environment(…)) as server:` – it answers at `url` when entered, and runs only within `at_work`."""

    def __init__(self, directory: Path, variables: Mapping[str, str], options: Sequence[str] = ()) -> None:
        """`options`: of `vllm serve`, beside those that every benchmark wants."""
        self._directory, self._variables, self._options = directory, variables, options
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `__exit__`)
        self._scratch = tempfile.TemporaryDirectory()
        """For its sockets, which it does not remove."""
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> VllmServer:
        """Raises DriverFailed, with what it said last."""
        if not PEERS_VLLM.exists():
            raise DriverFailed(f"{PEERS_VLLM} is not there: `make peers` makes it")
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [
                *(str(PEERS_VLLM), "-m", "vllm.entrypoints.cli.main", "serve", str(self._directory)),
                *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "8192"),
                *self._options,
            ],
            stdout=self._log,
            stderr=self._log,
            text=True,
            cwd=CHECKOUT,
            # Its mode for developers changes nothing but that it has a call that empties the prefix cache.
            env={**os.environ, **self._variables, "TMPDIR": self._scratch.name, "VLLM_SERVER_DEV_MODE": "1"},
            start_new_session=True,
        )
        try:
            self._wait()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process is not None
        self._signal(signal.SIGCONT)
        self._process.terminate()
        end_group(self._process)
        _clear_openmp()
        self._log.close()
        self._scratch.cleanup()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[str]:
        """Its URL, with nothing in its prefix cache."""
        self._signal(signal.SIGCONT)
        try:
            self._reset()
            yield self.url
        finally:
            self._signal(signal.SIGSTOP)

    def _reset(self) -> None:
        """It refuses for a moment after its last request."""
        deadline = time.monotonic() + RESET_TIMEOUT_S
        while not httpx.post(f"{self.url}/reset_prefix_cache", timeout=RESET_TIMEOUT_S).raise_for_status().json()["success"]:
            if time.monotonic() > deadline:
                raise DriverFailed("vLLM does not empty its prefix cache")
            time.sleep(POLL_S)

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise DriverFailed(f"vllm serve did not start:\n{self._log.read()[-1500:]}")
            time.sleep(POLL_S)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).is_success
        except httpx.HTTPError:
            return False

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What differs between the servers of a sweep."""

    chunk_tokens: int
    """`--max-num-batched-tokens`: the new tokens of a step, those of decode included."""
    threads: int
    """That compute, each on a core of its own; a core beyond them is left to the scheduler and the HTTP server."""

    @property
    def options(self) -> tuple[str, ...]:
        most_sequences = min(MOST_SEQUENCES, self.chunk_tokens)
        return ("--max-num-batched-tokens", str(self.chunk_tokens), "--max-num-seqs", str(most_sequences))


class VllmServers:
    """Servers with several settings, of which at most one is at work at a time. To start one takes a minute, so they stay, stopped, until
    `keep` drops them or memory is short."""

    def __init__(self, directory: Path, cpus: Sequence[int], kv_bytes: int) -> None:
        self._directory, self._cpus, self._kv_bytes = directory, cpus, kv_bytes
        self._started: dict[ServerSettings, VllmServer] = {}
        """Whoever was asked for last comes last."""

    def __enter__(self) -> VllmServers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.keep(())

    def get(self, settings: ServerSettings) -> VllmServer:
        """Raises DriverFailed when it does not start."""
        server = self._started.pop(settings, None) or self._start(settings)
        self._started[settings] = server
        return server

    def keep(self, wanted: Collection[ServerSettings]) -> None:
        """Ends all others."""
        for settings in self._started.keys() - set(wanted):
            self._started.pop(settings).__exit__(None, None, None)

    def _start(self, settings: ServerSettings) -> VllmServer:
        while self._started and psutil.virtual_memory().available < BYTES_OF_A_SERVER:
            self._started.pop(next(iter(self._started))).__exit__(None, None, None)
        console.print(f"vLLM starts: chunks of {settings.chunk_tokens} tokens, {settings.threads} threads")
        variables = environment(self._cpus[: settings.threads], self._kv_bytes)
        return VllmServer(self._directory, variables, settings.options).__enter__()


def _clear_openmp() -> None:
    """Removes what Intel's OpenMP library leaves behind of each process that is ended by a signal: a file
    `__KMP_REGISTERED_LIB_<pid>_<user>`."""
    for registered in Path("/dev/shm").glob("__KMP_REGISTERED_LIB_*_*"):
        with contextlib.suppress(OSError):
            if registered.stat().st_uid == os.getuid() and not psutil.pid_exists(int(registered.name.split("_")[-2])):
                registered.unlink()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
