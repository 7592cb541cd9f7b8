"""What operators and whoever places blocks ask of a store process: replicas, pins, quotas, listings, evictions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import grpc
import grpc.aio
import numpy as np
import pytest
from kvstore_support import SPEC, WAIT_S, Engine, Starter, contents, keys_of

from springtide.blocks import block_keys, namespace_root
from springtide.protocol.outputs import FailureCode
from springtide.rpc import common_pb2
from springtide.rpc import store_pb2 as pb
from tests.support.waiting import until

PROMPT = keys_of(1, 2, 3, 4)
BRANCH = keys_of(1, 2, 5)


async def refused(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code(), raised.value.details() or ""


# ---- replicas ----


async def replicate(target: Engine, *sources: Engine) -> pb.ReplicateReply:
    request = pb.ReplicateRequest(keys=PROMPT, sources=[source.as_source(PROMPT) for source in sources])
    return await target.stub.Replicate(request, timeout=WAIT_S)


@pytest.mark.parametrize("transports", [("shm",), ("tcp",)], ids="-".join)
async def test_blocks_are_replicated_by_order_and_only_those_that_are_not_there(start: Starter, transports: tuple[str, ...]) -> None:
    (_, source), (_, target) = await asyncio.gather(start("prefill-0", transports=transports), start("prefill-1", transports=transports))
    await asyncio.gather(source.cache(PROMPT), target.cache(PROMPT[:1]))
    first, same = await asyncio.gather(replicate(target, source), replicate(target, source))
    assert first.blocks == same.blocks == 4
    assert {3} <= {first.fetched_blocks, same.fetched_blocks} <= {0, 3}, "0 where one order had been carried out before the other came"
    assert await replicate(target, source) == pb.ReplicateReply(blocks=4, fetched_blocks=0)
    acquired = await target.acquire(PROMPT, 5)
    assert acquired.local_blocks == 4
    assert all(np.array_equal(target.slot(slot), contents(key)) for key, slot in zip(PROMPT, acquired.slots, strict=False))
    target.release(acquired.attempt_id)
    await asyncio.gather(*(engine.stat_until(lambda stat: stat.slots_cached == 4 and stat.leases == 0) for engine in (source, target)))


async def test_an_order_outlives_the_engine_and_is_carried_out_from_what_there_is(start: Starter) -> None:
    (lost, away), (_, part), (_, target) = await asyncio.gather(*(start(f"prefill-{i}") for i in range(3)))
    await asyncio.gather(away.cache(PROMPT), part.cache(PROMPT[:2]))
    lost.kill()
    await until(lambda: away.lost)
    await target.link.close()
    assert await replicate(target, away, part) == pb.ReplicateReply(blocks=2, fetched_blocks=2)
    code, message = await refused(replicate(target, away))
    assert code is grpc.StatusCode.UNAVAILABLE and "leasing at" in message


async def test_a_replica_needs_room_and_belongs_to_its_tenant(start: Starter) -> None:
    (_, source), (_, small), (_, limited) = await asyncio.gather(
        start("a"), start("b", num_slots=3), start("c", tenant_quotas={"them": 2 * SPEC.bytes_per_slot})
    )
    await source.cache(PROMPT, tenant="them")
    for target, reason in ((small, "4 slots asked for; 3 of 3 are free"), (limited, "4 blocks are more than the quota of tenant 'them'")):
        code, message = await refused(replicate(target, source))
        assert code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
        assert reason in message
    request = pb.ReplicateRequest(keys=PROMPT[:2], sources=[source.as_source(PROMPT)])
    assert (await limited.stub.Replicate(request, timeout=WAIT_S)).blocks == 2
    assert [(usage.tenant, usage.slots, usage.quota_slots) for usage in (await limited.stat()).tenants] == [("them", 2, 2)]


async def test_senseless_orders_are_refused_by_name(start: Starter) -> None:
    _, engine = await start("prefill-0")
    for request, message in (
        (pb.ReplicateRequest(), "keys is empty: there is nothing to replicate"),
        (pb.ReplicateRequest(keys=[b"short"]), "keys[0] must have 16 bytes, not 5"),
    ):
        assert await refused(engine.stub.Replicate(request)) == (grpc.StatusCode.INVALID_ARGUMENT, message)


# ---- pins ----


def pin(
    engine: Engine, pin_id: str, keys: list[bytes], kind: pb.PinKind = pb.PIN_KIND_HARD, ttl_ms: int = 60_000
) -> Awaitable[pb.PinReply]:
    return engine.stub.Pin(pb.PinRequest(pin_id=pin_id, keys=keys, kind=kind, ttl_ms=ttl_ms), timeout=WAIT_S)


async def held(engine: Engine) -> set[bytes]:
    listed = await engine.stub.ListBlocks(pb.ListBlocksRequest(key_prefix="", limit=100), timeout=WAIT_S)
    return {chain.key for chain in listed.chains}


async def test_what_is_pinned_stays_while_the_rest_makes_room(start: Starter) -> None:
    _, engine = await start("prefill-0", num_slots=8)
    await engine.cache(PROMPT)
    assert (await pin(engine, "system prompt", PROMPT[1:2])).pin.blocks == 2, "with its ancestor"
    await engine.cache(keys_of(7, 8, 9, 10, 11))
    await engine.cache(keys_of(17, 18, 19, 20, 21))
    assert PROMPT[1] in await held(engine)
    acquired = await engine.acquire(PROMPT, 5)
    assert acquired.local_blocks == 2
    engine.release(acquired.attempt_id)
    stat = await engine.stat()
    assert (stat.pins, stat.blocks_hard_pinned, stat.hard_pin_limit) == (1, 2, 4)


async def test_what_an_engine_is_about_to_commit_is_waited_for_by_a_pin(start: Starter) -> None:
    """Whoever has heard that a prompt is computed asks over another way than the one of the engine's word, and may be the faster."""
    _, engine = await start("prefill-0", num_slots=8)
    attempt = await engine.acquire(PROMPT, 5)
    early = asyncio.ensure_future(pin(engine, "early", PROMPT))
    await engine.stat()  # handled behind it
    engine.commit(attempt.attempt_id, 0, PROMPT)
    assert (await early).pin.blocks == len(PROMPT)
    engine.release(attempt.attempt_id)

    others = keys_of(7, 8)
    given_up = await engine.acquire(others, 2)
    early = asyncio.ensure_future(pin(engine, "in vain", others))
    await engine.stat()
    engine.release(given_up.attempt_id)
    assert (await refused(early))[0] is grpc.StatusCode.NOT_FOUND

    slow = await engine.acquire(others, 2)
    assert (await refused(pin(engine, "too early", others)))[0] is grpc.StatusCode.NOT_FOUND, "it is not waited for for ever"
    engine.release(slow.attempt_id)


