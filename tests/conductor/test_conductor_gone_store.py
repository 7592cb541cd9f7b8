"""What is heard of a store while it is not up."""

from __future__ import annotations

from conductor_support import assigned, keys_of, make_core, request

from conductor.core.types.events import StoreDown
from springtide.ids import Incarnation, NodeId
from springtide.protocol.storage import SnapshotPart, Tier


def test_a_late_snapshot_of_a_store_that_is_gone_makes_it_nobodys_source() -> None:
    core = make_core(prefills=["p0"], decodes=["d0"])
    core.handle(StoreDown(NodeId("d0")), 0.0)
    core.handle(SnapshotPart(NodeId("d0"), Incarnation(1), 0, tuple(keys_of(100)), Tier.DRAM, complete=True), 0.0)
    assert core.handle(request("asks"), 0.0)[0].alternatives.holders, "it is still found"  # type: ignore[union-attr]
    assert assigned(core, request("a")).sources == ()
    core.validate()
