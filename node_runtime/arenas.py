"""The store's arena as the engine takes it."""

from __future__ import annotations

import socket

from engine.runner import SharedArena
from messenger.arena_memory import SharedMemory


def shared_arena(memory: SharedMemory, attachment: socket.socket) -> SharedArena:
    """`attachment` tells the store by its end that nobody writes any more: other ranks of the engine keep it open with their mappings."""
    return SharedArena(memory.region.memory, memory.fd, memory.header.data_offset, attachment.fileno())
