"""Shared memory by file descriptor."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import re
import socket
import stat
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from messenger_support import open_files

from messenger.arena_memory import FdServer, SharedMemory, attach_session, kernel_makes_huge_pages
from springtide.errors import NoMemory, PeerLost
from tests.support.hugepages import HUGEPAGE_BYTES, reserved


def attach(path: Path) -> SharedMemory:
    memory, sock = attach_session(path, populate=True, timeout_s=5.0)
    sock.close()
    return memory


def num_arenas() -> int:
    """File descriptors of shared memory in this process."""
    gc.collect()
    return sum("springtide-arena" in target for target in open_files().values())


async def test_what_one_side_writes_the_other_sees(tmp_path: Path) -> None:
    memory = SharedMemory.create(700, 1000, 42)
    server = FdServer(memory, tmp_path / "arena.sock")
    await server.start()
    mapped = await asyncio.to_thread(attach, tmp_path / "arena.sock")
    assert mapped.header == memory.header
    assert mapped.header.data_offset % 4096 == 0 and mapped.header.data_offset >= 700 * 8
    assert not mapped.region.memory.any() and not mapped.region.generations.any()
    memory.region.memory[-1] = 9
    memory.region.generations[699] = 2**64 - 1
    assert mapped.region.memory[-1] == 9
    assert mapped.region.generations[699] == 2**64 - 1
    await server.close()
    mapped.close()
    memory.close()


def test_region_memory_is_aligned_for_vector_instructions() -> None:
    memory = SharedMemory.create(3, 4096, 1)
    assert memory.region.memory.ctypes.data % 64 == 0
    memory.close()


def test_a_view_outlives_close_and_nothing_else_does() -> None:
    before = num_arenas()
    memory = SharedMemory.create(3, 4096, 1)
    view = memory.region.memory[10:20]
    memory.close()
    memory.close()
    view[:] = 5
    assert (view == 5).all()
    assert num_arenas() > before
    del view
    assert num_arenas() == before


def test_nobody_who_has_the_memory_can_resize_it() -> None:
    memory = SharedMemory.create(3, 4096, 1)
    for size in (4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    memory.close()


async def test_an_attached_session_ends_with_the_server(tmp_path: Path) -> None:
    memory = SharedMemory.create(3, 4096, 1)
    server = FdServer(memory, tmp_path / "arena.sock")
    await server.start()
    mapped, sock = await asyncio.to_thread(attach_session, tmp_path / "arena.sock", False, 5.0)
    await server.close()
    assert await asyncio.to_thread(sock.recv, 1) == b""
    assert os.listdir(tmp_path) == []
    mapped.region.memory[:] = 1
    sock.close()
    mapped.close()
    memory.close()


async def test_a_socket_file_left_by_a_killed_process_is_replaced(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "arena.sock"))
    left.close()
    with pytest.raises(PeerLost):
        await asyncio.to_thread(attach, tmp_path / "arena.sock")
    memory = SharedMemory.create(3, 4096, 1)
    server = FdServer(memory, tmp_path / "arena.sock")
    await server.start()
    (await asyncio.to_thread(attach, tmp_path / "arena.sock")).close()
    await server.close()
    memory.close()


async def test_only_its_user_can_connect(tmp_path: Path) -> None:
    memory = SharedMemory.create(2, 4096, 1)
    server = FdServer(memory, tmp_path / "a.sock")
    await server.start()
    assert stat.S_IMODE((tmp_path / "a.sock").stat().st_mode) == 0o600
    await server.close()
    memory.close()


@pytest.mark.parametrize("answer", [b"", b"\x05\x00", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00{}"])
async def test_who_hands_out_no_memory_is_refused(tmp_path: Path, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, tmp_path / "arena.sock")
    with pytest.raises(PeerLost):
        await asyncio.to_thread(attach, tmp_path / "arena.sock")
    server.close()


async def test_a_header_that_promises_more_than_the_memory_holds_is_refused(tmp_path: Path) -> None:
    before = num_arenas()
    memory = SharedMemory.create(3, 4096, 1)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "arena.sock"))
    listening.listen()

    def serve() -> None:
        accepted, _ = listening.accept()
        text = b'{"num_granules": 3000, "granule": 4096, "incarnation": 1, "data_offset": 4096, "page_bytes": 4096}'
        socket.send_fds(accepted, [len(text).to_bytes(4, "little") + text], [memory.fd])
        accepted.close()

    serving = asyncio.create_task(asyncio.to_thread(serve))
    with pytest.raises(PeerLost, match="header"):
        await asyncio.to_thread(attach, tmp_path / "arena.sock")
    await serving
    listening.close()
    memory.close()
    assert num_arenas() == before


def test_the_region_checks_its_shape() -> None:
    from messenger.base import Region

    with pytest.raises(ValueError, match=r"Region\.memory has 10 bytes"):
        Region(np.zeros(10, np.uint8), np.zeros(2, np.uint64), 4)
    with pytest.raises(ValueError, match=r"Region\.generations"):
        Region(np.zeros(8, np.uint8), np.zeros(2, np.int64), 4)


def test_memory_that_the_machine_does_not_have_is_told_from_every_other_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(fd: int, length: int) -> NoReturn:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    before = num_arenas()
    monkeypatch.setattr("mmap.mmap", no_room)
    with pytest.raises(NoMemory, match="Cannot allocate memory"):
        SharedMemory.create(3, 4096, 1)
    assert num_arenas() == before


async def test_who_cannot_map_the_memory_is_not_told_that_its_owner_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(memory: SharedMemory) -> NoReturn:
        raise NoMemory("no room")

    memory = SharedMemory.create(3, 4096, 1)
    server = FdServer(memory, tmp_path / "arena.sock")
    await server.start()
    monkeypatch.setattr(SharedMemory, "_mapped", no_room)
    with pytest.raises(NoMemory):
        await asyncio.to_thread(attach_session, tmp_path / "arena.sock", False, 5.0)
    await server.close()
    memory.close()


async def test_huge_pages_are_whole_and_go_with_the_memory(tmp_path: Path) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("springtide-arena")

    before = mapped()
    with reserved(2):
        memory = SharedMemory.create(2, (1 << 20) + 1, 1, hugepages=HUGEPAGE_BYTES)
        server = FdServer(memory, tmp_path / "arena.sock")
        await server.start()
        there = await asyncio.to_thread(attach, tmp_path / "arena.sock")
        memory.region.memory[-1] = 9
        assert there.region.memory[-1] == 9 and os.fstat(there.fd).st_size == 2 * HUGEPAGE_BYTES and mapped() == before + 2
        await server.close()
        there.close()
        memory.close()
        assert mapped() == before


def test_huge_pages_that_nobody_has_reserved_are_not_to_be_had() -> None:
    with reserved(1), pytest.raises(NoMemory, match="Cannot allocate memory"):
        SharedMemory.create(1, 1 << 40, 1, hugepages=HUGEPAGE_BYTES)


@pytest.mark.parametrize(("setting", "makes"), [("always within_size [advise] never deny force", True), ("always [never] advise", False)])
def test_what_the_kernel_does_with_memory_that_is_shared_is_read(tmp_path: Path, setting: str, makes: bool) -> None:
    (tmp_path / "shmem_enabled").write_text(f"{setting}\n")
    assert kernel_makes_huge_pages(tmp_path / "shmem_enabled") is makes
    assert not kernel_makes_huge_pages(tmp_path / "not there")


def test_memory_has_huge_pages_where_the_kernel_is_said_to_make_them() -> None:
    memory = SharedMemory.create(8, HUGEPAGE_BYTES, 1)
    memory.region.memory[:] = 1
    mapping = Path("/proc/self/smaps").read_text().partition("springtide-arena")[2]
    huge = int(re.search(r"^ShmemPmdMapped: +(\d+) kB$", mapping, re.MULTILINE)[1])  # type: ignore[index]
    del mapping
    memory.close()
    assert (huge > 0) is kernel_makes_huge_pages()
