"""Whatever breaks in a cluster under load is told of by the alert that names it, in its time, and wakes nobody for anything else."""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.ca.authority import Authority, new_request
from deploy.ca.identity import Identity
from springtide.config import LOOPBACK, replace_private
from tests.support.cluster import hanging
from tests.support.waiting import wait_until
from tests.support.watched import SMALL, TOLERATED, Load, Watched, watched

pytestmark = pytest.mark.timeout(600)

DAY = datetime.timedelta(days=1)
STILL_S = 4.0
"""Longer than what may be silent, and shorter than what is down."""
MOST_TURNS = 30


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority") / "ca", "a company")


@pytest.fixture(scope="module")
def identity(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Identity:
    """The machine's files, which a company's own authority renews."""
    identity = Identity(tmp_path_factory.mktemp("identity") / "tls")
    renew(identity, authority, 90 * DAY)
    return identity


def renew(identity: Identity, authority: Authority, life: datetime.timedelta) -> None:
    key, request = new_request([LOOPBACK, "localhost"])
    identity.install(key, authority.issue("a machine", request, life), authority.bundle)


@pytest.fixture(scope="module")
def watching(model: Path, identity: Identity, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    settings = {
        **SMALL,
        "model": str(model),
        "prefill": 2,
        "decode": 2,
        "tls": {"certificate": str(identity.certificate), "key": str(identity.key), "ca": str(identity.authorities)},
        "kv": {"block_tokens": 16, "arena_size": "32MiB"},
        "slo": {"ttft_ms": 120_000, "tbt_ms": 60_000},
        "conductor": {"admission": "baseline"},
    }
    with watched(tmp_path_factory.mktemp("watched"), **settings) as watching, Load(watching.cluster):
        yield watching


def test_under_load_alone_nobody_is_told_of_anything(watching: Watched) -> None:
    answered = "sum(springtide_gateway_requests_total)"

    def requests() -> float:
        return sum(float(series["value"][1]) for series in watching.prometheus.query(answered))

    with watching.fault() as nothing:
        before = requests()
        wait_until(lambda: requests() >= before + 100, "a hundred answers", 180.0, poll_s=0.5)
    assert [notice for notice in nothing.notices if notice.alert != TOLERATED or notice.labels["quantity"] != "ttft"] == []


def test_a_store_that_is_killed(watching: Watched) -> None:
    with watching.fault() as fault:
        watching.cluster.kill("decode-0-store")
        fault.told("SpringtideStoreLost", "ticket", instance="decode-0-store")


def test_a_gateway_that_is_killed(watching: Watched) -> None:
    with watching.fault() as fault:
        watching.cluster.kill("gateway-0")
        fault.told("SpringtideProcessRestarted", "ticket", instance="gateway-0")


def test_a_store_that_ends_again_and_again(watching: Watched) -> None:
    def started() -> list[str]:
        """When, as Prometheus has it."""
        found = watching.prometheus.query('process_start_time_seconds{instance="decode-1-store"}')
        return [series["value"][1] for series in found]

    with watching.fault("SpringtideProcessFlapping") as fault:
        for _ in range(3):
            before = started()
            watching.cluster.kill("decode-1-store")
            wait_until(lambda before=before: started() not in ([], before), "it to be scraped again")  # type: ignore[misc]
        fault.told("SpringtideProcessFlapping", "page", instance="decode-1-store")


def test_an_engine_that_is_stopped(watching: Watched) -> None:
    with watching.fault("SpringtideProcessDown") as fault, hanging(watching.cluster.pids_of(["decode-1"])):
        fault.told("SpringtideHung", "ticket")
        fault.told("SpringtideProcessDown", "page", instance="decode-1")


def test_a_conductor_that_is_stopped(watching: Watched) -> None:
    """Its process does not answer either: of that nobody is told."""
    with watching.fault("SpringtideNoLeader") as fault, hanging(watching.cluster.pids_of(["conductor-0"])):
        fault.told("SpringtideNoLeader", "page")
        fault.held_back("SpringtideProcessDown", by="SpringtideNoLeader", instance="conductor-0")
        assert [notice.alert for notice in fault.pages] == ["SpringtideNoLeader"], "one cause wakes somebody once"


def test_valkey_that_is_away(watching: Watched) -> None:
    with watching.fault("SpringtideValkeyAway") as fault, hanging(watching.cluster.pids_of(["valkey"])):
        fault.told("SpringtideValkeyAway", "page")


def test_attempts_that_fail(watching: Watched) -> None:
    """The decode engines stand still in turn."""
    with watching.fault() as fault, Load(watching.cluster, clients=12, output_tokens=600):
        for turn in range(MOST_TURNS):
            if fault.notice("SpringtideAttemptsFail") is not None:
                break
            with hanging(watching.cluster.pids_of([f"decode-{turn % 2}"])):
                time.sleep(STILL_S)
        fault.told("SpringtideAttemptsFail", "ticket")


def test_an_engine_that_prometheus_does_not_look_for(watching: Watched) -> None:
    with watching.fault() as fault, unlisted(watching, "decode-1"):
        fault.told("SpringtideTargetMissing", "ticket")


def test_a_cluster_that_prometheus_does_not_look_for(watching: Watched) -> None:
    with watching.fault("SpringtideMetricsMissing") as fault, unlisted(watching):
        fault.told("SpringtideMetricsMissing", "page")


@contextlib.contextmanager
def unlisted(watching: Watched, *names: str) -> Iterator[None]:
    """The file of targets is left without these; without names, without anybody. While nobody comes or leaves it is not written anew."""
    path = Path(watching.cluster.record.run_dir, "observe/targets.json")
    listed = path.read_text()
    others = [group for group in json.loads(listed) if names and group["labels"]["instance"] not in names]
    replace_private(path, json.dumps(others))
    try:
        yield
    finally:
        replace_private(path, listed)


@pytest.mark.parametrize(
    ("life", "alert", "receiver"),
    [(10 * DAY, "SpringtideCertificateExpiring", "ticket"), (DAY, "SpringtideCertificateAlmostExpired", "page")],
    ids=["within a fortnight", "within two days"],
)
def test_a_certificate_that_is_about_to_end(
    watching: Watched, identity: Identity, authority: Authority, life: datetime.timedelta, alert: str, receiver: str
) -> None:
    with watching.fault(*([alert] if receiver == "page" else [])) as fault:
        try:
            renew(identity, authority, life)
            for name in ("conductor-0", "decode-0", "decode-0-store", "gateway-0"):
                fault.told(alert, receiver, instance=name)
        finally:
            renew(identity, authority, 90 * DAY)
