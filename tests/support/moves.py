"""Orders to have sequences move from one decode node to others, as an operator gives them."""

from __future__ import annotations

import grpc

from springtide.rpc import conductor_pb2
from springtide.rpc.conductor_pb2_grpc import ConductorStub
from tests.support.cluster import Cluster


def move(cluster: Cluster, instance_id: str, most: int) -> int:
    """How many have been told to; none while the Conductor or the node is being started anew."""
    address = next((member.address for member in cluster.members() if member.role == "conductor"), None)
    if address is None:
        return 0
    request = conductor_pb2.MoveAttemptsRequest(instance_id=instance_id, most=most)
    try:
        with cluster.channel(address) as channel:
            return ConductorStub(channel).MoveAttempts(request, timeout=5, metadata=cluster.metadata).attempts
    except grpc.RpcError:
        return 0


def num_moved(cluster: Cluster) -> float:
    """How many requests of the first gateway have moved."""
    return cluster.metric("gateway-0", "springtide_gateway_moves_total", labels={"outcome": "moved"})
