"""Runs drivers (benchmarks/drivers) side by side, and measures them in turn."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil
from rich.console import Console

from benchmarks.drivers.protocol import end_group
from benchmarks.results import LIMIT, Row

CHECKOUT = Path(__file__).parents[1]
OURS = Path(sys.executable)
PEERS = CHECKOUT / ".venv-peers" / "bin" / "python"
PEERS_VLLM = CHECKOUT / ".venv-peers-vllm" / "bin" / "python"
ROUNDS = 9
WARM_UP = 0.2
"""Repetitions before those that count, as a share of them."""
BUSY_PERCENT = 15.0

console = Console()


class DriverFailed(Exception):
    """A driver could not be set up or broke; says why in its own words."""


@contextlib.contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """What is started in here runs on these cores, and so does this thread meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True, slots=True)
class Driver:
    """How to start one: `python -m benchmarks.drivers.MODULE ARGUMENTS` with `environment` added."""

    name: str
    """In tables."""
    module: str
    python: Path = PEERS
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    over_tcp: bool = False
    """Its bytes must be seen on the loopback interface."""
    pinned: bool = False
    """Kept to one core, with all its threads and children: the same core for whoever is."""


@dataclass(frozen=True, slots=True)
class Job:
    """`count` pieces of `size` bytes."""

    driver: Driver
    count: int
    size: int

    @property
    def num_bytes(self) -> int:
        return self.count * self.size


