"""One `vllm serve` on the CPU, as a process that benchmarks start, stop and hold still."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from benchmarks.checkpoint import CACHE
from benchmarks.driven import CHECKOUT, PEERS_VLLM, DriverFailed
from benchmarks.drivers.protocol import end_group

START_TIMEOUT_S = 300.0
"""With its first compilation of the model."""
POLL_S = 0.2
OPENMP = PEERS_VLLM.parents[1] / "lib" / "libiomp5.so"


def environment(cpus: Sequence[int], kv_bytes: int) -> dict[str, str]:
    """Of vLLM, however it is started: so much memory for keys and values, a thread on each of these cores."""
    return {
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": str(OPENMP),
        "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_bytes >> 30),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_NO_USAGE_STATS": "1",
    }


class VllmServer:
    """`with VllmServer(directory, environment(…)) as server:` – it answers at `url` when entered, and runs only within `at_work`."""

    def __init__(self, directory: Path, variables: Mapping[str, str]) -> None:
        self._directory, self._variables = directory, variables
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
            ],
            stdout=self._log,
            stderr=self._log,
            text=True,
            cwd=CHECKOUT,
            env={**os.environ, **self._variables, "TMPDIR": self._scratch.name},
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
        """Its URL."""
        self._signal(signal.SIGCONT)
        try:
            yield self.url
        finally:
            self._signal(signal.SIGSTOP)

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


def _clear_openmp() -> None:
    """Intel's OpenMP library leaves a file behind in each process that is ended by a signal: `__KMP_REGISTERED_LIB_<pid>_<user>`."""
    for registered in Path("/dev/shm").glob("__KMP_REGISTERED_LIB_*_*"):
        with contextlib.suppress(OSError):
            if registered.stat().st_uid == os.getuid() and not psutil.pid_exists(int(registered.name.split("_")[-2])):
                registered.unlink()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
