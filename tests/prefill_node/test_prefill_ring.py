"""Activations on their way from one stage to the next."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from prefill_node.stage.ring import Arrival, Ring, RingShape, shared_on
from springtide.errors import PeerLost
from tests.support.waiting import until

SHAPE = RingShape(depth=2, rows=5, hidden=7, dtype=torch.bfloat16)


async def test_activations_arrive_as_they_were_sent_and_in_their_order(tmp_path: Path) -> None:
    arrivals: list[Arrival] = []
    first = Ring("first", shared_on(tmp_path / "first"), SHAPE, lambda arrival: None)
    second = Ring("second", shared_on(tmp_path / "second"), SHAPE, arrivals.append)
    await first.start()
    await first.connect(await second.start())
    sent = [torch.randn(rows, SHAPE.hidden).to(SHAPE.dtype) for rows in (5, 3, 1)]
    for pass_id, hidden in enumerate(sent[:2]):
        first.outgoing(pass_id, len(hidden)).copy_(hidden)
    await asyncio.gather(*(first.send(pass_id, len(hidden), void=False) for pass_id, hidden in enumerate(sent[:2])))
    assert arrivals == [Arrival(0, False), Arrival(1, False)]
    assert all(torch.equal(second.incoming(Arrival(pass_id, False), len(hidden)), hidden) for pass_id, hidden in enumerate(sent[:2]))
    first.outgoing(2, 1).copy_(sent[2])
    await first.send(2, 1, void=False)
    assert torch.equal(second.incoming(Arrival(2, False), 1), sent[2])
    assert torch.equal(second.incoming(Arrival(1, False), 3), sent[1]), "a further pass takes none but that of one that ended"
    for ring in (first, second):
        await ring.close()


async def test_of_a_void_pass_only_word_arrives(tmp_path: Path) -> None:
    arrivals: list[Arrival] = []
    first, second = (
        Ring("first", shared_on(tmp_path / "1"), SHAPE, lambda arrival: None),
        Ring("second", shared_on(tmp_path / "2"), SHAPE, arrivals.append),
    )
    await first.start()
    await first.connect(await second.start())
    second.incoming(Arrival(0, True), 5).fill_(1.0)
    await first.send(0, 5, void=True)
    assert arrivals == [Arrival(0, True)] and bool((second.incoming(Arrival(0, True), 5) == 1.0).all())
    for ring in (first, second):
        await ring.close()


async def test_a_next_stage_that_is_gone_is_an_error_of_sending(tmp_path: Path) -> None:
    first, second = (Ring(name, shared_on(tmp_path / name), SHAPE, lambda arrival: None) for name in ("first", "second"))
    await first.start()
    await first.connect(await second.start())
    await second.close()
    with pytest.raises(PeerLost):
        await first.send(0, 1, void=False)
    await first.close()
    await until(lambda: not (tmp_path / "first").exists())
