"""Blocks on SSD are held, but reading them takes time. 400 prompt tokens are 100 blocks; a block takes 4 ms to compute."""

from __future__ import annotations

import pytest
from conductor_support import assigned, hold, keys_of, make_core, report, request

from conductor.core.conductor import ConductorCore
from springtide.ids import Incarnation, NodeId
from springtide.protocol.instances import Role
from springtide.protocol.storage import BlocksStored, Tier


def put_on_ssd(core: ConductorCore, node: str, num_blocks: int, read_us: int) -> None:
    core.handle(BlocksStored(NodeId(node), Incarnation(1), 1, tuple(keys_of(num_blocks)), Tier.SSD), 0.0)
    report(core, node, Role.PREFILL, ssd_read_us_per_block=read_us)


def test_reading_from_the_ssd_is_added_as_a_transfer_is() -> None:
    core = make_core(prefills=["p0"])
    hold(core, "p0", keys_of(10))
    put_on_ssd(core, "p0", 50, read_us=1000)
    assignment = assigned(core, request("a"))
    assert assignment.local_blocks == 50
    assert assignment.predicted_ttft_ms == pytest.approx(401 - 200 + 40)


def test_of_two_holders_the_one_with_the_prefix_in_dram_is_chosen() -> None:
    core = make_core()
    put_on_ssd(core, "p0", 50, read_us=1000)
    hold(core, "p1", keys_of(50))
    assert assigned(core, request("a")).prefill.instance_id == "p1"


def test_an_ssd_that_is_slower_than_computing_counts_for_nothing() -> None:
    core = make_core(prefills=["p0"])
    hold(core, "p0", keys_of(10))
    put_on_ssd(core, "p0", 50, read_us=5000)
    assignment = assigned(core, request("a"))
    assert assignment.local_blocks == 10
    assert assignment.predicted_ttft_ms == pytest.approx(401 - 40)
