"""Does what the plan says, and takes it back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import psutil
import redis

from tests.chaos.cluster import SUPERVISOR, ClusterUnderTest
from tests.chaos.history import Injection
from tests.chaos.isolation import isolated
from tests.chaos.plan import DUTY_CYCLE_S, Fault
from tests.support.moves import move

MOVE_AGAIN_S = 0.5
LOOK_AGAIN_S = 0.1
"""How often a cut looks for connections that were made since."""
_KERNELS_PREF = 20
"""Where the kernel's own rule for local addresses is put: those before it are ours."""
_ROOT_NEEDED = "needs root, or network namespaces of an unprivileged user"
MALFORMED: tuple[bytes, ...] = (
    b"",
    b"no JSON",
    b"[1, 2, 3]",
    b"{}",
    b'"store"',
    json.dumps({"role": "decode", "member_id": 5, "incarnation": 1, "address": "127.0.0.1:1"}).encode(),
    json.dumps({"role": "prefill", "member_id": "stranger", "incarnation": 1, "address": "127.0.0.1:1", "details": None}).encode(),
    json.dumps({"role": "store", "member_id": "stranger", "incarnation": "?", "address": None}).encode(),
    json.dumps({"role": "conductor", "member_id": "stranger", "incarnation": 1, "address": "nowhere", "details": {}}).encode(),
    b"\xff\xfe\x00",
    b"[" * 5000,
)
"""Records that no process of this cluster would write."""


Flow: TypeAlias = "tuple[int, int | None]"
"""What a process sends: from this port of its, to this one or to any."""


class NotInjected(Exception):
    """This machine, user or moment does not allow it; says why."""


