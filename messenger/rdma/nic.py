"""An opened port: its protection domain, and the memory that it may touch."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

import numpy as np

from messenger.rdma.ports import Port
from messenger.rdma.verbs import RdmaUnavailable, load
from springtide.errors import SpringtideError


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A region in GPU memory, exported by its driver as a dma-buf (CUDA: cuMemGetHandleForAddressRange). The region's `memory` is then an
    array over the device addresses, which nothing here dereferences."""

    fd: int
    offset: int
    """The place of the region's first byte in the dma-buf."""


@dataclass(frozen=True, slots=True)
class Registration:
    """Memory that a NIC may touch. Addresses are this process's."""

    address: int
    num_bytes: int
    local_key: int
    remote_key: int


@dataclass(frozen=True, slots=True)
class RemoteMemory:
    """Memory of the peer, as one of its NICs knows it. It travels over the control RPC."""

    address: int
    num_bytes: int
    key: int


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """What a peer lends over one of its NICs."""

    memory: RemoteMemory
    generations: RemoteMemory
    mailbox: RemoteMemory
    """The memory where notifications are put."""


class Nic:
    """An open port. `close` ends everything that was made with it; queue pairs are to be closed before."""

    def __init__(self, port: Port) -> None:
        """Opens `port`. Raises RdmaUnavailable when the device cannot be opened."""
        self.port = port
        self._verbs = load()
        self._registered: list[Any] = []
        try:
            self.context: Any = self._verbs.device.Context(name=port.device)
            self.domain: Any = self._verbs.pd.PD(self.context)
        except self._verbs.error as error:
            raise RdmaUnavailable(f"cannot open the RDMA device {port.device}: {error}") from error
        limits = self.context.query_device()
        self.max_reads_out = max(1, int(limits.max_qp_init_rd_atom))
        """Reads that a queue pair of this NIC may have in flight."""
        self.max_reads_in = max(1, int(limits.max_qp_rd_atom))
        """Reads that a queue pair of this NIC can answer at once."""

    def register(self, memory: np.ndarray, *, peers_read: bool, peers_write: bool) -> Registration:
        """Pins `memory`, which has to be kept alive until `forget` or `close`. Raises SpringtideError."""
        enums, address = self._verbs.enums, memory.ctypes.data
        access = enums.IBV_ACCESS_REMOTE_READ if peers_read else 0
        if peers_write or not peers_read:
            access |= enums.IBV_ACCESS_LOCAL_WRITE
        if peers_write:
            access |= enums.IBV_ACCESS_REMOTE_WRITE
        try:
            made = self._verbs.mr.MR(self.domain, memory.nbytes, access, address=address)
        except self._verbs.error as error:
            raise SpringtideError(_registration_failure(self.port, memory.nbytes, error)) from error
        return self._keep(made, address, memory.nbytes)

    def register_device(self, memory: np.ndarray, exported: DeviceMemory) -> Registration:
        """Registers device memory, for local use only. Raises RdmaUnavailable when the NIC's driver cannot reach into other devices."""
        try:
            access = self._verbs.enums.IBV_ACCESS_LOCAL_WRITE
            made = self._verbs.mr.DmaBufMR(self.domain, memory.nbytes, access, dmabuf=exported.fd, offset=exported.offset)
        except self._verbs.error as error:
            raise RdmaUnavailable(
                f"{self.port} cannot register {memory.nbytes} bytes of device memory through dma-buf, go through the pinned arena: {error}"
            ) from error
        # pyverbs gives such memory its offset as its address.
        return self._keep(made, exported.offset, memory.nbytes)

    def forget(self, registration: Registration) -> None:
        """Ends a registration: the NIC may not touch that memory any more. Idempotent."""
        for made in [made for made in self._registered if made.lkey == registration.local_key]:
            self._registered.remove(made)
            made.close()

    def close(self) -> None:
        """Ends every registration, and the port's context. Idempotent."""
        for made in self._registered:
            made.close()
        self._registered.clear()
        self.domain.close()
        self.context.close()

    def _keep(self, made: Any, address: int, num_bytes: int) -> Registration:
        self._registered.append(made)
        return Registration(address, num_bytes, int(made.lkey), int(made.rkey))


def _registration_failure(port: Port, num_bytes: int, error: Any) -> str:
    hint = ""
    if error.error_code in (errno.ENOMEM, errno.EPERM):
        hint = f"; the limit on locked memory (ulimit -l) must allow {num_bytes} bytes"
    return f"{port} cannot register {num_bytes} bytes of memory{hint}: {error}"
