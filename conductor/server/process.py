"""The Conductor's process, from its start to its orderly end."""

from __future__ import annotations

import asyncio

from conductor.gateway.app import serve_gateway
from conductor.server.server import ConductorServer
from springtide.process import ProcessArguments


async def serve(arguments: ProcessArguments, stop: asyncio.Event) -> None:
    """Runs the Conductor and, unless `server.separate_gateway`, a gateway beside it, until `stop`."""
    server = ConductorServer(arguments)
    try:
        address = await server.start()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.run(stop))
            if not arguments.config.server.separate_gateway:
                tasks.create_task(serve_gateway(arguments, stop, address))
    finally:
        await server.close()