class Nemesis:
    """`flood(size)` begins to send so many long prompts."""

    def __init__(self, cluster: ClusterUnderTest, clock: Callable[[], float], flood: Callable[[int], None], ssd_dir: Path | None) -> None:
        self._cluster = cluster
        self._clock = clock
        self._flood = flood
        self._ssd_dir = ssd_dir
        self._network_ready = False
        self._num_cuts = 0
        self.injections: list[Injection] = []

    async def inject(self, fault: Fault) -> None:
        """Returns when it has been taken back, however it is cancelled."""
        injection = Injection(fault, self._clock())
        self.injections.append(injection)
        try:
            await self._do(fault)
        except NotInjected as why:
            injection.not_injected = str(why)
        except psutil.NoSuchProcess:
            injection.not_injected = f"{fault.target} is down already"
        except redis.RedisError as error:
            injection.not_injected = f"Valkey does not answer: {error}"
        finally:
            injection.until_s = self._clock()

    async def _do(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                self._process(fault.target).kill()
            case "end":
                self._process(fault.target).terminate()
            case "stop":
                await self._stop(fault)
            case "slow":
                await self._slow(fault)
            case "suspend":
                await self._suspend(fault)
            case "cut":
                await self._cut(fault)
            case "reset":
                await self._reset(fault)
            case "narrow":
                await self._narrow(fault)
            case "disk full":
                await self._fill_disk(fault)
            case "flood":
                self._flood(fault.amount)
            case "move":
                await self._move(fault)
            case "pause" | "flush" | "malformed record":
                await self._break_valkey(fault)

    # ---- processes ----

    def _process(self, name: str) -> psutil.Process:
        process = self._cluster.process(name)
        if process is None:
            raise NotInjected(f"{name} is down already")
        return process

    async def _stop(self, fault: Fault) -> None:
        process = self._process(fault.target)
        process.suspend()
        try:
            await asyncio.sleep(fault.for_s)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                if fault.then_kill:
                    process.kill()
                process.resume()

    async def _slow(self, fault: Fault) -> None:
        """Runs for `amount` per cent of the time."""
        process = self._process(fault.target)
        until, run_s = time.monotonic() + fault.for_s, DUTY_CYCLE_S * fault.amount / 100
        with contextlib.suppress(psutil.NoSuchProcess):
            try:
                while time.monotonic() < until:
                    process.suspend()
                    await asyncio.sleep(DUTY_CYCLE_S - run_s)
                    process.resume()
                    await asyncio.sleep(run_s)
            finally:
                process.resume()

    async def _suspend(self, fault: Fault) -> None:
        """Everything, as when a machine sleeps or a virtual one is moved: clocks go on meanwhile."""
        everything = self._cluster.everything()
        stopped = [everything.pop(SUPERVISOR), *everything.values()]
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        try:
            await asyncio.sleep(fault.for_s)
        finally:
            for process in reversed(stopped):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    # ---- orders ----

    async def _move(self, fault: Fault) -> None:
        """Has so many of the target's sequences go on elsewhere, again and again: no fault, but what is to go well under any."""
        until, told = time.monotonic() + fault.for_s, 0
        while time.monotonic() < until:
            with contextlib.suppress(redis.RedisError):
                told += await asyncio.to_thread(move, self._cluster.up, fault.target, fault.amount)
            await asyncio.sleep(MOVE_AGAIN_S)
        if not told:
            raise NotInjected(f"nothing that could move ran at {fault.target}")

    # ---- the network ----

    async def _cut(self, fault: Fault) -> None:
        """Nothing that the target sends arrives, without a word to either side."""
        self._prepare_network()
        # A place of its own among the rules: what another fault cuts at the same time stays cut when this ends, and the other way round.
        self._num_cuts += 1
        pref = 1 + self._num_cuts % (_KERNELS_PREF - 1)
        cut: set[Flow] = set()
        until = time.monotonic() + fault.for_s
        try:
            while time.monotonic() < until:
                new = _flows(self._cluster.processes(fault.target).values()) - cut
                _ip(_rule("add", pref, flow) for flow in new)
                cut |= new
                await asyncio.sleep(LOOK_AGAIN_S)
        finally:
            _ip(_rule("del", pref, flow) for flow in cut)

    async def _reset(self, fault: Fault) -> None:
        """Every connection of the target breaks at once; new ones can be made."""
        if not isolated():
            raise NotInjected(_ROOT_NEEDED)
        for local, remote in _flows(self._cluster.processes(fault.target).values()):
            ways = (("sport", "dport"), ("dport", "sport"))
            filters = [f"( {here} = :{local}" + (f" and {there} = :{remote} )" if remote else " )") for here, there in ways]
            await asyncio.to_thread(_run, "ss", "-K", " or ".join(filters))

    async def _narrow(self, fault: Fault) -> None:
        if not isolated():
            raise NotInjected(_ROOT_NEEDED)
        try:
            _run("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", f"{fault.amount}mbit", "burst", "256kb", "latency", "200ms")
        except subprocess.CalledProcessError as error:
            raise NotInjected(f"the kernel has no token bucket: {error.stderr.decode().strip()}") from None
        try:
            await asyncio.sleep(fault.for_s)
        finally:
            _run("tc", "qdisc", "del", "dev", "lo", "root")

    def _prepare_network(self) -> None:
        """Rules of ours have to come before the kernel's own for local addresses."""
        if not isolated():
            raise NotInjected(_ROOT_NEEDED)
        if not self._network_ready:
            _ip([("rule", "add", "pref", str(_KERNELS_PREF), "lookup", "local"), ("rule", "del", "pref", "0")])
            self._network_ready = True

    # ---- disks ----

    async def _fill_disk(self, fault: Fault) -> None:
        if self._ssd_dir is None or not isolated():
            raise NotInjected(_ROOT_NEEDED)
        ballast = self._ssd_dir / "ballast"
        try:
            await asyncio.to_thread(_fill, ballast)
            await asyncio.sleep(fault.for_s)
        finally:
            ballast.unlink(missing_ok=True)

    # ---- Valkey ----

    async def _break_valkey(self, fault: Fault) -> None:
        record = self._cluster.up.record
        with redis.Redis.from_url(record.redis_url, socket_timeout=2, socket_connect_timeout=2) as valkey:
            if fault.kind == "flush":
                await asyncio.to_thread(valkey.flushall)
            elif fault.kind == "pause":
                await asyncio.to_thread(valkey.client_pause, round(fault.for_s * 1000))
                await asyncio.sleep(fault.for_s)
            else:
                key = f"{record.cluster}:member:stranger:{fault.amount}"
                value = MALFORMED[fault.amount % len(MALFORMED)]
                await asyncio.to_thread(valkey.set, key, value, px=round(fault.for_s * 1000))
                await asyncio.sleep(fault.for_s)


def _flows(processes: Iterable[psutil.Process]) -> set[Flow]:
    """What they listen on, and the connections that they have made: one of somebody else's to another port may have the same port here."""
    flows: set[Flow] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            connections = [each for each in process.net_connections(kind="tcp") if each.laddr]
            listening = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
            flows |= {(port, None) for port in listening}
            flows |= {(each.laddr.port, each.raddr.port) for each in connections if each.raddr and each.laddr.port not in listening}
    return flows


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def _rule(verb: str, pref: int, flow: Flow) -> Sequence[str]:
    local, remote = flow
    to = () if remote is None else ("dport", str(remote))
    return ("rule", verb, "pref", str(pref), "ipproto", "tcp", "sport", str(local), *to, "blackhole")


def _ip(commands: Iterable[Sequence[str]]) -> None:
    """All in one process; what is there already, or no more, is passed over."""
    script = "".join(f"{' '.join(command)}\n" for command in commands)
    if script:
        subprocess.run(("ip", "-force", "-batch", "-"), input=script.encode(), capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True)


def mount_disk(path: Path, size_bytes: int) -> bool:
    """A disk of its own, small enough to be filled. False: this run has no mounts of its own, `path` stays a plain directory."""
    if isolated():
        _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path))
    return isolated()


def wake(processes: Iterable[psutil.Process]) -> None:
    """Whatever still stands after an interrupted run."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)
