"""Metrics that every process has."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from prometheus_client import REGISTRY, CollectorRegistry, Counter

from springtide.credentials import OPEN
from springtide.metrics import EVENT_LOOP_LAG_SECONDS, NamedSeries, watch_event_loop
from springtide.telemetry import serve_metrics
from springtide.tls import expiry_of

PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5"


def samples(metric: Counter) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels.values()): sample.value for family in metric.collect() for sample in family.samples}


def test_so_many_names_have_series_and_what_was_unused_for_long_makes_room() -> None:
    registry, now = CollectorRegistry(), [0.0]
    requests = Counter("requests_total", "", ["tenant", "result"], registry=registry)
    tokens = Counter("tokens_total", "", ["tenant"], registry=registry)
    series = NamedSeries(2, lambda: now[0])
    for tenant in ("ann", "bob"):
        series.counter(requests, tenant, "met").inc()
        series.counter(requests, tenant, "missed").inc()
        series.counter(tokens, tenant).inc(5)
    now[0] = NamedSeries.UNUSED_S - 1
    series.counter(tokens, "ann").inc(5)
    series.counter(tokens, "cyd").inc()
    series.counter(requests, "dan", "met").inc()
    assert samples(tokens) == {("ann",): 10, ("bob",): 5, ("(others)",): 1}, "a stranger takes nobody's series"
    now[0] += 1
    series.counter(tokens, "cyd").inc()
    assert samples(tokens) == {("ann",): 10, ("cyd",): 1, ("(others)",): 1}
    assert samples(requests) == {("ann", "met"): 1, ("ann", "missed"): 1, ("(others)", "met"): 1}
    series.counter(tokens, "bob").inc()
    assert samples(tokens)["(others)",] == 2, "who comes back is new"


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text", PROMETHEUS_2])
def test_a_name_with_a_colon_is_written_so_in_every_format(accept: str) -> None:
    named_by_others = Counter("other:requests_total", "")
    try:
        named_by_others.inc()
        page = httpx.get(f"http://{serve_metrics(OPEN)}/metrics", headers={"accept": accept}, trust_env=False).text
    finally:
        REGISTRY.unregister(named_by_others)
    assert "\nother:requests_total 1.0\n" in page
    assert page.endswith("# EOF\n") == (accept != "text/plain")


async def test_an_event_loop_that_is_held_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_turns() -> float:
        return sum(sample.value for sample in next(iter(EVENT_LOOP_LAG_SECONDS.collect())).samples if sample.name.endswith("_sum"))

    monkeypatch.setattr("springtide.metrics._LAG_EVERY_S", 0.001)
    before = slow_turns()
    watching = asyncio.create_task(watch_event_loop())
    try:
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251 - this is what is to be seen
        while slow_turns() - before < 0.15:  # noqa: ASYNC110 - only the metric tells
            await asyncio.sleep(0.001)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


@pytest.mark.parametrize("year", [2026, 2049, 2050, 2300])
@pytest.mark.parametrize("version", ["v3", "v1"])
def test_the_end_of_a_certificate_is_read(year: int, version: str) -> None:
    """Written with two digits of the year until 2049, with four after it; with a version before the rest of it, or without."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a" * 60)])
    ends = datetime(year, 2, 3, 4, 5, 6, tzinfo=UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(ends - timedelta(days=1)).not_valid_after(ends)
    pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    if version == "v1":
        pem = without_version(pem)
    assert expiry_of(b"what is before it\n" + pem + pem) == ends.timestamp()


def without_version(pem: bytes) -> bytes:
    """The same as a certificate of version 1 has it; its signature is not right any more."""
    import ssl

    der = bytearray(ssl.PEM_cert_to_DER_cert(pem.decode()))
    at = der.index(b"\xa0\x03\x02\x01\x02")
    del der[at : at + 5]
    for size_at in (at - 2, 2):
        der[size_at : size_at + 2] = (int.from_bytes(der[size_at : size_at + 2]) - 5).to_bytes(2)
    return ssl.DER_cert_to_PEM_cert(bytes(der)).encode()
