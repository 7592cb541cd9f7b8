"""Faults are done to real processes, and taken back; what cannot be done here is said, not passed over."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.chaos import injectors, isolation
from tests.chaos.__main__ import main as chaos
from tests.chaos.cluster import SUPERVISOR
from tests.chaos.history import Injection
from tests.chaos.injectors import Nemesis
from tests.chaos.plan import Fault
from tests.support.waiting import until

WAIT_S = 10.0


class Sleepers:
    """As much of a cluster as the nemesis of processes needs."""

    def __init__(self, *names: str) -> None:
        self._children = {name: subprocess.Popen(("sleep", "600")) for name in (SUPERVISOR, *names)}

    def everything(self) -> dict[str, psutil.Process]:
        return {name: psutil.Process(child.pid) for name, child in self._children.items()}

    def processes(self, name: str | None = None) -> dict[str, psutil.Process]:
        return {known: process for known, process in self.everything().items() if known == name}

    def process(self, name: str) -> psutil.Process | None:
        return self.everything().get(name)

    def ended(self, name: str) -> int:
        return -self._children[name].wait(WAIT_S)

    def close(self) -> None:
        for child in self._children.values():
            child.kill()
            child.wait()


@pytest.fixture
def cluster() -> Iterator[Sleepers]:
    sleepers = Sleepers("decode-0", "decode-0-store")
    yield sleepers
    sleepers.close()


def nemesis_of(cluster: Any, flood: Callable[[int], None] = lambda size: None) -> Nemesis:
    return Nemesis(cluster, time.monotonic, flood, None)


async def injected(cluster: Sleepers, fault: Fault) -> Injection:
    nemesis = nemesis_of(cluster)
    await nemesis.inject(fault)
    (injection,) = nemesis.injections
    return injection


def stands(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


@pytest.mark.parametrize(("kind", "number"), [("kill", 9), ("end", 15)])
async def test_processes_are_killed_and_ended(cluster: Sleepers, kind: Any, number: int) -> None:
    injection = await injected(cluster, Fault(0.0, kind, "decode-0"))
    assert injection.not_injected is None
    assert cluster.ended("decode-0") == number


@pytest.mark.parametrize(
    "fault", [Fault(0.0, "stop", "decode-0", 0.2), Fault(0.0, "slow", "decode-0", 0.3, amount=10)], ids=["stop", "slow"]
)
async def test_who_was_stopped_goes_on(cluster: Sleepers, fault: Fault) -> None:
    process = cluster.everything()["decode-0"]
    injecting = asyncio.create_task(injected(cluster, fault))
    await until(lambda: stands(process))
    injection = await injecting
    assert injection.interval[1] - injection.interval[0] >= fault.for_s
    await until(lambda: not stands(process))


async def test_who_is_replaced_is_killed_in_its_stop(cluster: Sleepers) -> None:
    await injected(cluster, Fault(0.0, "stop", "decode-0", 0.1, then_kill=True))
    assert cluster.ended("decode-0") == 9


async def test_a_suspended_machine_stands_as_a_whole_and_goes_on(cluster: Sleepers) -> None:
    processes = list(cluster.everything().values())
    injecting = asyncio.create_task(injected(cluster, Fault(0.0, "suspend", "all", 0.3)))
    await until(lambda: all(map(stands, processes)))
    await injecting
    await until(lambda: not any(map(stands, processes)))


async def test_a_fault_that_is_broken_off_is_taken_back(cluster: Sleepers) -> None:
    process = cluster.everything()["decode-0"]
    injecting = asyncio.create_task(injected(cluster, Fault(0.0, "stop", "decode-0", 600.0)))
    await until(lambda: stands(process))
    injecting.cancel()
    await asyncio.gather(injecting, return_exceptions=True)
    await until(lambda: not stands(process))


async def test_a_flood_is_sent() -> None:
    sent: list[int] = []
    await nemesis_of(None, sent.append).inject(Fault(0.0, "flood", "all", amount=24))
    assert sent == [24]


async def test_who_is_down_already_is_not_hit(cluster: Sleepers) -> None:
    injection = await injected(cluster, Fault(0.0, "kill", "prefill-7"))
    assert injection.not_injected == "prefill-7 is down already"


@pytest.mark.parametrize("kind", ["cut", "reset", "narrow", "disk full"])
async def test_without_namespaces_networks_and_disks_are_left_alone(cluster: Sleepers, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injectors, "isolated", lambda: False)
    injection = await injected(cluster, Fault(0.0, kind, "decode-0", 0.1))
    assert injection.not_injected is not None and "needs root" in injection.not_injected


def test_a_run_of_every_kind_fails_where_some_cannot_be_injected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(isolation, "enter", lambda arguments: None)
    monkeypatch.setattr(isolation, "isolated", lambda: False)
    monkeypatch.setattr(sys, "argv", ["chaos", "--seed", "1", "--every-kind"])
    assert chaos() == 1
    assert "need namespaces, and none can be made here" in capsys.readouterr().err
