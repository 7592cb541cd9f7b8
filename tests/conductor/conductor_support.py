"""A small cluster in the core's own terms: blocks of 4 tokens, 100 bytes a token; a token takes 1 ms to compute and 0.1 ms to fetch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from conductor.core.conductor import ConductorCore
from conductor.core.settings import ConductorSettings
from conductor.core.types.events import Decided, InstanceUp, LoadReported, StoreWatched
from springtide.blocks import block_keys, namespace_root
from springtide.cost import DecodeCost, PrefillCost
from springtide.ids import AttemptId, BlockKey, GatewayId, Incarnation, InstanceId, NodeId, RequestId
from springtide.protocol.instances import InstanceRef, Load, Role
from springtide.protocol.scheduling import Assignment, Schedule
from springtide.protocol.storage import SnapshotPart, Tier

BLOCK_TOKENS = 4
GATEWAY = GatewayId("gateway-0")
PREFILL_COST = PrefillCost(fixed_ms=0.0, per_token_ms=1.0, per_pair_ms=0.0)
DECODE_COST = DecodeCost(fixed_ms=10.0, per_sequence_ms=1.0, per_context_token_ms=0.01)
SETTINGS = ConductorSettings(
    policy="kvcache-centric",
    admission="early-rejection",
    kvcache_balancing_threshold=1.5,
    block_tokens=BLOCK_TOKENS,
    bytes_per_block=100 * BLOCK_TOKENS,
    chunk_tokens=512,
    transfer_bytes_per_s=1e6,
    ttft_slo_ms=10_000.0,
    tbt_slo_ms=200.0,
    lease_s=30.0,
    rejoin_s=5.0,
    overload_short_first=False,
)


def keys_of(num_blocks: int, text: int = 0) -> list[BlockKey]:
    """Keys of the first blocks of one endless text; texts differ from their first block on."""
    return block_keys(namespace_root(f"model-{text}", "float32", BLOCK_TOKENS), range(num_blocks * BLOCK_TOKENS), BLOCK_TOKENS)


def request(attempt: str, num_tokens: int = 401, text: int = 0, gateway_id: GatewayId = GATEWAY, **fields: Any) -> Schedule:
    return Schedule(
        attempt_id=AttemptId(attempt),
        request_id=RequestId(f"request-{attempt}"),
        gateway_id=gateway_id,
        block_keys=keys_of(num_tokens // BLOCK_TOKENS, text),
        num_tokens=num_tokens,
        max_new_tokens=16,
        **fields,
    )


def ref(instance_id: str, role: Role) -> InstanceRef:
    """Each instance has a node of its own, named like it."""
    return InstanceRef(InstanceId(instance_id), role, f"{instance_id}:1", NodeId(instance_id), f"{instance_id}:2")


def idle(role: Role, **fields: Any) -> Load:
    prefill, decode = (PREFILL_COST, None) if role is Role.PREFILL else (None, DECODE_COST)
    return replace(Load(slots_total=10_000, slots_available=10_000, max_batch=64, prefill_cost=prefill, decode_cost=decode), **fields)


def make_core(prefills: Sequence[str] = ("p0", "p1"), decodes: Sequence[str] = ("d0",), **changes: Any) -> ConductorCore:
    """A core whose instances are up, idle and hold nothing."""
    core = ConductorCore(replace(SETTINGS, **changes))
    for role, names in ((Role.PREFILL, prefills), (Role.DECODE, decodes)):
        for name in names:
            bring_up(core, name, role)
    return core


def bring_up(core: ConductorCore, name: str, role: Role, incarnation: int = 1, now: float = 0.0) -> None:
    hold(core, name, [])
    core.handle(InstanceUp(ref(name, role), incarnation), now)
    report(core, name, role, incarnation=incarnation, now=now)


def report(core: ConductorCore, name: str, role: Role, now: float = 0.0, incarnation: int = 1, **fields: Any) -> None:
    core.handle(LoadReported(InstanceId(name), incarnation, idle(role, **fields)), now)


def hold(core: ConductorCore, node: str, keys: Sequence[BlockKey], sequence: int = 0) -> None:
    """The node's store says that it holds exactly these blocks."""
    core.handle(StoreWatched(NodeId(node), f"{node}:2"), 0.0)
    core.handle(SnapshotPart(NodeId(node), Incarnation(1), sequence, tuple(keys), Tier.DRAM, complete=True), 0.0)


def ask(core: ConductorCore, event: Schedule, now: float = 0.0) -> Decided:
    (action,) = core.handle(event, now)
    assert isinstance(action, Decided)
    return action


def assigned(core: ConductorCore, event: Schedule, now: float = 0.0) -> Assignment:
    decided = ask(core, event, now)
    assert decided.assignment is not None, decided.decision
    return decided.assignment
