"""Identifiers. NewTypes, so that a type checker refuses one where another is meant."""

from __future__ import annotations

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
AttemptId = NewType("AttemptId", str)
InstanceId = NewType("InstanceId", str)
NodeId = NewType("NodeId", str)
GatewayId = NewType("GatewayId", str)
Slot = NewType("Slot", int)

BlockKey = NewType("BlockKey", bytes)
"""16 bytes: the chained hash of a block and all blocks before it (springtide.blocks)."""

Incarnation = NewType("Incarnation", int)
"""63 random bits that a process takes at start, so that handles from before a restart are recognised as stale."""

_PREFILL_SIDE = ".prefill"


def new_incarnation() -> Incarnation:
    return Incarnation(secrets.randbits(63) | 1)


def prefill_side(instance_id: InstanceId) -> InstanceId:
    """What the Conductor calls an engine of both roles as a prefill instance; as a decode node, it has the name itself."""
    return InstanceId(f"{instance_id}{_PREFILL_SIDE}")


def engine_of(instance_id: InstanceId) -> InstanceId:
    """The name of the engine that has this name, be it on either side."""
    return InstanceId(instance_id.removesuffix(_PREFILL_SIDE))


def new_id(prefix: str) -> str:
    """A unique id such as `req-9f8a…` (96 random bits)."""
    return f"{prefix}-{secrets.token_hex(12)}"
