"""What is particular to memory that processes of one host share."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from messenger_support import TIMEOUT_S, Workshop, whole

from messenger.arena_memory import attach_session
from messenger.base import Endpoint, Identity
from messenger.options import ShmOptions
from messenger.shm import ShmTransport
from springtide.errors import PeerLost


@pytest.fixture
async def workshop(tmp_path: Path) -> AsyncIterator[Workshop]:
    made = Workshop("shm", tmp_path)
    yield made
    await made.close()


async def test_a_peer_that_does_not_let_itself_be_attached_holds_up_no_copies_to_others(workshop: Workshop, tmp_path: Path) -> None:
    here, there = await workshop.node("here"), await workshop.node("there")
    await here.transport.close()
    here.transport = ShmTransport(here.memory, tmp_path / "here.sock", ShmOptions(helpers=1, connect_timeout_s=TIMEOUT_S))
    await here.start()
    connection = await here.connect(there.endpoint)
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(tmp_path / "hung.sock"))
        hung.listen()
        attaching = asyncio.create_task(here.connect(Endpoint(there.endpoint.host_id, 5, {"shm": str(tmp_path / "hung.sock")})))
        accepted = await asyncio.to_thread(hung.accept)
        batch = [whole(there, granule) for granule in range(24)]
        assert (await connection.write(batch, TIMEOUT_S)).num_bytes == there.bytes.nbytes
        assert not attaching.done()
        accepted[0].close()
    with pytest.raises(PeerLost):
        await attaching


async def test_memory_is_not_called_safe_while_it_is_not_known_who_has_it(workshop: Workshop, tmp_path: Path) -> None:
    there = await workshop.node("there")
    somebody = Identity("somebody", 7)
    assert await there.transport.fence(somebody)
    memory, sock = await asyncio.to_thread(attach_session, tmp_path / "there.sock", False, TIMEOUT_S)
    assert not await there.transport.fence(somebody)
    sock.close()
    memory.close()
    async with asyncio.timeout(TIMEOUT_S):
        while not await there.transport.fence(somebody):  # noqa: ASYNC110 (the end of a session is no event here)
            await asyncio.sleep(0)
