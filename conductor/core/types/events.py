"""What happens to the Conductor (events) and what it wants done (actions)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

from conductor.core.types.decision import Alternatives, Outcome
from conductor.core.types.predictions import Prediction, Score
from springtide.cost import DecodeCost, PrefillCost
from springtide.ids import AttemptId, BlockKey, GatewayId, InstanceId, NodeId, RequestId


class Tier(Enum):
    DRAM = "dram"
    SSD = "ssd"


class Phase(IntEnum):
    """How far an attempt is. It only ever grows: a message that would lower it is late."""

    PREFILL = 1
    DECODE = 2
    FINISHED = 3
    FAILED = 4

    @property
    def over(self) -> bool:
        return self >= Phase.FINISHED


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class InstanceRef:
    """`address` and `store_address` are gRPC host:port; the store is that of the instance's own node."""

    instance_id: InstanceId
    role: Role
    address: str
    node_id: NodeId
    store_address: str


@dataclass(frozen=True, slots=True)
class Load:
    """What an instance last told of itself: springtide.v1.LoadReport."""

    running: int = 0
    waiting: int = 0
    tokens: int = 0
    queue_ms: float = 0.0
    step_ms: float = 0.0
    slots_total: int = 0
    slots_available: int = 0
    max_batch: int = 0
    attempt_ids: frozenset[AttemptId] = frozenset()
    prefill_cost: PrefillCost | None = None
    decode_cost: DecodeCost | None = None
    ssd_read_us_per_block: int = 0
    slots_promised: int = 0
    """Decode: what attempts there are expected to grow by, and what those that wait will take."""


# ---- events ----


@dataclass(frozen=True, slots=True)
class Schedule:
    """A gateway asks where to run an attempt. `block_keys` are those of every full block; an objective of 0 means the cluster's."""

    attempt_id: AttemptId
    request_id: RequestId
    gateway_id: GatewayId
    block_keys: Sequence[BlockKey]
    num_tokens: int
    max_new_tokens: int
    accepted: bool = False
    avoid: frozenset[InstanceId] = frozenset()
    ttft_slo_ms: float = 0.0
    tbt_slo_ms: float = 0.0
    tenant: str = ""
    priority: int = 0
    """The higher, the more important."""
    deadline_ms: float = 0.0
    """Until when the whole output is wanted, from now; 0 for whenever."""
    min_new_tokens: int = 1
    """Lower bound of the output."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, not {self.num_tokens}")


@dataclass(frozen=True, slots=True)
class Advance:
    """An attempt reached `phase`. `fetch_ms` is the time it took to fetch `remote_tokens` from the source; 0 when nothing was fetched.
    `queue_ms` and `compute_ms` are its prefill's; 0 when not told."""

    attempt_id: AttemptId
    phase: Phase
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_ms: float = 0.0
    remote_tokens: int = 0
    fetch_ms: float = 0.0
    queue_ms: float = 0.0
    compute_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class LiveAttempt:
    attempt_id: AttemptId
    prefill_id: InstanceId
    decode_id: InstanceId
    phase: Phase
    num_tokens: int
    cached_tokens: int = 0
    tenant: str = ""
    max_new_tokens: int = 0
    """Upper bound of its output; 0: none."""
    prediction: Prediction | None = None
    """By the Conductor that placed it; None: not known."""

    def __post_init__(self) -> None:
        if not 0 <= self.cached_tokens < self.num_tokens:
            raise ValueError(f"cached_tokens must be in [0, num_tokens), not {self.cached_tokens} of {self.num_tokens}")


@dataclass(frozen=True, slots=True)
class Placed:
    """Another Conductor has placed this attempt."""

    gateway_id: GatewayId
    attempt: LiveAttempt


@dataclass(frozen=True, slots=True)
class Renew:
    """All the attempts of a gateway that run. One that two of its renewals on end do not list is over; that it is may have been lost on the
    way, while one renewal may just have been ahead of the placement's answer."""

    gateway_id: GatewayId
    attempts: Sequence[LiveAttempt]


@dataclass(frozen=True, slots=True)
class InstanceUp:
    """The load stream of this incarnation is up."""

    ref: InstanceRef
    incarnation: int


@dataclass(frozen=True, slots=True)
class InstanceDown:
    """Its load stream is lost, or it withdrew. A no-op for any other incarnation than the one that is up. `hung`: it is silent, or has said
    that it makes no headway, so that whoever has work there might wait for ever."""

    instance_id: InstanceId
    incarnation: int
    hung: bool = False


