"""Notifications over a stream, apart from what transports make of them."""

from __future__ import annotations

import asyncio
import socket

import pytest
from messenger_support import TIMEOUT_S, until

from messenger import notices
from messenger.base import Completion, TransferTimeout
from messenger.notices import NoticeSender
from messenger.stream import SocketStream
from springtide.errors import PeerLost


async def test_whoever_has_to_end_does_not_wait_for_the_question_whether_the_peer_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once for all of them, and goes on without them."""
    monkeypatch.setattr(notices, "ASK_AFTER_S", 0.01)
    mine, theirs = socket.socketpair()
    asked, answered = 0, asyncio.Event()

    async def check() -> None:
        nonlocal asked
        asked += 1
        await answered.wait()

    async def write(timeout_s: float) -> Completion:
        return Completion(0)

    sender = NoticeSender(SocketStream(mine), "a silent peer", lambda error: None, check)
    patient = asyncio.create_task(sender.after(write, b"patient", TIMEOUT_S, "a write"))
    await until(lambda: asked == 1)
    cancelled = asyncio.create_task(sender.after(write, b"cancelled", TIMEOUT_S, "a write"))
    cancelled.cancel()
    await asyncio.wait((cancelled,))
    patient.cancel()
    await asyncio.wait((patient,))
    with pytest.raises(TransferTimeout):
        await sender.after(write, b"late", 0.1, "a write")
    assert asked == 1
    answered.set()
    sender.fail(PeerLost("closed"))
    await sender.close()
    theirs.close()
