"""What is wrong with a cluster as a whole, not with one of its processes, is told of by the alert that names it, and by no other that wakes
somebody."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from springtide.protocol.instances import Role
from tests.support.cluster import Cluster, hanging
from tests.support.role_switch import switch
from tests.support.tmpfs import tmpfs
from tests.support.waiting import wait_until
from tests.support.watched import FASTER, SMALL, Load, watched

pytestmark = pytest.mark.timeout(600)


def settings(model: Path, **changes: Any) -> dict[str, Any]:
    """Of one node of each role that takes whatever comes, and has time."""
    kv, slo, conductor = {"block_tokens": 16, "arena_size": "32MiB"}, {"ttft_ms": 120_000, "tbt_ms": 60_000}, {"admission": "baseline"}
    sections = {"kv": kv, "slo": slo, "conductor": conductor}
    return {**SMALL, "model": str(model)} | {name: {**section, **changes.pop(name, {})} for name, section in sections.items()} | changes


def test_overload(model: Path, tmp_path: Path) -> None:
    objectives = {"ttft_ms": 200, "tbt_ms": 1_000}
    with (
        watched(tmp_path, **settings(model, slo=objectives, conductor={"admission": "early-rejection-predicted"})) as watching,
        watching.fault("SpringtideOverloaded") as fault,
        Load(watching.cluster, clients=16, own_tokens=1_000, pause_s=0.01),
    ):
        fault.told("SpringtideOverloaded", "page")


def test_a_pool_that_attempts_fill(model: Path, tmp_path: Path) -> None:
    """Of sixteen long outputs, two or three have room."""
    with (
        watched(tmp_path, **settings(model, kv={"arena_size": "768KiB"}, max_context=768)) as watching,
        watching.fault("SpringtidePoolFull") as fault,
        Load(watching.cluster, clients=16, output_tokens=600, pause_s=0.01),
    ):
        fault.told("SpringtidePoolFull", "page", role="decode")


def test_a_symptom_wakes_nobody_beside_its_cause(model: Path, tmp_path: Path) -> None:
    """Without the only decode engine nothing can be served."""
    with (
        watched(tmp_path, **settings(model)) as watching,
        watching.fault("SpringtideProcessDown", outlast=["SpringtideNoInstances"]) as fault,
        hanging(watching.cluster.pids_of(["decode-0"])),
    ):
        fault.told("SpringtideProcessDown", "page", instance="decode-0")
        fault.held_back("SpringtideNoInstances", by="SpringtideProcessDown", role="decode")
        assert [notice.alert for notice in fault.pages] == ["SpringtideProcessDown"], "one cause wakes somebody once"


def test_an_error_budget_that_burns_and_a_role_that_nobody_has(model: Path, tmp_path: Path) -> None:
    """An objective that nobody can keep hurts once somebody asks."""
    with watched(tmp_path, **settings(model, slo={"ttft_ms": 1})) as watching:
        with watching.fault("SpringtideNoInstances") as fault:
            switch(watching.cluster, "decode-0", Role.PREFILL)
            fault.told("SpringtideNoInstances", "page", role="decode")
            switch(watching.cluster, "decode-0", Role.DECODE)
        with watching.fault("SpringtideErrorBudgetBurnsFast") as fault, Load(watching.cluster, clients=2):
            fault.told("SpringtideErrorBudgetBurnsFast", "page")


def test_an_error_budget_that_burns_slowly(model: Path, tmp_path: Path) -> None:
    """One of thirty generations misses. Days are minutes here: the clock runs faster still, that of what waits too."""
    alert = "SpringtideErrorBudgetBurnsSlowly"
    with watched(tmp_path, times=6 * FASTER, **settings(model)) as watching, watching.fault() as fault:
        wait_until(lambda: ask_thirty(watching.cluster) and fault.notice(alert), alert, watching.longest_s(alert), poll_s=0)
        fault.told(alert, "ticket")


def ask_thirty(cluster: Cluster) -> bool:
    """Of which the last has a deadline that nobody keeps. Whether it is as meant."""
    terms: list[dict[str, float]] = [{}] * 29 + [{"deadline_ms": 0.1}]
    body = {"model": cluster.model, "prompt": "One two three", "max_tokens": 4}
    url = f"{cluster.url}/v1/completions"
    answers = [httpx.post(url, json={**body, **own}, timeout=60, trust_env=False).status_code for own in terms]
    return answers == [200] * 29 + [504]


def test_predictions_that_are_off_by_more_than_engines_correct(model: Path, tmp_path: Path) -> None:
    """By three times what they do: passes take up to four times what the profile says, and are foreseen all the same."""
    profile = tmp_path / "profile.json"
    options = ["--model", str(model), "--dtype", "float32", "--threads", "1", "--block-tokens", "16", "--max-context", "256"]
    subprocess.run([sys.executable, "-m", "deploy.cli", "profile", *options, "--output", profile], check=True, capture_output=True)
    measured = json.loads(profile.read_text())
    profile.write_text(json.dumps({role: [cost / (4 * 3) for cost in measured[role]] for role in ("prefill", "decode")}))
    with watched(tmp_path, **settings(model, profile=str(profile))) as watching, watching.fault() as fault, Load(watching.cluster):
        for quantity in ("prefill", "tbt"):
            fault.told("SpringtidePredictionsOff", "ticket", quantity=quantity)


# ---- disks ----


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Of its own, so that it can be filled."""
    with tmpfs(tmp_path / "disk", "192m") as path:
        yield path


def test_a_disk_that_is_full_and_one_that_cannot_be_written(model: Path, disk: Path, tmp_path: Path) -> None:
    kv = {"arena_size": "1MiB", "ssd_dir": str(disk), "ssd_size": "64MiB", "demote_below": 1.0, "demote_until": 1.0}
    stores = ("prefill-0-store", "decode-0-store")
    with watched(tmp_path, **settings(model, kv=kv, max_context=1024)) as watching:
        with watching.fault() as fault, full(disk), Load(watching.cluster):
            fault.told("SpringtideDiskFull", "ticket", instance="prefill-0-store")
        with Load(watching.cluster):
            for store in stores:
                watching.cluster.wait_metric(store, "springtide_store_ssd_written_bytes_total", lambda written: written > 0)
            with watching.fault() as fault, contextlib.ExitStack() as failing:
                for store in stores:
                    failing.enter_context(unwritable(watching.cluster, store))
                fault.told("SpringtideDiskFailing", "ticket", instance="prefill-0-store")


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        while True:
            file.write(bytes(1 << 20))
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def unwritable(cluster: Cluster, name: str) -> Iterator[None]:
    """The kernel lets the process write nothing beyond the first bytes of a file."""
    pid = cluster.pid_of(name)
    assert pid is not None
    process = psutil.Process(pid)
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (1, before[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, before)