@dataclass(frozen=True, slots=True)
class LoadReported:
    instance_id: InstanceId
    incarnation: int
    load: Load


@dataclass(frozen=True, slots=True)
class StoreUp:
    """A watch of the store was opened; its snapshot is to come. `address` is its gRPC host:port."""

    node_id: NodeId
    address: str


@dataclass(frozen=True, slots=True)
class StoreDown:
    """The watch is lost: what the store holds cannot be relied upon."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """One part of a snapshot; `sequence` is that of the last event it includes, `complete` marks the last part."""

    node_id: NodeId
    incarnation: int
    sequence: int
    keys: Sequence[BlockKey]
    tier: Tier
    complete: bool


@dataclass(frozen=True, slots=True)
class StoreStored:
    node_id: NodeId
    incarnation: int
    sequence: int
    keys: Sequence[BlockKey]
    tier: Tier


@dataclass(frozen=True, slots=True)
class StoreRemoved:
    node_id: NodeId
    incarnation: int
    sequence: int
    keys: Sequence[BlockKey]
    tier: Tier


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went by: leases are checked, forgotten contents swept, hot spots and the balance of the pools looked at. About once a second."""


@dataclass(frozen=True, slots=True)
class ReplicationEnded:
    """A Replicate was done, in part or in full, or it failed."""

    node_id: NodeId
    last_key: BlockKey
    """Of the order."""
    fetched_blocks: int = 0
    failed: bool = False


@dataclass(frozen=True, slots=True)
class SwitchFailed:
    """An instance did not take the order to switch its role."""

    instance_id: InstanceId


Event = (
    Schedule
    | Advance
    | Placed
    | Renew
    | InstanceUp
    | InstanceDown
    | LoadReported
    | StoreUp
    | StoreDown
    | StoreSnapshot
    | StoreStored
    | StoreRemoved
    | ReplicationEnded
    | SwitchFailed
    | Tick
)


# ---- actions ----


@dataclass(frozen=True, slots=True)
class Source:
    """A store from which to fetch: its first `num_blocks` blocks of the prompt, of which the prefill node has some itself."""

    node_id: NodeId
    store_address: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Assignment:
    attempt_id: AttemptId
    prefill: InstanceRef
    decode: InstanceRef
    local_blocks: int
    sources: tuple[Source, ...]
    """Where to fetch from, best first; the prediction counts on the first."""
    predicted_ttft_ms: float
    predicted_tbt_ms: float
    ttft_slo_ms: float
    tbt_slo_ms: float
    prediction: Prediction
    """For the Conductors that did not make it."""
    waits: bool
    """No decode node has room: this one is asked first, and prefill begins when it has reserved."""
    refusable: bool
    """The decode node's door may refuse it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a Schedule: exactly one each. `assignment` is absent when `outcome` is a Rejection."""

    attempt_id: AttemptId
    outcome: Outcome
    alternatives: Alternatives
    assignment: Assignment | None


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """Events of this store were missed: watch it anew."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """What was predicted and what came, to keep score of the predictions."""

    attempt_id: AttemptId
    predicted_ttft_ms: float
    actual_ttft_ms: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Scored:
    """An attempt ended well: all that was predicted of it, beside what came."""

    attempt_id: AttemptId
    request_id: RequestId | None
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class Forgot:
    """Attempts whose gateway was silent for a lease."""

    attempt_ids: tuple[AttemptId, ...]


@dataclass(frozen=True, slots=True)
class HungChanged:
    """These are all the instances that hang and whose work can go on elsewhere. Gateways are told."""

    instances: tuple[InstanceRef, ...]


@dataclass(frozen=True, slots=True)
class Replicate:
    """A store is to take a copy of a prefix. Its end is told as a ReplicationEnded."""

    node_id: NodeId
    store_address: str
    """gRPC host:port of that store."""
    keys: tuple[BlockKey, ...]
    """From the first block of a prompt on; those that the store holds already are not copied."""
    sources: tuple[Source, ...]
    """Best first; each holds all of `keys`."""
    num_bytes: int
    """Of the blocks that it lacks."""
    within_s: float
    """When nothing has been heard by then, it is taken for lost."""


@dataclass(frozen=True, slots=True)
class SwitchRole:
    """An instance is to finish what it has, for so long at the most, and to serve on in the other role, under the same id."""

    instance: InstanceRef
    to: Role
    drain_s: float


Action = Reply | RequestSnapshot | PrefillFinished | Scored | Forgot | HungChanged | Replicate | SwitchRole
