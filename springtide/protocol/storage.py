"""What a store is told and what it says: by and to its engine, other stores, and whoever watches what it holds."""

from __future__ import annotations

from dataclasses import field
from enum import Enum
from typing import Annotated

from springtide.blocks import checked_keys
from springtide.errors import InvalidRequest
from springtide.ids import AttemptId, BlockKey, Incarnation, InstanceId, NodeId, Slot
from springtide.protocol.codec import As
from springtide.protocol.outputs import AttemptFailed, Failure, HandedOver
from springtide.protocol.scheduling import PrefixSource
from springtide.values import value_class

KEYS = As(list, lambda keys: tuple(checked_keys(keys)))
"""From the first block of a prompt on. Raises InvalidRequest, naming one that is none."""


class Tier(Enum):
    """Where a store holds a block."""

    DRAM = "dram"
    SSD = "ssd"


@value_class(frozen=True, slots=True)
class Unit:
    """Layers [layer_begin, layer_end) of blocks [block_begin, block_end) of a prompt: what a layer stream moves at a time."""

    layer_begin: int
    layer_end: int
    block_begin: int
    block_end: int


# ---- the first words between a store and its engine ----


@value_class(frozen=True, slots=True)
class EngineHello:
    """First on the stream: who the engine is."""

    instance_id: InstanceId
    incarnation: Incarnation


@value_class(frozen=True, slots=True)
class StoreHello:
    """The answer. The arena itself is received as a file descriptor over the store's Unix socket."""

    node_id: NodeId
    incarnation: Incarnation
    num_slots: int
    address: str
    """gRPC host:port of the store, for other stores."""


# ---- orders: engine to store ----


@value_class(frozen=True, slots=True)
class Acquire:
    """Prefill side. Slots for a whole prompt: the longest prefix of `keys` that is here or at a source, and new slots for the rest.
    Answered by Acquired or AttemptFailed."""

    attempt_id: AttemptId
    keys: Annotated[tuple[BlockKey, ...], KEYS]
    num_blocks: int
    """All of them, the last possibly partial: at least as many as `keys`."""
    max_reused_blocks: int
    sources: tuple[PrefixSource, ...] = ()
    """Where more of the prefix may be read, best first: a later one serves when those before fail, and helps when they are slow."""
    tenant: str = ""
    """Pays for the slots; blocks of other tenants are not seen."""
    recompute_us_per_block: int | None = None
    """What the engine expects to take for each reusable block to compute it: blocks on the node's SSD are read when that is sooner. None:
    always."""
    leave_available: int = 0
    """So many slots have to be available still once it has its own: for what others here are expected to grow by."""
    leave_in_quota: int = 0
    """Likewise of its tenant's quota: for what others of the tenant are expected to grow by."""


@value_class(frozen=True, slots=True)
class Reserve:
    """Decode side. Slots for a prompt that a peer will write. Answered by Reserved or AttemptFailed, later by Ingested. Fields as of
    Acquire."""

    attempt_id: AttemptId
    keys: Annotated[tuple[BlockKey, ...], KEYS]
    num_blocks: int
    tenant: str = ""
    leave_available: int = 0
    leave_in_quota: int = 0


@value_class(frozen=True, slots=True)
class Grow:
    """More slots for an attempt that runs. Answered by Grown or AttemptFailed (POOL_FULL, QUOTA_USED: what the attempt has, it keeps)."""

    attempt_id: AttemptId
    num_blocks: int


@value_class(frozen=True, slots=True)
class Commit:
    """Blocks [first_block, first_block + len(keys)) of the attempt are complete in every layer and never change again."""

    attempt_id: AttemptId
    first_block: int
    keys: Annotated[tuple[BlockKey, ...], KEYS]


@value_class(frozen=True, slots=True)
class OpenHandOver:
    """Prefill side. The attempt's blocks are to be pushed to the store at the address. Failure comes as HandOverFailed."""

    attempt_id: AttemptId
    address: str
    node_id: NodeId


@value_class(frozen=True, slots=True)
class Push:
    """The slabs of these layers and blocks are final: write them to the decode side."""

    attempt_id: AttemptId
    layer_begin: int
    layer_end: int
    block_begin: int
    block_end: int


