"""What stores say to each other and to whoever watches them, through the wire and back."""

from __future__ import annotations

from typing import Any

import pytest

from springtide.errors import InvalidRequest
from springtide.ids import AttemptId, BlockKey, Incarnation, NodeId, Slot
from springtide.protocol import wire
from springtide.protocol.codec import Codec
from springtide.protocol.scheduling import PrefixSource
from springtide.protocol.storage import (
    BlocksRemoved,
    BlocksStored,
    CloseIngest,
    IngestNotice,
    IngestSeal,
    IngestTargets,
    IngestUnit,
    LeasedPrefix,
    LeasePrefix,
    OpenIngest,
    Replicated,
    ReplicatePrefix,
    SnapshotPart,
    StillHere,
    StoreEvent,
    Tier,
    Unit,
    Writer,
)
from springtide.rpc import store_pb2 as pb

NODE, INCARNATION, ATTEMPT = NodeId("prefill-0"), Incarnation(1 << 63), AttemptId("a")
KEYS = (BlockKey(b"k" * 16), BlockKey(b"l" * 16))
WRITER = Writer(NODE, INCARNATION, "here:1")


@pytest.mark.parametrize(
    "event",
    [
        SnapshotPart(NODE, INCARNATION, 0, (), Tier.DRAM, complete=True),
        SnapshotPart(NODE, INCARNATION, 7, KEYS, Tier.SSD, complete=False),
        BlocksStored(NODE, INCARNATION, 1, KEYS, Tier.DRAM),
        BlocksRemoved(NODE, INCARNATION, 2, KEYS[::-1], Tier.SSD),
        StillHere(2),
    ],
)
def test_what_a_watcher_hears_comes_through_the_wire_as_it_is(event: StoreEvent) -> None:
    message = wire.STORE_EVENT.encode(event).SerializeToString()
    assert wire.STORE_EVENT.decode(pb.StoreEvent.FromString(message)) == event


@pytest.mark.parametrize(
    "message",
    [
        pb.StoreEvent(),
        pb.StoreEvent(stored=pb.BlocksStored(keys=KEYS)),
        pb.StoreEvent(stored=pb.BlocksStored(keys=KEYS, tier=99)),  # type: ignore[arg-type]
    ],
)
def test_an_event_of_no_known_kind_or_tier_is_refused(message: pb.StoreEvent) -> None:
    with pytest.raises(ValueError, match=r"StoreEvent must have one of|BlocksStored\.tier must be one of DRAM, SSD"):
        wire.STORE_EVENT.decode(message)


@pytest.mark.parametrize(
    ("codec", "word"),
    [
        (wire.LEASE_PREFIX, LeasePrefix(NODE, KEYS)),
        (wire.LEASE_PREFIX, LeasePrefix(NODE, KEYS, tenant="")),
        (wire.LEASED_PREFIX, LeasedPrefix(3, INCARNATION, (Slot(4), Slot(9)), (1, 1 << 40), 30_000, "acme")),
        (wire.OPEN_INGEST, OpenIngest(ATTEMPT, WRITER)),
        (wire.INGEST_TARGETS, IngestTargets(INCARNATION)),
        (wire.INGEST_TARGETS, IngestTargets(INCARNATION, (Slot(4), Slot(9)), (1, 2), present_blocks=1)),
        (wire.CLOSE_INGEST, CloseIngest(ATTEMPT, WRITER)),
        (wire.REPLICATE_PREFIX, ReplicatePrefix(KEYS, (PrefixSource(NODE, "there:1", 2),))),
        (wire.REPLICATED, Replicated(2, 1)),
    ],
)
def test_what_stores_ask_of_each_other_comes_through_the_wire_as_it_is(codec: Codec[Any, Any], word: Any) -> None:
    message = codec.encode(word).SerializeToString()
    assert codec.decode(codec.message.FromString(message)) == word


def test_a_writers_address_comes_through_though_it_does_not_tell_writers_apart() -> None:
    assert wire.WRITER.decode(wire.WRITER.encode(WRITER)).address == "here:1"
    assert Writer(NODE, INCARNATION, "elsewhere:2") == WRITER


@pytest.mark.parametrize("notice", [IngestUnit(ATTEMPT, Unit(0, 2, 3, 5)), IngestSeal(ATTEMPT, 77)])
def test_what_follows_written_bytes_comes_through_the_wire_as_it_is(notice: IngestNotice) -> None:
    payload = wire.INGEST_NOTICE.encode(notice).SerializeToString()
    assert wire.INGEST_NOTICE.decode(pb.IngestNotice.FromString(payload)) == notice


@pytest.mark.parametrize(
    ("codec", "message", "field"),
    [
        (wire.LEASED_PREFIX, pb.LeaseReply(lease_id=3, slots=[4, 9], generations=[1]), "generations"),
        (wire.LEASED_PREFIX, pb.LeaseReply(lease_id=3, slots=[4], generations=[1, 2]), "generations"),
        (wire.INGEST_TARGETS, pb.OpenIngestReply(slots=[4, 9], generations=[1]), "generations"),
        (wire.INGEST_TARGETS, pb.OpenIngestReply(slots=[4, 9], generations=[1, 2], present_blocks=3), "present_blocks"),
        (wire.INGEST_TARGETS, pb.OpenIngestReply(present_blocks=1), "present_blocks"),
    ],
)
def test_an_answer_whose_columns_do_not_fit_is_refused_by_the_field(codec: Codec[Any, Any], message: Any, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field} must be") as refused:
        codec.decode(message)
    assert refused.value.param == field


def test_a_key_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        wire.LEASE_PREFIX.decode(pb.LeaseRequest(reader="r", keys=[b"short"]))