async def test_pins_are_renewed_listed_and_end_by_order_or_in_time(start: Starter) -> None:
    _, engine = await start("prefill-0")
    await engine.cache(PROMPT)
    await pin(engine, "soft", PROMPT, pb.PIN_KIND_SOFT)
    await pin(engine, "short", PROMPT[:1], ttl_ms=1000)
    renewed = await engine.stub.RenewPin(pb.RenewPinRequest(pin_id="soft", ttl_ms=3_600_000))
    assert 3_500_000 < renewed.pin.ttl_ms <= 3_600_000
    listed = await engine.stub.ListPins(pb.ListPinsRequest())
    assert {(each.pin_id, each.kind, each.blocks) for each in listed.pins} >= {("soft", pb.PIN_KIND_SOFT, 4)}
    await engine.stat_until(lambda stat: stat.pins == 1)  # the short one has ended
    assert (await engine.stub.Unpin(pb.UnpinRequest(pin_id="soft"))).pin.blocks == 4
    for call in (engine.stub.Unpin(pb.UnpinRequest(pin_id="soft")), engine.stub.RenewPin(pb.RenewPinRequest(pin_id="soft", ttl_ms=1))):
        assert await refused(call) == (grpc.StatusCode.NOT_FOUND, "there is no pin 'soft' here")
    assert (await engine.stat()).slots_in_use == 0


