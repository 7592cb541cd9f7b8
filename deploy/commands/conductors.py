"""What each Conductor of a cluster says of it, and which of them leads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from springtide.credentials import Credentials
from springtide.errors import Unavailable
from springtide.membership import Member
from springtide.protocol import wire
from springtide.protocol.status import ClusterStatus
from springtide.rpc import conductor_pb2, conductor_pb2_grpc
from springtide.rpc.channels import connect

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class View:
    conductor_id: str
    status: ClusterStatus | None
    """None: it does not answer."""
    problem: str = ""

    @property
    def leads(self) -> bool:
        return self.status is not None and self.status.leads


async def views(members: Sequence[Member], credentials: Credentials) -> list[View]:
    """The views of every Conductor among the members, the leader's first."""
    asked = await asyncio.gather(*(_view(member, credentials) for member in members if member.role == "conductor"))
    return sorted(asked, key=lambda view: (not view.leads, view.status is None))


def cluster_status(found: Sequence[View]) -> ClusterStatus:
    """The leader's or, when none leads, a standby's. Raises Unavailable when none answers."""
    for view in found:
        if view.status is not None:
            return view.status
    raise Unavailable("; ".join(view.problem for view in found))


def leader(found: Sequence[View]) -> View | None:
    """None when none is known to lead."""
    return next((view for view in found if view.leads), None)


def leaders_status(found: Sequence[View]) -> ClusterStatus | None:
    """None when none is known to lead."""
    leads = leader(found)
    return None if leads is None else leads.status


def leadership(found: Sequence[View]) -> str:
    """A line on who leads and who stands by."""
    leads = leader(found)
    said = "[red]no Conductor leads" if leads is None else f"{leads.conductor_id} leads"
    epoch = max((view.status.epoch for view in found if view.status is not None), default=0)
    said += f"{'[/]' if leads is None else ''}{f' (epoch {epoch})' if epoch else ''}"
    for view in found:
        if view is not leads:
            said += f", {view.conductor_id} {'stands by' if view.status is not None else '[red]does not answer[/]'}"
    return said


async def _view(member: Member, credentials: Credentials) -> View:
    async with connect(member.address, credentials) as channel:
        try:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            reply = await stub.GetCluster(conductor_pb2.GetClusterRequest(), timeout=TIMEOUT_S)
            return View(member.member_id, wire.CLUSTER_STATUS.decode(reply))
        except grpc.aio.AioRpcError as error:
            return View(member.member_id, None, f"the Conductor at {member.address} does not answer: {error.details()}")
