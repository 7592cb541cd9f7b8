"""A process with an arena that serves it by one transport until it is killed: `messenger_peer.py shm|tcp SOCKET NUM_GRANULES`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import uvloop
from messenger_support import GRANULE

from messenger.arena_memory import SharedMemory
from messenger.base import Transport
from messenger.router import Messenger
from messenger.shm import ShmTransport
from messenger.tcp import TcpTransport
from springtide.ids import new_incarnation
from springtide.process import die_with_parent


async def main(kind: str, path: Path, num_granules: int) -> None:
    die_with_parent()
    incarnation = new_incarnation()
    memory = SharedMemory.create(num_granules, GRANULE, incarnation)
    memory.region.generations[:] = np.arange(1, num_granules + 1)
    transport: Transport = ShmTransport(memory, path) if kind == "shm" else TcpTransport()
    messenger = Messenger([transport], memory.region, "peer", incarnation, lambda peer, payload: None)
    print((await messenger.start()).to_json(), flush=True)
    await asyncio.Event().wait()


uvloop.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