@value_class(frozen=True, slots=True)
class Seal:
    """Everything has been pushed. Answered by HandedOver or HandOverFailed."""

    attempt_id: AttemptId
    first_token: int


@value_class(frozen=True, slots=True)
class Release:
    """The last order for an attempt: from here on its slots belong to the store again."""

    attempt_id: AttemptId
    finish_hand_over: bool = False


Order = Acquire | Reserve | Grow | Commit | OpenHandOver | Push | Seal | Release

# ---- notices: store to engine ----


@value_class(frozen=True, slots=True)
class Acquired:
    """The first `local_blocks` of `slots` hold a prefix of the prompt and are shared: not to be written."""

    attempt_id: AttemptId
    slots: tuple[Slot, ...]
    local_blocks: int
    remote_blocks: int = 0
    """Those that follow, on their way from the sources; FetchProgress tells layer by layer."""


@value_class(frozen=True, slots=True)
class FetchProgress:
    """Every remote block of the attempt is here up to, not including, this layer."""

    attempt_id: AttemptId
    layers_ready: int


@value_class(frozen=True, slots=True)
class FetchTruncated:
    """The fetch failed in part: only so many blocks of the prefix (local and remote) are or will be valid, in all layers. Ends the
    fetch."""

    attempt_id: AttemptId
    valid_blocks: int


@value_class(frozen=True, slots=True)
class Reserved:
    """The first `present_blocks` of `slots` are here already; the others a peer will write."""

    attempt_id: AttemptId
    slots: tuple[Slot, ...]
    present_blocks: int


@value_class(frozen=True, slots=True)
class Ingested:
    """Every block of the prompt is in the arena."""

    attempt_id: AttemptId
    first_token: int


@value_class(frozen=True, slots=True)
class Grown:
    """The slots that the attempt has got in addition."""

    attempt_id: AttemptId
    slots: tuple[Slot, ...]


@value_class(frozen=True, slots=True)
class HandOverFailed:
    """What was pushed will not arrive."""

    attempt_id: AttemptId
    failure: Failure


@value_class(frozen=True, slots=True)
class StoreLoad:
    """How full the store is. Sent when it changes, at most every 100 ms, and at least every half second: an engine takes silence for a
    hang."""

    slots_free: int
    slots_available: int
    """Free or evictable."""
    ssd_read_us_per_block: int = 0
    """Estimated for a block that is read from the SSD now, in steps of a power of two; 0: there is no SSD tier."""


Notice = Acquired | FetchProgress | FetchTruncated | Reserved | Ingested | Grown | HandedOver | HandOverFailed | AttemptFailed | StoreLoad
EngineCommand = EngineHello | Order
StoreNotice = StoreHello | Notice

# ---- events: a store to whoever watches it ----


@value_class(frozen=True, slots=True)
class SnapshotPart:
    """Blocks that a tier of the store held as of event `sequence`. The part that is `complete` is the last one of the snapshot."""

    node_id: NodeId
    incarnation: Incarnation
    sequence: int
    keys: tuple[BlockKey, ...]
    tier: Tier
    complete: bool


@value_class(frozen=True, slots=True)
class BlocksStored:
    """Blocks that entered a tier of the store, ancestors first. The `sequence` counts an incarnation's events from 1 without a gap, over
    all tiers."""

    node_id: NodeId
    incarnation: Incarnation
    sequence: int
    keys: tuple[BlockKey, ...]
    tier: Tier


