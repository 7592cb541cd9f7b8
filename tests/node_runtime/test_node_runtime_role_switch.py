"""An engine that is to switch its role takes its leave once and ends what it has."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

import pytest

from node_runtime.role_switch import PendingSwitch, drained
from springtide.clock import ManualClock
from springtide.errors import InvalidRequest
from springtide.protocol import wire
from springtide.protocol.instances import Role, RoleSwitch
from springtide.rpc.common_pb2 import ROLE_DECODE
from springtide.rpc.node_pb2 import SwitchRoleRequest


async def test_the_first_order_counts() -> None:
    pending = PendingSwitch(Role.PREFILL)
    waiting = asyncio.create_task(pending.ordered())
    pending.take(RoleSwitch(Role.DECODE, 1.5))
    pending.take(RoleSwitch(Role.DECODE, 9.0))
    assert await waiting == RoleSwitch(Role.DECODE, 1.5)


def test_an_order_to_the_role_that_it_has_is_refused() -> None:
    pending = PendingSwitch(Role.PREFILL)
    with pytest.raises(InvalidRequest, match="`to` must be decode"):
        pending.take(RoleSwitch(Role.PREFILL, 1.0))
    assert pending.order is None


def test_an_engine_that_keeps_its_role_says_why() -> None:
    pending = PendingSwitch(Role.PREFILL, "its node's store has some of the layers alone")
    with pytest.raises(InvalidRequest, match="`to` cannot be decode: its node's store has some of the layers alone"):
        pending.take(RoleSwitch(Role.DECODE, 1.0))
    assert pending.order is None and not pending.leaving


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (SwitchRoleRequest(drain_s=1), "RoleSwitch.to"),
        (SwitchRoleRequest(to=ROLE_DECODE, drain_s=-1), "drain_s"),
        (SwitchRoleRequest(to=ROLE_DECODE, drain_s=float("nan")), "drain_s"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused_by_the_name_of_its_field(request_: SwitchRoleRequest, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        wire.ROLE_SWITCH.decode(request_)


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
