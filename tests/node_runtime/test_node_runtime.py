"""Sessions, claims on slots, the store's port, requests and cost models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from node_runtime.loading import cost_model
from node_runtime.servicer import GatewaySessions, check_command
from node_runtime.slot_claims import HEAD_PATIENCE_S, RETRY_S, SlotClaims
from springtide.cost import PrefillCost
from springtide.errors import ConfigError, InvalidRequest
from springtide.ids import AttemptId, BlockKey, Incarnation, InstanceId, NodeId, Slot
from springtide.protocol import storage, wire
from springtide.protocol.instances import Role
from springtide.protocol.outputs import AttemptFailed, Failure, FailureCode, HandedOver
from springtide.protocol.scheduling import PrefixSource
from springtide.protocol.starts import DecodeStart, PrefillStart
from springtide.rpc import common_pb2, node_pb2, store_pb2
from tests.support.node_core import BLOCK_TOKENS, INFO, NAMESPACE


def request(**changes: object) -> node_pb2.Request:
    values: dict[str, object] = {
        "attempt_id": "a",
        "token_ids": [1, 2, 3],
        "num_prompt_tokens": 3,
        "params": common_pb2.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=4),
        "namespace": NAMESPACE,
        "block_tokens": BLOCK_TOKENS,
    }
    return node_pb2.Request(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": []}, "token_ids must not be empty"),
        ({"token_ids": [1, 1000], "num_prompt_tokens": 2}, "below the vocabulary size 1000, not 1000"),
        ({"num_prompt_tokens": 4}, "num_prompt_tokens must be between 1 and the 3 token_ids, not 4"),
        ({"num_prompt_tokens": 0}, "num_prompt_tokens must be between 1 and the 3 token_ids, not 0"),
        ({"namespace": b"short"}, "namespace must be 16 bytes, not 5"),
        ({"keys": bytes(16)}, "keys has 1 keys; 3 tokens have 0 full blocks of 8"),
        ({"keys": bytes(15)}, "15 bytes; a key has 16"),
        ({"block_tokens": 0}, "block_tokens must be at least 1, not 0"),
        ({"block_tokens": 16}, "block_tokens must be 8, as here, not 16"),
        ({"params": common_pb2.SamplingParams(top_p=1, repetition_penalty=1)}, "max_tokens must be at least 1, not 0"),
        (
            {"params": common_pb2.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=4094)},
            "make 4097, more than .* context of 4096",
        ),
    ],
)
def test_a_request_that_can_never_succeed_is_refused_with_the_field_and_the_value(changes: dict[str, object], message: str) -> None:
    with pytest.raises((InvalidRequest, ValueError), match=message):
        check_command(DecodeStart(wire.REQUEST.decode(request(**changes)), 0.0), INFO, BLOCK_TOKENS)


def test_a_prompt_that_is_to_stay_is_refused_by_who_does_not_decode_it() -> None:
    with pytest.raises(InvalidRequest, match="decode_store_address must not be empty"):
        check_command(PrefillStart(wire.REQUEST.decode(request()), "", NodeId("decode-0"), 0.0), INFO, BLOCK_TOKENS)


def test_a_request_knows_its_blocks_and_whether_it_continues() -> None:
    message = request(token_ids=range(1, 21), num_prompt_tokens=18, keys=bytes(32))
    decoded = wire.REQUEST.decode(message)
    assert (decoded.num_blocks, len(decoded.keys), decoded.first_position, decoded.continues) == (3, 2, 2, True)


def asked(claims: SlotClaims, available: int, now: float) -> str | None:
    """Who asks when the store has told that so many are available."""
    claims.available = available
    return claims.next_to_ask(now)


def test_only_the_first_asks_for_slots_and_only_when_there_may_be_some() -> None:
    claims = SlotClaims()
    claims.refused("old", 5, requested_at=-9.0, deadline=60.0, now=0.0)
    claims.wait("young", 1, requested_at=0.0, deadline=60.0)
    assert asked(claims, 4, 0.1) is None
    assert asked(claims, 5, 0.2) == "old"
    assert asked(claims, 5, 0.3) is None, "it is asking already"
    claims.refused("old", 5, requested_at=-9.0, deadline=60.0, now=0.4)
    assert asked(claims, 0, 0.5 + RETRY_S) == "old", "reused blocks may save it slots"
    claims.leave("old")
    assert asked(claims, 1, 1.6) == "young"
    claims.wait("younger", 1, requested_at=1.0, deadline=60.0)
    assert claims.expired(59.9) == [] and claims.expired(60.0) == ["younger"]
    assert claims.expired(60.0 + HEAD_PATIENCE_S) == ["young", "younger"]


def in_turn(claims: SlotClaims, now: float) -> list[str]:
    """Who asks, one after another, when there is room for everybody."""
    turns: list[str] = []
    claims.available = 1000
    while (attempt_id := claims.next_to_ask(now)) is not None:
        claims.leave(attempt_id)
        turns.append(attempt_id)
    return turns


def test_of_those_that_want_as_much_whoever_came_to_its_gateway_first_asks_first() -> None:
    claims = SlotClaims()
    for name, requested_at in (("second", 2.0), ("third", 3.0), ("first", 1.0)):
        claims.wait(name, 1, requested_at, deadline=60.0)
    assert in_turn(claims, 4.0) == ["first", "second", "third"]


def test_who_wants_little_does_not_wait_as_long_as_who_wants_much_and_nobody_starves() -> None:
    claims = SlotClaims()
    claims.wait("large", 64, requested_at=0.0, deadline=1000.0)
    claims.wait("growing", 1, requested_at=0.0, deadline=1000.0, growth_blocks=80)
    claims.wait("small", 1, requested_at=8.0, deadline=1000.0)
    assert in_turn(claims, 9.0) == ["small", "growing", "large"]
    claims.wait("large", 64, requested_at=0.0, deadline=1000.0)
    claims.wait("small", 1, requested_at=199.0, deadline=1000.0)
    assert in_turn(claims, 200.0) == ["large", "small"]


def test_who_goes_on_with_an_output_is_not_overtaken_by_those_that_begin() -> None:
    claims = SlotClaims()
    claims.wait("begins", 1, requested_at=0.0, deadline=60.0)
    claims.wait("goes on", 64, requested_at=8.0, deadline=60.0, continues=True)
    claims.wait("older", 64, requested_at=7.0, deadline=60.0, continues=True)
    assert in_turn(claims, 9.0) == ["older", "goes on", "begins"]


def test_who_waits_for_a_quota_asks_now_and_then_and_holds_only_its_own_tenant_up() -> None:
    claims = SlotClaims()
    claims.refused("over-quota", 1, requested_at=0.0, deadline=60.0, now=1.0, tenant="small", quota_used=True)
    assert claims.goes_before("small") and not claims.goes_before("other") and claims.wanted_blocks == 0
    claims.wait("younger", 1, requested_at=0.4, deadline=60.0, tenant="small")
    claims.wait("other", 1, requested_at=0.5, deadline=60.0, tenant="other")
    assert claims.goes_before("other") and claims.wanted_blocks == 2
    assert asked(claims, 1, 1.1) == "other"
    assert asked(claims, 1, 1.0 + RETRY_S) == "over-quota"
    assert asked(claims, 1, 1.1 + RETRY_S) is None, "the younger one does not take what the older of its tenant waits for"


def test_what_piles_up_for_a_large_one_is_not_taken_by_those_behind_it() -> None:
    claims = SlotClaims()
    claims.refused("large", 80, requested_at=0.0, deadline=10.0, now=9.5)
    claims.wait("small", 10, requested_at=5.0, deadline=90.0)
    assert claims.expired(30.0) == [] and asked(claims, 50, 10.0) is None
    claims.leave("large")
    claims.wait("large", 80, requested_at=0.0, deadline=90.0)
    claims.wait("smallest", 1, requested_at=9.0, deadline=90.0)
    assert asked(claims, 0, 10.0) == "smallest"
    claims.refused("smallest", 1, requested_at=9.0, deadline=90.0, now=10.0)
    assert asked(claims, 0, 10.5) is None, "it stays the first"


def test_a_refusal_tells_how_few_slots_there_can_be_and_one_for_a_quota_does_not() -> None:
    claims = SlotClaims()
    claims.store_connected(20, pages=None)
    claims.refused("over-quota", 5, requested_at=0.0, deadline=10.0, now=0.0, tenant="small", quota_used=True)
    assert (claims.num_slots, claims.available) == (20, 20)
    claims.refused("a", 10, requested_at=0.0, deadline=10.0, now=0.0, kept_blocks=3)
    assert claims.available == 12
    claims.refused("b", 15, requested_at=0.0, deadline=10.0, now=0.0)
    assert claims.available == 12
    claims.store_lost()
    assert (claims.num_slots, claims.available, claims.wanted_blocks, list(claims)) == (None, 0, 0, [])


def test_orders_and_notices_come_through_the_wire_as_they_are() -> None:
    attempt, key = AttemptId("a"), BlockKey(bytes(16))
    source = PrefixSource(NodeId("prefill-1"), "source:1", 1)
    orders: list[storage.EngineCommand] = [
        storage.EngineHello(InstanceId("prefill-0"), Incarnation(7)),
        storage.Acquire(attempt, (key,), 2, 1, (source,), "acme", recompute_us_per_block=0, leave_available=3, leave_in_quota=4),
        storage.Acquire(attempt, (), 2, 1),
        storage.Reserve(attempt, (key,), 2, "acme", 3, 4),
        storage.Grow(attempt, 1),
        storage.Commit(attempt, 1, (key,)),
        storage.OpenHandOver(attempt, "decode:1", NodeId("decode-0")),
        storage.Push(attempt, 1, 2, 3, 4),
        storage.Seal(attempt, 7),
        storage.Release(attempt, True),
    ]
    for order in orders:
        assert wire.ENGINE_COMMAND.decode(wire.ENGINE_COMMAND.encode(order)) == order
    failure = Failure(FailureCode.QUOTA_USED, "no room")
    notices: list[storage.StoreNotice] = [
        storage.StoreHello(NodeId("n"), Incarnation(7), 12, "store:1"),
        storage.Acquired(attempt, (Slot(4), Slot(5)), 1, 1),
        storage.FetchProgress(attempt, 3),
        storage.FetchTruncated(attempt, 1),
        storage.Reserved(attempt, (Slot(4),), 0),
        storage.Ingested(attempt, 9),
        storage.Grown(attempt, (Slot(6),)),
        HandedOver(attempt, 100, 2.5, 1.5),
        storage.HandOverFailed(attempt, failure),
        AttemptFailed(attempt, failure),
        storage.StoreLoad(1, 2, 64),
    ]
    for notice in notices:
        assert wire.STORE_NOTICE.decode(wire.STORE_NOTICE.encode(notice)) == notice


def test_a_command_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="EngineCommand must have one of hello, acquire"):
        wire.ENGINE_COMMAND.decode(store_pb2.EngineCommand())


async def test_a_session_takes_commands_yields_updates_and_tells_its_end() -> None:
    commands: list[tuple[int, str]] = []
    ended: list[int] = []
    go_on = asyncio.Event()
    sessions: GatewaySessions[str, str] = GatewaySessions(lambda session, command: commands.append((session, command)), ended.append)

    async def incoming() -> AsyncIterator[str]:
        yield "start"
        sessions.send(1, "update")
        sessions.send(2, "to nobody")
        await go_on.wait()

    updates = sessions.serve(incoming())
    assert await anext(updates) == "update"
    assert commands == [(1, "start")] and ended == []
    go_on.set()
    assert [update async for update in updates] == [] and ended == [1]


def test_a_profile_is_read_instead_of_measuring(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"prefill": [1, 0.5, 0.0], "decode": [1, 2, 3]}))
    assert cost_model(PrefillCost, Role.PREFILL, profile, lambda: pytest.fail("measured")) == PrefillCost(1.0, 0.5, 0.0)
    profile.write_text(json.dumps({"prefill": [1, -0.5, 0.0]}))
    with pytest.raises(ConfigError, match=r"'prefill' in .* must be a list of 3 numbers >= 0"):
        cost_model(PrefillCost, Role.PREFILL, profile, lambda: pytest.fail("measured"))
    with pytest.raises(ConfigError, match="cannot read"):
        cost_model(PrefillCost, Role.PREFILL, tmp_path / "missing.json", lambda: pytest.fail("measured"))