async def test_a_pin_that_cannot_be_is_refused_by_name(start: Starter) -> None:
    _, engine = await start("prefill-0", num_slots=8, hard_pin_share=0.25)
    await engine.cache(PROMPT)
    assert await refused(pin(engine, "p", keys_of(9))) == (grpc.StatusCode.NOT_FOUND, "pin 'p': none of the 1 blocks is held here")
    code, message = await refused(pin(engine, "p", PROMPT))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "4 blocks would be under hard pins, of which this store takes 2 (kv.hard_pin_share)" in message
    for request, name in (
        (pb.PinRequest(pin_id="", keys=PROMPT, kind=pb.PIN_KIND_SOFT, ttl_ms=1), "pin_id"),
        (pb.PinRequest(pin_id="p", keys=PROMPT, ttl_ms=1), "kind"),
        (pb.PinRequest(pin_id="p", keys=PROMPT, kind=pb.PIN_KIND_SOFT), "ttl_s"),
        (pb.PinRequest(pin_id="p", keys=[b"x"], kind=pb.PIN_KIND_SOFT, ttl_ms=1), "keys[0]"),
    ):
        code, message = await refused(engine.stub.Pin(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and message.startswith(name)
    assert (await engine.stat()).pins == 0


# ---- tenants ----


async def test_a_tenant_over_its_quota_evicts_its_own_blocks_and_no_others(start: Starter) -> None:
    _, engine = await start("prefill-0", num_slots=12, tenant_quotas={"them": 4 * SPEC.bytes_per_slot})
    ours, theirs = PROMPT, block_keys(namespace_root("a model", "bfloat16", 8, "them"), range(6), 1)
    await engine.cache(ours)
    for label in range(6):
        attempt = await engine.acquire([theirs[label]], 1, tenant="them")
        engine.commit(attempt.attempt_id, 0, [theirs[label]])
        engine.release(attempt.attempt_id)
    usage = {each.tenant: each for each in (await engine.stat()).tenants}
    assert usage["them"].slots == usage["them"].quota_slots == 4
    assert not usage[""].HasField("quota_slots")
    again = await engine.acquire(ours, 5)
    assert again.local_blocks == 4
    engine.release(again.attempt_id)
    strangers = await engine.acquire(ours, 4, tenant="them")
    assert strangers.local_blocks == 0, "another tenant's blocks are not seen"
    engine.release(strangers.attempt_id)


async def test_a_full_quota_is_told_as_such_and_one_that_never_suffices_as_an_error(start: Starter) -> None:
    _, engine = await start("prefill-0", tenant_quotas={"*": 3 * SPEC.bytes_per_slot})

    async def failure(attempt_id: str) -> common_pb2.Failure:
        return (await engine.notice("attempt_failed", attempt_id)).failure

    running = await engine.acquire([], 3, tenant="anybody")
    engine.send(acquire=pb.Acquire(attempt_id="second", num_blocks=1, tenant="anybody"))
    assert (await failure("second")).code == FailureCode.QUOTA_USED
    engine.send(reserve=pb.Reserve(attempt_id="large", num_blocks=4, tenant="somebody else"))
    refusal = await failure("large")
    assert refusal.code == FailureCode.INVALID
    assert refusal.message == "4 blocks are more than the quota of tenant 'somebody else': 3 (kv.tenant_quotas)"
    engine.release(running.attempt_id)
    one, two = await engine.acquire([], 1, tenant="anybody"), await engine.acquire([], 2, tenant="anybody")
    engine.send(grow=pb.Grow(attempt_id=one.attempt_id, num_blocks=1))
    assert (await failure(one.attempt_id)).code == FailureCode.QUOTA_USED, "what it has, it keeps"
    engine.release(one.attempt_id)
    engine.release(two.attempt_id)
    await engine.stat_until(lambda stat: stat.slots_free == 32)


# ---- what is held ----


async def test_chains_are_listed_with_what_is_theirs_alone(start: Starter) -> None:
    _, engine = await start("prefill-0")
    await engine.cache(PROMPT)
    await engine.cache(BRANCH)
    await pin(engine, "p", BRANCH, pb.PIN_KIND_SOFT)
    listed = await engine.stub.ListBlocks(pb.ListBlocksRequest(limit=10))
    assert [(chain.key, chain.blocks, chain.own_blocks, chain.pin) for chain in listed.chains] == [
        (BRANCH[-1], 3, 1, pb.PIN_KIND_SOFT),
        (PROMPT[-1], 4, 2, pb.PIN_KIND_UNSPECIFIED),
    ]
    assert (listed.total, listed.bytes_per_block, listed.block_tokens) == (2, SPEC.bytes_per_slot, SPEC.block_tokens)
    one = await engine.stub.ListBlocks(pb.ListBlocksRequest(limit=1))
    assert (len(one.chains), one.total) == (1, 2)
    named = await engine.stub.ListBlocks(pb.ListBlocksRequest(key_prefix=PROMPT[1].hex()[:9].upper(), limit=10))
    assert [(chain.key, chain.blocks, chain.children) for chain in named.chains] == [(PROMPT[1], 2, 2)]
    of_prompt = await engine.stub.ListBlocks(pb.ListBlocksRequest(keys=keys_of(1, 2, 3, 99)))
    assert [(chain.key, chain.blocks) for chain in of_prompt.chains] == [(PROMPT[2], 3)]
    assert not (await engine.stub.ListBlocks(pb.ListBlocksRequest(keys=keys_of(99)))).chains


async def test_blocks_are_evicted_by_order_with_what_continues_them_but_never_what_is_used_or_pinned(start: Starter) -> None:
    _, engine = await start("prefill-0")
    await engine.cache(PROMPT)
    await engine.cache(BRANCH)
    assert await engine.stub.Evict(pb.EvictRequest(keys=PROMPT[2:3])) == pb.EvictReply(blocks=2)
    await pin(engine, "p", BRANCH[:2], pb.PIN_KIND_SOFT)
    assert await engine.stub.Evict(pb.EvictRequest(all=True)) == pb.EvictReply(blocks=1, kept_blocks=2)
    await engine.stub.Unpin(pb.UnpinRequest(pin_id="p"))
    used = await engine.acquire(PROMPT[:1], 2)
    assert await engine.stub.Evict(pb.EvictRequest(keys=PROMPT[:1])) == pb.EvictReply(blocks=1, kept_blocks=1)
    engine.release(used.attempt_id)
    verdict = await engine.stub.Verify(pb.VerifyRequest())
    assert (verdict.problem, verdict.slots, verdict.blocks) == ("", 32, 1)
