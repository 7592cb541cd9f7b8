"""A process with an arena that serves it by one transport until it is killed.

`messenger_peer.py TRANSPORT SOCKET NUM_GRANULES ignore|hang ENDPOINT|'' HOST PATTERN|''`: what it does with notifications, whom it connects
to, where it serves other hosts, and the byte that it writes into all memory of the other side, until that fails: then it says so.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import uvloop
from messenger_support import GRANULE, OPTIONS

from messenger.arena_memory import SharedMemory
from messenger.base import Connection, Endpoint, Slice
from messenger.registry import TransportSite, make_transport
from messenger.router import Messenger
from springtide.errors import SpringtideError
from springtide.ids import new_incarnation
from springtide.process import die_with_parent


def ignore(peer: str, payload: bytes) -> None:
    pass


def hang(peer: str, payload: bytes) -> None:
    """Holds Python's lock until the process is killed: PyDLL, unlike CDLL, does not let go of it."""
    ctypes.PyDLL(None).pause()


async def overwrite(connection: Connection, memory: SharedMemory, pattern: int) -> None:
    memory.region.memory[:] = pattern
    everything = [Slice(granule * GRANULE, granule * GRANULE, GRANULE, granule + 1) for granule in range(memory.header.num_granules)]
    try:
        while not (await connection.write(everything, 60.0)).failed:
            pass
    except SpringtideError:
        pass
    print("failed", flush=True)


async def main(kind: str, path: Path, num_granules: int, on_notify: str, connect_to: str, host: str, pattern: str) -> None:
    die_with_parent()
    incarnation = new_incarnation()
    memory = SharedMemory.create(num_granules, GRANULE, incarnation)
    memory.region.generations[:] = np.arange(1, num_granules + 1)
    options = replace(OPTIONS, tcp=replace(OPTIONS.tcp, open_to_strangers=host != "127.0.0.1"))
    transport = make_transport(kind, TransportSite(memory, host, path), options)
    messenger = Messenger([transport], memory.region, "peer", incarnation, hang if on_notify == "hang" else ignore)
    endpoint = await messenger.start()
    if connect_to:
        connection = await messenger.connect(Endpoint.from_json(connect_to))
    print(endpoint.to_json(), flush=True)
    if pattern:
        await overwrite(connection, memory, int(pattern))
    await asyncio.Event().wait()


uvloop.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:8]))
