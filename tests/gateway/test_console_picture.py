"""What each viewer is shown, and how it is sent: a tenant learns nothing of another's, and changes add up to the whole."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.core.types.events import InstanceDown
from conductor.server.leadership import OnlyConductor
from conductor.server.observer import ObserverService
from gateway.caching.context import CacheId, ContextCache
from gateway.console.deltas import Table, Tables, apply, changed, written_delta, written_state
from gateway.console.feed import Feed
from gateway.console.picture import EVERY, MANY_INSTANCES, READY, Picture, Viewer
from springtide.errors import Overloaded, Unavailable
from springtide.ids import InstanceId
from springtide.protocol.observation import Observe, ObservedPart
from tests.support.played_cluster import HISTORY, MODEL, PlayedCluster

OPERATOR, ACME, GLOBEX = Viewer("", True), Viewer("acme", False), Viewer("globex", False)


def played(prefills: int = 3, decodes: int = 4, rate: float = 8.0, seconds: float = 40.0) -> PlayedCluster:
    cluster = PlayedCluster(prefills, decodes, rate)
    cluster.play(seconds)
    return cluster


@pytest.fixture(scope="module")
def small() -> PlayedCluster:
    return played()


async def look(cluster: PlayedCluster, picture: Picture, now: float = 1e9) -> Tables:
    """As a feed does."""
    picture.begin()
    async for part in cluster.observe(picture.asks):
        picture.take(part, now)
    picture.complete(now)
    return picture.tables(OPERATOR)


@pytest.fixture
async def picture(small: PlayedCluster) -> Picture:
    picture = Picture()
    await look(small, picture)
    caches = [ContextCache(CacheId(f"cache-{tenant}"), tenant, "m", 640, 10, 1e9, 1e9 + 60) for tenant in ("acme", "globex")]
    picture.take_caches(caches, 1e9)
    return picture


def text_of(picture: Picture, viewer: Viewer) -> str:
    return "".join(written_state(picture.head(viewer), picture.tables(viewer)))


async def test_a_tenant_is_shown_its_own_and_nothing_of_another(picture: Picture, small: PlayedCluster) -> None:
    decisions = small.runner.history.changed_since(0, 10_000)
    for viewer in (ACME, GLOBEX):
        text = text_of(picture, viewer)
        own = [decision.request_id for decision in decisions if decision.tenant == viewer.tenant]
        others = [decision.request_id for decision in decisions if decision.tenant != viewer.tenant]
        assert any(request_id in text for request_id in own) and not any(request_id in text for request_id in others)
        assert not any(f'"{tenant}"' in text for tenant in {"acme", "globex", "initech"} - {viewer.tenant})
        tables = picture.tables(viewer)
        for name in ("attempts", "decisions", "prefixes", "caches"):
            assert tables[name] and {row["tenant"] for row in tables[name].values()} == {viewer.tenant}, name
        assert tables["instances"] == picture.tables(OPERATOR)["instances"]


async def test_an_operator_is_shown_all_tenants(picture: Picture) -> None:
    tables = picture.tables(OPERATOR)
    assert {row["tenant"] for row in tables["decisions"].values()} == {"acme", "globex", "initech"}
    assert len(tables["caches"]) == 2


async def test_times_are_the_same_from_one_answer_to_the_next(small: PlayedCluster, picture: Picture) -> None:
    before = picture.tables(OPERATOR)
    after = await look(small, picture, 1e9 + 0.07)
    assert {name: changed(before[name], after[name]) for name in before} == dict.fromkeys(before, ({}, []))


async def test_another_conductors_history_takes_the_place_of_the_one_before(picture: Picture) -> None:
    other = PlayedCluster(1, 1, 1.0)
    other.observer = ObserverService(other.runner, OnlyConductor("played:2"), MODEL, HISTORY + 1)
    assert picture.asks.version > 0
    tables = await look(other, picture)
    assert not tables["decisions"] and len(tables["history"]) == 1 and picture.asks.history == HISTORY + 1


async def test_of_many_instances_a_fifth_is_brought_up_to_date_each_time_and_states_at_once() -> None:
    cluster, picture = PlayedCluster(MANY_INSTANCES // 2 + 1, MANY_INSTANCES // 2 + 1, rate=60.0), Picture()
    seen = (await look(cluster, picture))["instances"]
    cluster.play(4.0)
    cluster.silence("prefill-7")
    cluster.runner.feed(InstanceDown(InstanceId("prefill-7"), 1, hung=True))
    for turn in range(EVERY):
        after = (await look(cluster, picture))["instances"]
        rows, _ = changed(seen, after)
        assert 0 < len(rows) <= len(after) / EVERY + 2
        assert turn or ("prefill-7" in rows and not rows["prefill-7"][READY])
        seen = after
    assert changed(seen, (await look(cluster, picture))["instances"]) == ({}, []), "by then all are up to date"


TABLES = st.dictionaries(st.text(max_size=4), st.lists(st.integers(0, 3), max_size=3), max_size=6)


@given(TABLES, TABLES)
def test_a_table_and_its_changes_come_to_the_next_one(before: Table, after: Table) -> None:
    state = json.loads("".join(written_state({"at": 1}, {"some": before, "none": {}})))
    assert state == {"at": 1, "tables": {"some": before, "none": {}}}
    delta = json.loads("".join(written_delta({"at": 2}, {"some": changed(before, after), "none": ({}, [])})))
    apply(state["tables"], delta["tables"])
    assert state["tables"] == {"some": after, "none": {}} and "none" not in delta["tables"]


def test_a_large_table_is_written_in_pieces() -> None:
    table: Table = {f"row-{number}": [number] * 10 for number in range(1000)}
    pieces = list(written_state({"at": 1}, {"table": table}))
    assert len(pieces) > 10 and json.loads("".join(pieces)) == {"at": 1, "tables": {"table": table}}
    assert max(map(len, pieces)) < 10_000


# ---- the feed ----


class Asked:
    """A Conductor, and how often it was asked."""

    def __init__(self, cluster: PlayedCluster) -> None:
        self.count, self.away, self._cluster = 0, False, cluster

    async def observe(self, asked: Observe) -> AsyncIterator[ObservedPart]:
        self.count += 1
        if self.away:
            raise Unavailable("nobody leads just now")
        async for part in self._cluster.observe(asked):
            yield part


async def no_caches(tenants: int, each: int) -> Sequence[ContextCache]:
    return []


@pytest.fixture
def asked() -> Asked:
    return Asked(played(seconds=10.0))


@pytest.fixture
async def feed(asked: Asked) -> AsyncIterator[Feed]:
    feed = Feed(asked.observe, no_caches)
    yield feed
    await feed.close()


def data_of(event: bytes) -> dict[str, Any]:
    kind, data = event.decode().rstrip("\n").split("\n")
    return {"event": kind.removeprefix("event: "), **json.loads(data.removeprefix("data: "))}


async def test_nobody_is_asked_while_nobody_watches(feed: Feed, asked: Asked) -> None:
    await asyncio.sleep(0)
    assert asked.count == 0
    async with contextlib.aclosing(feed.events(OPERATOR)) as events:
        await anext(events)
        assert feed.num_watchers == 1
    assert asked.count > 0 and feed.num_watchers == 0


async def test_twenty_watchers_are_one_question_and_see_the_same(feed: Feed, asked: Asked) -> None:
    streams = [feed.events(OPERATOR) for _ in range(20)]
    states = [data_of(state) for state in await asyncio.gather(*(anext(stream) for stream in streams))]
    before = asked.count
    changes = await asyncio.gather(*(anext(stream) for stream in streams))
    assert asked.count == before + 1 and len(set(changes)) == 1
    for state, change in zip(states, changes, strict=True):
        delta = data_of(change)
        assert (state["event"], delta["event"]) == ("state", "delta")
        apply(state["tables"], delta["tables"])
        assert state["tables"] == json.loads(await feed.state(OPERATOR))["tables"]
    for stream in streams:
        await stream.aclose()


async def test_what_is_last_known_stays_while_no_conductor_answers(feed: Feed, asked: Asked) -> None:
    async with contextlib.aclosing(feed.events(ACME)) as events:
        state = data_of(await anext(events))
        asked.away = True
        delta = data_of(await anext(events))
        assert (state["problem"], delta["problem"]) == ("", "nobody leads just now")
        assert delta["tables"] == {} and delta["taken_at"] == state["taken_at"]
        asked.away = False
        assert data_of(await anext(events))["problem"] == ""


async def test_context_caches_that_cannot_be_read_in_time_hold_up_no_picture(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.console.feed._ANSWER_S", 0.2)

    async def never(tenants: int, each: int) -> Sequence[ContextCache]:
        await asyncio.Event().wait()
        return []

    feed = Feed(asked.observe, never)
    try:
        async with asyncio.timeout(20):
            assert json.loads(await feed.state(OPERATOR))["tables"]
    finally:
        await feed.close()


async def test_who_is_too_far_behind_is_sent_everything_anew(feed: Feed, asked: Asked) -> None:
    async with contextlib.aclosing(feed.events(OPERATOR)) as slow, contextlib.aclosing(feed.events(OPERATOR)) as quick:
        await anext(slow)
        await anext(quick)
        view = feed._views[None]
        for _ in range(20):
            await view.publish()
        assert data_of(await anext(slow))["event"] == "state"


async def test_so_many_may_watch_and_no_more(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.console.feed.MOST_WATCHERS", 1)
    async with contextlib.aclosing(feed.events(OPERATOR)) as events:
        await anext(events)
        with pytest.raises(Overloaded):
            await anext(feed.events(OPERATOR))


async def test_streams_end_with_the_gateway(feed: Feed) -> None:
    async with contextlib.aclosing(feed.events(OPERATOR)) as events:
        await anext(events)
        await feed.close()
        assert [event async for event in events if b"event: delta" not in event] == []
