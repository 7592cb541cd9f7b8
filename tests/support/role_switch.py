"""Engines that are told to serve in the other role, as a Conductor tells them."""

from __future__ import annotations

from springtide.membership import Member
from springtide.protocol import wire
from springtide.protocol.instances import Role, RoleSwitch
from springtide.rpc.node_pb2_grpc import DecodeNodeStub, PrefillNodeStub
from tests.support.cluster import Cluster


def engine(cluster: Cluster, name: str) -> Member:
    """What the engine of that name says of itself."""
    return next(member for member in cluster.members() if member.member_id == name and member.role != "store")


def switch(cluster: Cluster, name: str, to: Role, drain_s: float = 0.0) -> None:
    member = engine(cluster, name)
    with cluster.channel(member.address) as channel:
        stub = PrefillNodeStub(channel) if member.role == "prefill" else DecodeNodeStub(channel)
        stub.SwitchRole(wire.ROLE_SWITCH.encode(RoleSwitch(to, drain_s)), timeout=10, metadata=cluster.metadata)