class Running:
    """A driver with its children. It is stopped (SIGSTOP) whenever it is not being measured: two cores are few, and some peers poll."""

    def __init__(self, job: Job) -> None:
        """Returns when it has moved the bytes once each way. Raises DriverFailed."""
        self.driver = driver = job.driver
        if not driver.python.exists():
            raise DriverFailed(f"{driver.python} is not there: `make peers` makes it")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `close`)
        cores = os.sched_getaffinity(0)
        with on_cores({max(cores)} if driver.pinned else cores):
            self._process = subprocess.Popen(
                [driver.python, "-m", f"benchmarks.drivers.{driver.module}", *driver.arguments, str(job.count), str(job.size)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                cwd=CHECKOUT,
                env={**os.environ, **driver.environment},
                start_new_session=True,
            )
        try:
            before = loopback_bytes()
            self._answer()
            if driver.over_tcp and loopback_bytes() - before < 2 * job.num_bytes:
                raise DriverFailed(
                    f"{driver.name} moved {2 * job.num_bytes} bytes, but not by TCP: they were not seen on the loopback interface"
                )
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def measure(self, operation: str, times: int) -> float:
        """Median seconds of `times` repetitions. Raises DriverFailed."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        warm_up = max(1, round(WARM_UP * times))
        with contextlib.suppress(BrokenPipeError):
            print(operation, warm_up + times, file=self._process.stdin, flush=True)
        durations: list[float] = self._answer()
        self._signal(signal.SIGSTOP)
        return statistics.median(durations[warm_up:])

    def memory_bytes(self) -> int:
        """The memory of the driver and its children now: what is theirs alone, and their share of what is not (PSS)."""
        driver = psutil.Process(self._process.pid)
        return sum(process.memory_full_info().pss for process in (driver, *driver.children(recursive=True)))

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        end_group(self._process)
        self._log.close()

    def _answer(self) -> list[float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"ended with {self._process.wait()}"}
        if isinstance(answer, dict) and "error" in answer:
            self._log.seek(0)
            raise DriverFailed(f"{self.driver.name}: {answer['error']}\n{self._log.read()[-1500:]}")
        return answer if isinstance(answer, list) else []

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class Bench:
    """Drivers set up side by side, each with its job. A peer that cannot be set up is left out, which is said; ours raises DriverFailed."""

    def __init__(self, ours: Sequence[Job], peers: Sequence[Job] = ()) -> None:
        self.left_out: list[str] = []
        """Why, in a line each."""
        self._running: dict[str, Running] = {}
        try:
            for job in ours:
                self._running[job.driver.name] = Running(job)
            for job in peers:
                self._try(job)
        except BaseException:
            self._close()
            raise

    def _try(self, peer: Job) -> None:
        try:
            self._running[peer.driver.name] = Running(peer)
        except DriverFailed as error:
            console.print(f"left out: {error}", style="red", markup=False)
            self.left_out.append(str(error).splitlines()[0])

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def _close(self) -> None:
        for running in self._running.values():
            running.close()

    def memory_bytes(self) -> dict[str, int]:
        """The memory of every driver that runs, as it is now."""
        return {name: running.memory_bytes() for name, running in self._running.items()}

    def rounds(self, operation: str, times: int, rounds: int = ROUNDS) -> dict[str, list[float]]:
        """Seconds of every driver that runs, round by round: the median of `times` repetitions each. Every other round is in the reverse
        order, so that nobody always comes after the same neighbour."""
        seconds: dict[str, list[float]] = {name: [] for name in self._running}
        for index in range(rounds):
            order = list(self._running.values())
            for running in order if index % 2 == 0 else reversed(order):
                seconds[running.driver.name].append(running.measure(operation, times))
        return seconds


@dataclass(frozen=True, slots=True)
class Scale:
    """How the figure that is shown follows from the seconds of one repetition."""

    unit: str
    per_second: float
    """Of a rate: the figure is this divided by the seconds. Zero: it is the seconds times `per_repetition`."""
    per_repetition: float = 0.0

    def figure(self, seconds: float) -> float:
        return self.per_second / seconds if self.per_second else seconds * self.per_repetition


def others_at_work() -> str:
    """A remark for the notes where this machine was not idle before the benchmark began: figures and, less so, ratios suffer from it."""
    busy = psutil.cpu_percent(1.0)
    if busy < BUSY_PERCENT:
        return ""
    remark = f"Others used {busy:.0f} % of the cores when this began."
    console.print(remark, style="red")
    return remark


def with_remarks(notes: str, left_out: Sequence[str], remark: str) -> str:
    return " ".join(filter(None, [notes, remark, *(f"Left out: {reason}." for reason in dict.fromkeys(left_out))]))


def loopback_bytes() -> int:
    """Received on the loopback interface since the machine's start, by everybody."""
    return int(Path("/sys/class/net/lo/statistics/rx_bytes").read_text())


def rate(num_bytes: int) -> Scale:
    return Scale("GB/s", num_bytes / 1e9)


def rate_of_tokens(count: int) -> Scale:
    return Scale("tokens/s", float(count))


def microseconds(pieces: int = 1) -> Scale:
    """The time of each of so many pieces of a repetition."""
    return Scale("us", 0.0, 1e6 / pieces)


def _spread(figures: Sequence[float]) -> tuple[float, float] | None:
    """The least and the greatest of several."""
    return (min(figures), max(figures)) if len(figures) > 1 else None


def compared(row: str, scale: Scale, ours: Sequence[float], peer: Sequence[float], peer_name: str, wanted: float | None) -> Row:
    """A row from the seconds of both, round by round; the ratio is the median of the rounds' own."""
    figures, theirs = ([scale.figure(seconds) for seconds in side] for side in (ours, peer))
    ratio = statistics.median(of_peer / mine for mine, of_peer in zip(ours, peer, strict=True))
    return Row(
        row=row,
        unit=scale.unit,
        ours=statistics.median(figures),
        spread=_spread(figures),
        peer=statistics.median(theirs),
        peer_name=peer_name,
        ratio=ratio,
        wanted=wanted,
        met=None if wanted is None else ratio >= wanted,
        peer_spread=_spread(theirs),
        rounds=len(ours),
    )


def within(row: str, unit: str, figures: Sequence[float], limit: float, limit_name: str = LIMIT, case: str = "") -> Row:
    """The median of `figures`, of which less is better, beside what it must not exceed."""
    median = statistics.median(figures)
    return Row(row, unit, median, _spread(figures), limit, limit_name, limit / median, 1.0, median <= limit, case, rounds=len(figures))


def plain(row: str, unit: str, figures: Sequence[float], case: str = "") -> Row:
    """The median of `figures`, compared with nothing."""
    return Row(row, unit, statistics.median(figures), _spread(figures), case=case, rounds=len(figures))
