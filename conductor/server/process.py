"""The Conductor's process, from its start to its orderly end."""

from __future__ import annotations

import asyncio

from conductor.gateway.app import serve_gateway
from conductor.server.heap import SettledHeap
from conductor.server.server import ConductorServer
from springtide.errors import ConfigError
from springtide.process import ProcessArguments


async def serve(arguments: ProcessArguments, stop: asyncio.Event) -> None:
    """Runs the Conductor and, unless `server.separate_gateway`, a gateway beside it, until `stop`."""
    config = arguments.config
    if config.conductor.replicas > 1 and not config.server.separate_gateway:
        raise ConfigError(
            f"conductor.replicas is {config.conductor.replicas}, which needs server.separate_gateway: true: a gateway in a Conductor's "
            "process would die with it"
        )
    server = ConductorServer(arguments)
    try:
        address = await server.start()
        async with asyncio.TaskGroup() as tasks:
            settling = tasks.create_task(SettledHeap(server.follower).run())
            tasks.create_task(server.run(stop))
            if not config.server.separate_gateway:
                tasks.create_task(serve_gateway(arguments, stop, address))
            await stop.wait()
            settling.cancel()
    finally:
        await server.close()
