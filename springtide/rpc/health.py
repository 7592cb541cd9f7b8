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


async def add_health_and_reflection(server: grpc.aio.Server, service: str) -> None:
    """Reports `service`, and the server as a whole, as serving from the start; both can be found by reflection."""
    servicer = add_health(server)
    for name in ("", service):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
