"""Rate limits: within no minute is more taken than the limit, whoever asks, wherever, while Valkey is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis
from hypothesis import given
from hypothesis import strategies as st

from gateway.accounts.limiter import Claim, Limiter
from gateway.accounts.windows import WINDOW_S, Window
from springtide.ids import new_id
from springtide.valkey import ValkeyClient
from tests.support.valkey import new_valkey

EVENTS = st.lists(st.tuples(st.floats(0, 90), st.integers(1, 40)), max_size=60)


@given(EVENTS, st.integers(1, 100), st.integers(0, 1_000_000))
def test_in_no_minute_is_more_granted_than_the_limit(events: list[tuple[float, int]], limit: int, start: int) -> None:
    window, now, granted = Window(), float(start), list[tuple[float, int]]()
    for pause, amount in events:
        now += pause
        window = Window.of(window.taken, now)
        if window.used + amount <= limit:
            window.add(int(now), amount)
            granted.append((now, amount))
    for end, _ in granted:
        assert sum(amount for at, amount in granted if end - WINDOW_S < at <= end) <= limit


@given(EVENTS, st.integers(1, 40), st.integers(40, 100))
def test_after_the_wait_that_is_told_it_fits_and_no_second_sooner(events: list[tuple[float, int]], amount: int, limit: int) -> None:
    window, now = Window(), 1000.0
    for pause, taken in events:
        now += pause / 30
        window = Window.of(window.taken, now)
        window.add(int(now), taken)
    wait_s = window.wait_s(amount, limit, now)
    assert Window.of(window.taken, now + wait_s).used + amount <= limit
    assert wait_s == 0 or Window.of(window.taken, now + wait_s - 0.5).used + amount > limit
    assert Window.of(window.taken, now + window.reset_s(now)).used == 0


@given(EVENTS)
def test_what_was_taken_is_given_back_no_more_than_once(events: list[tuple[float, int]]) -> None:
    window = Window()
    for number, (_, amount) in enumerate(events):
        window.add(number, amount)
        window.add(number, -2 * amount)
    assert window.used == 0


@pytest.fixture
async def client(valkey_url: str) -> AsyncIterator[redis.Redis]:
    client = ValkeyClient.from_url(valkey_url)
    yield client
    await client.aclose()


@pytest.fixture
def cluster_name() -> str:
    return new_id("cluster")


async def test_two_gateways_grant_the_limit_together_and_not_once_more(client: redis.Redis, cluster_name: str) -> None:
    limiters = [Limiter(client, cluster_name) for _ in range(2)]
    verdicts = await asyncio.gather(*(limiters[number % 2].take([Claim("requests:key/a", 10, 1)]) for number in range(30)))
    assert sum(verdict.granted for verdict in verdicts) == 10
    refused = next(verdict for verdict in verdicts if not verdict.granted)
    assert refused.standings[0].remaining == 0
    assert WINDOW_S - 5 < refused.standings[0].wait_s <= WINDOW_S + 1


async def test_claims_are_granted_together_or_not_at_all(client: redis.Redis, cluster_name: str) -> None:
    limiter = Limiter(client, cluster_name)
    assert not (await limiter.take([Claim("tokens:key/a", 100, 50), Claim("tokens:tenant/acme", 40, 50)])).granted
    verdict = await limiter.take([Claim("tokens:key/a", 100, 100), Claim("tokens:tenant/acme", 100, 100)])
    assert verdict.granted, "the refused claim has taken nothing"
    assert [standing.remaining for standing in verdict.standings] == [0, 0]


async def test_what_was_taken_too_much_is_free_again_and_what_was_too_little_is_not(client: redis.Redis, cluster_name: str) -> None:
    limiter, other = Limiter(client, cluster_name), Limiter(client, cluster_name)
    verdict = await limiter.take([Claim("tokens:key/a", 100, 80)])
    await limiter.settle(["tokens:key/a"], -30, verdict.second)
    assert (await other.take([Claim("tokens:key/a", 100, 0)])).standings[0].remaining == 50
    await limiter.settle(["tokens:key/a"], 200, verdict.second)
    assert not (await other.take([Claim("tokens:key/a", 100, 1)])).granted
    assert (await limiter.take([Claim("tokens:key/a", 100, 1)])).standings[0].remaining == 0


async def test_what_was_taken_a_minute_ago_counts_no_more(client: redis.Redis, cluster_name: str) -> None:
    now = int(time.time())
    await client.hset(f"{cluster_name}:rate:requests:key/a", mapping={str(now - WINDOW_S - 2): 5, str(now - WINDOW_S + 10): 3})
    verdict = await Limiter(client, cluster_name).take([Claim("requests:key/a", 10, 1)])
    assert verdict.standings[0].remaining == 6


async def test_while_valkey_is_away_each_gateway_goes_on_from_what_it_knows(cluster_name: str) -> None:
    with new_valkey() as valkey:
        client = ValkeyClient.from_url(valkey.connection_url)
        limiter = Limiter(client, cluster_name)
        assert [(await limiter.take([Claim("requests:key/a", 3, 1)])).granted for _ in range(2)] == [True, True]
    assert [(await limiter.take([Claim("requests:key/a", 3, 1)])).granted for _ in range(2)] == [True, False]
    await limiter.settle(["requests:key/a"], -1, int(time.time()))
    await client.aclose()
