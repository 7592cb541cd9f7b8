"""What gRPC servers have beside their own services."""

from __future__ import annotations

from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection


def add_health(server: grpc.aio.Server) -> Any:
    """Health checking, of type `health.aio.HealthServicer`; it knows no service yet."""
    servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # its stubs lack it
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer


async def add_health_and_reflection(server: grpc.aio.Server, *services: str) -> None:
    """Reports `services`, and the server as a whole, as serving from the start; all can be found by reflection."""
    servicer = add_health(server)
    for name in ("", *services):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
