"""Words between the first store of a bundle and its layer stores: the stores of the nodes of a prefill group's further stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated

from springtide.blocks import checked_keys
from springtide.errors import InvalidRequest
from springtide.ids import BlockKey, Incarnation, NodeId
from springtide.protocol.codec import As
from springtide.protocol.outputs import Failure
from springtide.protocol.storage import KEYS, LayersAt
from springtide.values import value_class

PARENTS = As(
    lambda parents: [parent or b"" for parent in parents],
    lambda raw: tuple(checked_keys([parent])[0] if parent else None for parent in raw),
)
"""None: the block is the first of a prompt."""

# ---- orders: first store to layer store ----


@value_class(frozen=True, slots=True)
class JoinBundle:
    """The first order: whose bundle it is."""

    node_id: NodeId
    incarnation: Incarnation


@value_class(frozen=True, slots=True)
class SetGenerations:
    """What peers have to know of these slots from now on: older handles are stale."""

    slots: Sequence[int]
    generations: Sequence[int]


LayerOrder = JoinBundle | SetGenerations

# ---- reports: layer store to first store ----


@value_class(frozen=True, slots=True)
class SsdState:
    """How the SSD of a layer store is, counted in blocks."""

    state: str
    """Of kvstore.ssd.health.TierState."""
    held: int
    free: int
    capacity: int
    retired: int
    dropped: Mapping[str, int]
    first_read_s: float
    """What reading one block would take now."""
    next_read_s: float
    """What each further one would add to that."""
    hanging_s: float
    """How long the oldest read in flight has not come back."""


@value_class(frozen=True, slots=True)
class BundleJoined:
    """The answer to JoinBundle: what there is."""

    node_id: NodeId
    at: LayersAt
    num_slots: int
    """At most."""
    ssd: SsdState | None
    """None: it has no SSD."""


@value_class(frozen=True, slots=True)
class StillThere:
    """A sign of life, twice a second."""

    ssd: SsdState | None


LayerReport = BundleJoined | StillThere

# ---- moves ----


@value_class(frozen=True, slots=True)
class Move:
    """Slices are to be read from a peer, or written to it. Each has its place in four columns. Raises InvalidRequest when these are not
    equally long."""

    move_id: int
    endpoint: str
    """Of the peer's Messenger, as JSON."""
    reads: bool
    local_offsets: Sequence[int]
    remote_offsets: Sequence[int]
    lengths: Sequence[int]
    generations: Sequence[int]
    timeout_s: float

    def __post_init__(self) -> None:
        columns = {len(column) for column in (self.local_offsets, self.remote_offsets, self.lengths, self.generations)}
        if len(columns) != 1:
            raise InvalidRequest(f"the columns of a move must be equally long, not {sorted(columns)}", param="lengths")


@value_class(frozen=True, slots=True)
class Moved:
    """What came of a move."""

    num_bytes: int
    failed: Mapping[int, str] = field(default_factory=dict)
    """Slices by index, and why."""
    failure: Failure | None = None
    """The whole of it came to nothing."""


# ---- the SSD of a layer store ----


@value_class(frozen=True, slots=True)
class KeptBlocks:
    """A part of what it has from before, parents before their children."""

    keys: Annotated[tuple[BlockKey, ...], KEYS]


@value_class(frozen=True, slots=True)
class PutCopies:
    """What was copied out of slots is to be written: blocks in three columns. Raises InvalidRequest when these are not equally long."""

    copy_id: int
    places: Sequence[int]
    """Which of the slots that were copied."""
    keys: Annotated[tuple[BlockKey, ...], KEYS]
    parents: Annotated[tuple[BlockKey | None, ...], PARENTS]

    def __post_init__(self) -> None:
        if not len(self.places) == len(self.keys) == len(self.parents):
            columns = len(self.places), len(self.keys), len(self.parents)
            raise InvalidRequest(f"places, keys and parents must be equally many, not {columns}", param="keys")


@value_class(frozen=True, slots=True)
class CopiesPut:
    """What came of it."""

    held: Sequence[bool]
    """Of each block, whether it is there now."""
    lacking: Annotated[tuple[BlockKey, ...], KEYS]
    """Parents that are not there."""
    ssd: SsdState


@value_class(frozen=True, slots=True)
class GetCopies:
    """Blocks are to be read. Raises InvalidRequest when there are other slots than one for each, or none at all."""

    keys: Annotated[tuple[BlockKey, ...], KEYS]
    slots: Sequence[int]
    """None at all: they are read to be verified."""

    def __post_init__(self) -> None:
        if len(self.slots) not in (0, len(self.keys)):
            raise InvalidRequest(f"slots must be one for each of {len(self.keys)} blocks, or none, not {len(self.slots)}", param="slots")


@value_class(frozen=True, slots=True)
class CopiesGot:
    """What came of it."""

    failed: Mapping[int, str]
    """Blocks by index, and why."""
    ssd: SsdState


@value_class(frozen=True, slots=True)
class RemoveCopies:
    """Blocks are to go, children before their parents."""

    keys: Annotated[tuple[BlockKey, ...], KEYS]
