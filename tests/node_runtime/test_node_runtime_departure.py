"""An engine that is to switch its role takes its leave once and ends what it has."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

import pytest

from node_runtime.departure import Departure, RoleOrder, drained
from springtide.clock import ManualClock
from springtide.errors import InvalidRequest
from springtide.rpc.node_pb2 import SwitchRoleRequest


async def test_the_first_order_counts() -> None:
    departure = Departure("prefill")
    waiting = asyncio.create_task(departure.ordered())
    departure.take(SwitchRoleRequest(role="decode", drain_ms=1_500))
    departure.take(SwitchRoleRequest(role="decode", drain_ms=9_000))
    assert await waiting == RoleOrder("decode", 1.5)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (SwitchRoleRequest(role="prefill"), "role"),
        (SwitchRoleRequest(role="store"), "role"),
        (SwitchRoleRequest(), "role"),
        (SwitchRoleRequest(role="decode", drain_ms=-1), "drain_ms"),
        (SwitchRoleRequest(role="decode", drain_ms=float("nan")), "drain_ms"),
    ],
)
async def test_an_order_that_makes_no_sense_is_refused_by_the_name_of_its_field(request_: SwitchRoleRequest, field: str) -> None:
    departure = Departure("prefill")
    with pytest.raises(InvalidRequest, match=field):
        departure.take(request_)
    assert departure.order is None


class Looks:
    """Whether there is work, each look a quarter of a second after the one before."""

    def __init__(self, answers: Iterable[bool]) -> None:
        self.clock = ManualClock()
        self.count = 0
        self._answers = iter(answers)

    def __call__(self) -> bool:
        self.count += 1
        self.clock.advance(0.25)
        return next(self._answers)


async def test_what_runs_is_waited_for_and_what_comes_late_too() -> None:
    looks = Looks(itertools.chain([True] * 3, [False], [True] * 2, itertools.repeat(False)))
    assert await drained(looks, drain_s=60.0, clock=looks.clock)
    assert looks.count == 8, "half a second without work, after the last"


async def test_the_wait_has_an_end() -> None:
    looks = Looks(itertools.repeat(True))
    assert not await drained(looks, drain_s=2.0, clock=looks.clock)
    assert looks.clock.now() == pytest.approx(2.0, abs=0.5)
