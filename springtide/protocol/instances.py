"""Words about instances: who they are, and how they are doing."""

from __future__ import annotations

import math
from enum import StrEnum

from springtide.cost import DecodeCost, PrefillCost
from springtide.ids import AttemptId, Incarnation, InstanceId, NodeId
from springtide.values import value_class


class Role(StrEnum):
    """What an instance does for an attempt; the side of an attempt that it has."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        """The one that it is not."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


@value_class(frozen=True, slots=True)
class InstanceRef:
    """`address` and `store_address` are gRPC host:port; the store is that of the instance's own node."""

    instance_id: InstanceId
    role: Role
    address: str
    node_id: NodeId
    store_address: str


@value_class(frozen=True, slots=True)
class IdleLoad:
    """The attempts in idle capacity (Terms.idle) at an instance, all of which would give way at once. Raises ValueError as Load does."""

    running: int = 0
    tokens: int = 0
    """As of Load."""
    queue_ms: float = 0.0
    slots_held: int = 0
    slots_promised: int = 0
    """Decode: what they are expected to grow by."""

    def __post_init__(self) -> None:
        if not 0 <= self.queue_ms < math.inf:
            raise ValueError(f"IdleLoad.queue_ms must be finite and not negative, not {self.queue_ms}")


NO_IDLE_LOAD = IdleLoad()


@value_class(frozen=True, slots=True)
class Load:
    """How an instance is doing, without the attempts in idle capacity unless said otherwise. Raises ValueError, naming the field, for what
    is no amount: a NaN would pass every comparison."""

    running: int = 0
    waiting: int = 0
    tokens: int = 0
    """Prefill: still to compute. Decode: of context in the batch."""
    queue_ms: float = 0.0
    """Prefill: predicted time until everything accepted is computed."""
    step_ms: float = 0.0
    """Decode: between two tokens of a sequence, median of the recent steps."""
    slots_total: int = 0
    slots_available: int = 0
    max_batch: int = 0
    attempt_ids: frozenset[AttemptId] = frozenset()
    """Attempts whose work here is not over, those in idle capacity included."""
    prefill_cost: PrefillCost | None = None
    decode_cost: DecodeCost | None = None
    ssd_read_us_per_block: int = 0
    """What the node's store expects a block to take that it has to read from its SSD; 0: it has none."""
    slots_promised: int = 0
    """Decode: what attempts there are expected to grow by, and what those that wait will take."""
    idle: IdleLoad = NO_IDLE_LOAD
    slowed_by: float = 0.0
    """Prefill: by how much longer than alone its prompts take now, for what the engine decodes (0.5: half as long again); `queue_ms` and
    `prefill_cost` have it in them."""

    def __post_init__(self) -> None:
        for name, amount in (("queue_ms", self.queue_ms), ("step_ms", self.step_ms), ("slowed_by", self.slowed_by)):
            if not 0 <= amount < math.inf:
                raise ValueError(f"Load.{name} must be finite and not negative, not {amount}")


@value_class(frozen=True, slots=True)
class LoadReport:
    """What an instance tells of itself when it changes, and twice a second."""

    instance_id: InstanceId
    incarnation: Incarnation
    load: Load
    stalled: str = ""
    """Why it makes no headway, though it is there to say so: its store is silent, or its model's thread hangs. Empty: it does."""


@value_class(frozen=True, slots=True)
class RoleSwitch:
    """An order to an instance: to take no more work, to finish what it has, for so long at the most, and to come back in the other role
    under the same id. Raises ValueError, naming the field."""

    to: Role
    """The one that it has not."""
    drain_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.drain_s < math.inf:
            raise ValueError(f"drain_s must be finite and not negative, but is {self.drain_s}")