@value_class(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that left a tier of the store, ancestors last. Fields as of BlocksStored."""

    node_id: NodeId
    incarnation: Incarnation
    sequence: int
    keys: tuple[BlockKey, ...]
    tier: Tier


@value_class(frozen=True, slots=True)
class StillHere:
    """A sign of life, where nothing has happened for half a second: silence means that the store hangs."""

    sequence: int
    """The number of the last event."""


BlockEvent = BlocksStored | BlocksRemoved
StoreEvent = SnapshotPart | BlockEvent | StillHere

# ---- between stores ----


@value_class(frozen=True, slots=True)
class LeasePrefix:
    """A prefix is to be kept for a reader until it has read it by Messenger. Answered by LeasedPrefix."""

    reader: NodeId
    keys: Annotated[tuple[BlockKey, ...], KEYS]
    tenant: str | None = None
    """Whose the blocks are, if the reader knows: only then are those brought into the arena of which all are on the SSD."""


@value_class(frozen=True, slots=True)
class LeasedPrefix:
    """The longest prefix of the keys asked for that is in the arena, referenced for `ttl_ms` and for as long again at each renewal. Where
    nothing is held there is no lease: its id is 0. Raises InvalidRequest, naming the field."""

    lease_id: int
    incarnation: Incarnation
    slots: tuple[Slot, ...]
    """The slot of each block."""
    generations: tuple[int, ...]
    """The generation of each slot, which makes its handle stale once it is given to another block."""
    ttl_ms: int
    tenant: str
    """Whose blocks they are, if there are any."""

    def __post_init__(self) -> None:
        _check_handles(self.slots, self.generations)


@value_class(frozen=True, slots=True)
class StoreIncarnation:
    """A store's process, as its Messenger tells peers."""

    node_id: NodeId
    incarnation: Incarnation


@value_class(frozen=True, slots=True)
class LayersAt:
    """Where the slabs of layers [layer_begin, layer_end) of every slot lie, one after another."""

    layer_begin: int
    layer_end: int
    endpoint: str
    """Of a Messenger, as JSON."""

    @property
    def layers(self) -> range:
        return range(self.layer_begin, self.layer_end)


@value_class(frozen=True, slots=True)
class Writer:
    """A store that may write slots of another one, until it has closed the ingest or has been fenced."""

    node_id: NodeId
    incarnation: Incarnation
    address: str = field(compare=False)
    """gRPC host:port, to be asked whether it still writes."""
    beside: tuple[StoreIncarnation, ...] = field(default=(), compare=False)
    """The other stores of its bundle, which write for it: they are fenced with it, and end when it does."""


@value_class(frozen=True, slots=True)
class OpenIngest:
    """The writer asks where it is to put an attempt's prompt. Answered by IngestTargets."""

    attempt_id: AttemptId
    writer: Writer


@value_class(frozen=True, slots=True)
class IngestTargets:
    """The slots into which a prompt's blocks are to be written, the last possibly partial. None: nothing has been reserved yet, ask
    again. Raises InvalidRequest, naming the field."""

    incarnation: Incarnation
    slots: tuple[Slot, ...] = ()
    generations: tuple[int, ...] = ()
    """The generation of each slot, as in LeasedPrefix."""
    present_blocks: int = 0
    """The number of first blocks that are there already: they are not to be written."""

    def __post_init__(self) -> None:
        _check_handles(self.slots, self.generations)
        if self.present_blocks > len(self.slots):
            raise InvalidRequest(f"present_blocks must be at most {len(self.slots)}, not {self.present_blocks}", param="present_blocks")


@value_class(frozen=True, slots=True)
class CloseIngest:
    """The writer promises that it will not write again for this attempt. Another writer's is a no-op."""

    attempt_id: AttemptId
    writer: Writer


@value_class(frozen=True, slots=True)
class IngestUnit:
    """The writer's bytes of a unit are in place."""

    attempt_id: AttemptId
    unit: Unit


@value_class(frozen=True, slots=True)
class IngestSeal:
    """The writer has written all of the prompt."""

    attempt_id: AttemptId
    first_token: int


IngestNotice = IngestUnit | IngestSeal
"""The payload of a Messenger notification."""


def _check_handles(slots: tuple[Slot, ...], generations: tuple[int, ...]) -> None:
    if len(slots) != len(generations):
        raise InvalidRequest(f"generations must be one for each of {len(slots)} slots, not {len(generations)}", param="generations")


# ---- by order of whoever places replicas ----


@value_class(frozen=True, slots=True)
class ReplicatePrefix:
    """A store is to take a copy of a prefix for itself. Answered by Replicated."""

    keys: Annotated[tuple[BlockKey, ...], KEYS]
    sources: tuple[PrefixSource, ...]
    """Best first."""


@value_class(frozen=True, slots=True)
class Replicated:
    """How an order to replicate ended."""

    blocks: int
    """The length of the longest prefix of the keys that is here now."""
    fetched_blocks: int
    """The number of those that were fetched by this order."""
