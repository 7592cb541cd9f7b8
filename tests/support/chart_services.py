"""The Services of a rendered chart that have addresses of their own: a connection to a port of one goes to one of its pods that are ready,
each in its turn."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence

from tests.support.balancer import splice
from tests.support.chart import Object
from tests.support.netns import Switch

Address = tuple[str, int]


class Services:
    def __init__(self, switch: Switch, places: Callable[[Object, Object], Sequence[Address]]) -> None:
        """`places`: where the pods are that are ready, of a Service and one of its ports."""
        self._switch, self._places = switch, places
        self._addresses: dict[str, str] = {}
        self._listening: list[asyncio.Server] = []
        self._turns = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="services", daemon=True)
        self._thread.start()

    def become(self, services: Sequence[Object]) -> dict[str, str]:
        """Serves these, and no others; connections of before go on. Returns the addresses by names. Who was there before keeps its own."""
        own = {each["metadata"]["name"]: each for each in services if each["spec"].get("clusterIP") != "None"}
        self._addresses |= {name: self._switch.further_address() for name in own if name not in self._addresses}
        asyncio.run_coroutine_threadsafe(self._listen(own), self._loop).result(10)
        return {name: self._addresses[name] for name in own}

    async def _listen(self, services: dict[str, Object]) -> None:
        for server in self._listening:
            server.close()
        self._listening = [
            await asyncio.start_server(self._serving(service, port), self._addresses[name], port["port"])
            for name, service in services.items()
            for port in service["spec"]["ports"]
        ]

    def _serving(self, service: Object, port: Object) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer):
                places = self._places(service, port)
                if places:
                    with contextlib.suppress(OSError):
                        there = await asyncio.open_connection(*places[next(self._turns) % len(places)])
                        await splice((reader, writer), there)

        return serve

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _stop(self) -> None:
        for server in self._listening:
            server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
