"""The Conductor's process, from its start to its orderly end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from conductor.server.gc_tuning import GcTuner
from conductor.server.server import ConductorServer
from springtide.process import ProcessArguments


async def serve(arguments: ProcessArguments, stop: asyncio.Event, beside: Callable[[str], Coroutine[Any, Any, None]] | None = None) -> None:
    """Runs the Conductor until `stop`, and what is to run `beside` it in the same process, which is given its address."""
    server = ConductorServer(arguments)
    try:
        address = await server.start()
        async with asyncio.TaskGroup() as tasks:
            settling = tasks.create_task(GcTuner(server.follower).run())
            tasks.create_task(server.run(stop))
            if beside is not None:
                tasks.create_task(beside(address))
            await stop.wait()
            settling.cancel()
    finally:
        await server.close()
