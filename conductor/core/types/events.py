"""What happens to the Conductor (events), what it wants done (actions), and the scores of predictions that it tells with them."""

from __future__ import annotations

from enum import Enum

from conductor.core.types.decision import Alternatives, Decision
from springtide.clock import Tick
from springtide.ids import AttemptId, BlockKey, GatewayId, InstanceId, NodeId, RequestId
from springtide.protocol.attempts import LiveAttempt, Progress, Renew
from springtide.protocol.instances import InstanceRef, Load, RoleSwitch
from springtide.protocol.scheduling import Assignment, PrefixSource, Schedule
from springtide.protocol.storage import BlocksRemoved, BlocksStored, SnapshotPart
from springtide.values import value_class

# ---- the scores of predictions ----


class Quantity(Enum):
    """What is predicted of an attempt; in milliseconds, except `OUTPUT_TOKENS`."""

    TTFT = "ttft"
    QUEUE = "queue"
    TRANSFER = "transfer"
    PREFILL = "prefill"
    TBT = "tbt"
    OUTPUT_TOKENS = "output_tokens"

    # Each attempt looks several up: by identity, as they are single, rather than by their names' hashes.
    __hash__ = object.__hash__


@value_class(frozen=True, slots=True)
class Score:
    """What was predicted of an attempt, beside what came."""

    quantity: Quantity
    predicted: float
    actual: float


# ---- events ----


@value_class(frozen=True, slots=True)
class Placed:
    """Another Conductor has placed this attempt."""

    gateway_id: GatewayId
    attempt: LiveAttempt


@value_class(frozen=True, slots=True)
class Renewed:
    """A Renew of which those attempts are named alone of which it says nothing new: to decode all of a large gateway would hold up those
    who wait for a decision."""

    gateway_id: GatewayId
    unchanged: tuple[AttemptId, ...]
    """As of `ConductorCore.is_news`. Those that have ended since then stay so."""
    attempts: tuple[LiveAttempt, ...]
    """The others."""


@value_class(frozen=True, slots=True)
class InstanceUp:
    """The load stream of this incarnation is up."""

    ref: InstanceRef
    incarnation: int


@value_class(frozen=True, slots=True)
class InstanceDown:
    """The load stream of an instance is lost, or it withdrew. A no-op for any other incarnation than the one that is up. `hung`: it is
    silent, or has said that it makes no headway, so that whoever has work there might wait for ever. `leaving`: it has said that it takes
    no more work; it ends what it has as far as it has time."""

    instance_id: InstanceId
    incarnation: int
    hung: bool = False
    leaving: bool = False


@value_class(frozen=True, slots=True)
class LoadReported:
    instance_id: InstanceId
    incarnation: int
    load: Load


@value_class(frozen=True, slots=True)
class StoreWatched:
    """A watch of the store was opened; its snapshot is to come. `address` is its gRPC host:port."""

    node_id: NodeId
    address: str


@value_class(frozen=True, slots=True)
class StoreDown:
    """The watch is lost: what the store holds cannot be relied upon."""

    node_id: NodeId


@value_class(frozen=True, slots=True)
class StoreStillHere:
    """A store has had nothing to tell for a while. `sequence` is the number of its last event."""

    node_id: NodeId
    sequence: int


@value_class(frozen=True, slots=True)
class ReplicationEnded:
    """A Replicate was done, in part or in full, or it failed."""

    node_id: NodeId
    last_key: BlockKey
    """Of the order."""
    fetched_blocks: int = 0
    failed: bool = False


@value_class(frozen=True, slots=True)
class SwitchFailed:
    """An instance did not take the order to switch its role."""

    instance_id: InstanceId


@value_class(frozen=True, slots=True)
class MovesAsked:
    """Whoever operates the cluster wants so many attempts to go on elsewhere that decode at the instance."""

    instance_id: InstanceId
    most: int


@value_class(frozen=True, slots=True)
class TickPart:
    """The next part of what a Tick is in whole, or else the first: whoever waits for a decision has a turn between them, and what else
    happens may. `ConductorCore.ticks` tells whether more of them are to come."""


Event = (
    Schedule
    | Progress
    | Placed
    | Renew
    | Renewed
    | InstanceUp
    | InstanceDown
    | LoadReported
    | StoreWatched
    | StoreDown
    | SnapshotPart
    | BlocksStored
    | BlocksRemoved
    | StoreStillHere
    | ReplicationEnded
    | SwitchFailed
    | MovesAsked
    | Tick
    | TickPart
)


# ---- actions ----


@value_class(frozen=True, slots=True)
class Decided:
    """The answer to a Schedule: exactly one each. `assignment` is absent when `decision` is a Rejection."""

    attempt_id: AttemptId
    decision: Decision
    alternatives: Alternatives
    assignment: Assignment | None
    predicted_ttft_ms: float | None
    """Where it is placed, or would be were it not refused; None: nowhere, or in idle capacity, of whose time nobody counts on anything."""


@value_class(frozen=True, slots=True)
class RequestSnapshot:
    """Events of this store were missed: watch it anew."""

    node_id: NodeId


@value_class(frozen=True, slots=True)
class PrefillFinished:
    """What was predicted and what came, to keep score of the predictions."""

    attempt_id: AttemptId
    predicted_ttft_ms: float
    actual_ttft_ms: float
    prompt_tokens: int
    cached_tokens: int


@value_class(frozen=True, slots=True)
class Scored:
    """An attempt ended well: all that was predicted of it, beside what came."""

    attempt_id: AttemptId
    request_id: RequestId | None
    scores: tuple[Score, ...]


@value_class(frozen=True, slots=True)
class Forgot:
    """Attempts whose gateway was silent for a lease."""

    attempt_ids: tuple[AttemptId, ...]


@value_class(frozen=True, slots=True)
class HungChanged:
    """These are all the instances that hang and whose work can go on elsewhere. Gateways are told."""

    instances: tuple[InstanceRef, ...]


@value_class(frozen=True, slots=True)
class Replicate:
    """A store is to take a copy of a prefix. Its end is told as a ReplicationEnded."""

    node_id: NodeId
    store_address: str
    """gRPC host:port of that store."""
    keys: tuple[BlockKey, ...]
    """From the first block of a prompt on; those that the store holds already are not copied."""
    sources: tuple[PrefixSource, ...]
    """Best first; each holds all of `keys`."""
    num_bytes: int
    """Of the blocks that it lacks."""
    within_s: float
    """When nothing has been heard by then, it is taken for lost."""


@value_class(frozen=True, slots=True)
class MoveAttempts:
    """These attempts of a gateway had better go on decoding elsewhere. It asks for successors of them, if they still run."""

    gateway_id: GatewayId
    attempt_ids: tuple[AttemptId, ...]


@value_class(frozen=True, slots=True)
class SwitchRole:
    """An instance is to finish what it has, for so long at the most, and to serve on in the other role, under the same id."""

    instance: InstanceRef
    order: RoleSwitch


Action = Decided | RequestSnapshot | PrefillFinished | Scored | Forgot | HungChanged | Replicate | MoveAttempts | SwitchRole
