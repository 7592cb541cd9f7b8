"""Memory that processes of one host share through a file descriptor: no name anywhere, gone with the last process that maps it.

Layout: generations, uint64 [num_granules], padded to `data_offset` (a multiple of 4096); then num_granules * granule bytes, padded to whole
pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import mmap
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from messenger.base import Region
from messenger.listener import Listener
from messenger.stream import SocketStream
from springtide.errors import NoMemory, PeerLost

_PAGE = 4096
_MADV_POPULATE_WRITE = 23
_LENGTH = struct.Struct("<I")
_MAX_HEADER = 1 << 16
_MAX_SOCKET_PATH = 107
KERNEL_MAKES_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
"""Whether the kernel makes huge pages of memory that is shared: not at all where `never` or `deny` is chosen, as most systems do."""


@dataclass(frozen=True, slots=True)
class MemoryHeader:
    """What a process has to know to use the memory behind a file descriptor, beside which it travels as JSON."""

    num_granules: int
    granule: int
    incarnation: int
    data_offset: int
    page_bytes: int

    @property
    def total_bytes(self) -> int:
        return _padded(self.data_offset + self.num_granules * self.granule, self.page_bytes)


def _padded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


def kernel_makes_huge_pages(setting: Path = KERNEL_MAKES_HUGE) -> bool:
    """Whether memory made here, which asks for it, gets huge pages without their being reserved."""
    try:
        chosen = setting.read_text()
    except OSError:
        return False
    return not any(f"[{word}]" in chosen for word in ("never", "deny"))


class SharedMemory:
    """A mapping of memory that is shared. `region` views it; the views keep the mapping alive for as long as somebody holds one."""

    def __init__(self, fd: int, header: MemoryHeader, populate: bool) -> None:
        """Takes over `fd`, on failure too. `populate` sets up the page tables (and gets the pages) now instead of at the first touch.
        Raises NoMemory."""
        self._fd = fd
        self.header = header
        try:
            self._map = self._mapped()
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
            if populate:
                self._populate()
        except BaseException:
            os.close(fd)
            raise
        memory = np.frombuffer(self._map, np.uint8, header.num_granules * header.granule, header.data_offset)
        self.region = Region(memory, np.frombuffer(self._map, np.uint64, header.num_granules), header.granule)

    @classmethod
    def create(cls, num_granules: int, granule: int, incarnation: int, populate: bool = True, hugepages: int = 0) -> SharedMemory:
        """New memory, zeroed, of huge pages with `hugepages` bytes each unless that is 0. Peers that map it cannot resize it. Raises
        NoMemory when the machine does not have that much, OSError when it has no such pages."""
        header = MemoryHeader(num_granules, granule, incarnation, _padded(num_granules * 8, _PAGE), hugepages or _PAGE)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if hugepages:
            flags |= os.MFD_HUGETLB | (hugepages.bit_length() - 1) << os.MFD_HUGE_SHIFT
        fd = os.memfd_create("springtide-arena", flags)
        try:
            os.ftruncate(fd, header.total_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, header, populate)

    @property
    def fd(self) -> int:
        """The file descriptor to hand to others; it stays this object's own."""
        return self._fd

    def close(self) -> None:
        """Unmaps now, or, where somebody still holds a view, when the last view goes. Idempotent."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        del self.region
        with contextlib.suppress(BufferError):
            self._map.close()
        del self._map

    def _mapped(self) -> mmap.mmap:
        try:
            return mmap.mmap(self._fd, self.header.total_bytes)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise NoMemory(f"no room for an arena of {self.header.total_bytes} bytes in this process: {error.strerror}") from error

    def _populate(self) -> None:
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel before 5.14, where pages come at the first touch
                raise NoMemory(f"cannot get {self.header.total_bytes} bytes of memory for an arena: {error}") from error


def attach_session(path: Path, populate: bool, timeout_s: float) -> tuple[SharedMemory, socket.socket]:
    """Maps the memory that an FdServer hands out at `path`. Blocks. The connected socket closes when the owner of the memory ends. Raises
    PeerLost when nobody serves it there, NoMemory when it cannot be mapped here."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(str(path))
        fd, header = _receive_fd(sock)
        return SharedMemory(fd, header, populate), sock
    except (OSError, ValueError) as error:
        sock.close()
        raise PeerLost(f"no memory to be had at {path}: {error}") from error
    except BaseException:
        sock.close()
        raise


def _receive_fd(sock: socket.socket) -> tuple[int, MemoryHeader]:
    prefix, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, 1)
    try:
        if len(prefix) != _LENGTH.size or len(fds) != 1:
            raise ConnectionError("the server closed without handing out a file descriptor")
        (length,) = _LENGTH.unpack(prefix)
        if length > _MAX_HEADER:
            raise ValueError(f"a header of {length} bytes, more than {_MAX_HEADER}")
        text = sock.recv(length, socket.MSG_WAITALL)
        if len(text) != length:
            raise ConnectionError("the server closed within the header")
        header = MemoryHeader(**json.loads(text))
        if os.fstat(fds[0]).st_size != header.total_bytes:
            raise ValueError(f"the memory has {os.fstat(fds[0]).st_size} bytes, its header speaks of {header.total_bytes}")
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, TypeError):
            raise ValueError(f"not a memory header: {error}") from error
        raise
    return fds[0], header


async def wait_for_end(stream: SocketStream) -> None:
    """Does nothing for as long as a peer lives that only wants the memory."""
    await stream.drain()


class FdServer:
    """A server that hands the memory to whoever connects to the Unix socket at `path`, then runs `session` with the connection."""

    def __init__(self, memory: SharedMemory, path: Path, session: Callable[[SocketStream], Awaitable[None]] = wait_for_end) -> None:
        self._memory = memory
        self._path = path
        self._session = session
        self._listener: Listener | None = None

    async def start(self) -> None:
        """Begins to serve, and replaces a socket file that a killed process left. Raises OSError when `path` cannot be bound, ValueError
        when it is too long."""
        if len(os.fsencode(self._path)) > _MAX_SOCKET_PATH:
            raise ValueError(f"the path of a Unix socket has at most {_MAX_SOCKET_PATH} bytes: {self._path}")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._path.unlink(missing_ok=True)
            os.fchmod(sock.fileno(), 0o600)  # which the file inherits: nobody else can slip in between bind and chmod
            sock.bind(str(self._path))
            sock.listen(64)
        except BaseException:
            sock.close()
            raise
        self._listener = Listener(sock, self._serve, str(self._path))

    async def close(self) -> None:
        """Ends every session; the memory stays its owner's to close. Idempotent."""
        if self._listener is not None:
            listener, self._listener = self._listener, None
            self._path.unlink(missing_ok=True)
            await listener.close()

    async def _serve(self, stream: SocketStream) -> None:
        text = json.dumps(asdict(self._memory.header)).encode()
        stream.send_with_fd(_LENGTH.pack(len(text)) + text, self._memory.fd)
        await self._session(stream)


async def attached(attaching: asyncio.Future[tuple[SharedMemory, socket.socket]]) -> tuple[SharedMemory, socket.socket]:
    """What comes of `attach_session` on a thread, which cannot be stopped: where it is waited for no more, that is closed."""
    try:
        return await asyncio.shield(attaching)
    except asyncio.CancelledError:
        attaching.add_done_callback(_discard)
        raise


def _discard(attaching: asyncio.Future[tuple[SharedMemory, socket.socket]]) -> None:
    if not attaching.cancelled() and attaching.exception() is None:
        memory, sock = attaching.result()
        sock.close()
        memory.close()
