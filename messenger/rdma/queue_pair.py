"""One reliable-connected queue pair with a completion queue and channel of its own: all calls into pyverbs that move bytes."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from messenger.rdma.nic import Nic
from messenger.rdma.ports import PortAddress
from messenger.rdma.verbs import load
from springtide.errors import SpringtideError

NUM_RECEIVES = 8
"""Messages with an immediate that may arrive before the owner has looked; peers have at most one notification in flight."""
MAX_INLINE_BYTES = 64
"""Most bytes that are copied into the work request itself. All drivers can do as much."""

_HOP_LIMIT = 64
_TIMEOUT = 14
"""4.096 us * 2**14 = 67 ms until a packet is sent again: with the tries below, a peer is lost after half a second to two."""
_RETRIES = 7
_RNR_RETRIES = 6
_RNR_TIMER = 12
"""0.64 ms until a peer that had no receive posted is tried again. Never needed while both sides keep to one notification at a time."""


class Opcode(IntEnum):
    READ = 0
    WRITE = 1
    WRITE_WITH_IMMEDIATE = 2
    SEND_WITH_IMMEDIATE = 3


class WorkRequest(NamedTuple):
    """What the NIC is to do. A `length` of 0 touches no memory on either side."""

    opcode: Opcode
    local: int = 0
    local_key: int = 0
    remote: int = 0
    remote_key: int = 0
    length: int = 0
    immediate: int = 0
    fenced: bool = False
    """It starts only after all reads posted earlier have brought their bytes."""


class WorkCompletion(NamedTuple):
    """What a NIC reports. Of a failed one only `work_id` and `error` mean anything."""

    work_id: int
    error: str | None
    received: bool
    """A message of the peer with an `immediate`, not own work."""
    immediate: int
    length: int
    path_fault: bool
    """The failure is the network's or a NIC's: the same work may succeed on another path."""


@dataclass(frozen=True, slots=True)
class QueuePairAddress:
    """What the other end has to know of a queue pair. It travels over the control RPC."""

    port: PortAddress
    number: int
    first_packet: int
    max_reads_out: int
    max_reads_in: int


class QueuePair:
    """A queue pair from its making (state INIT, receives posted) over `connect` (ready) to `close`, after which the NIC touches no memory
    on its behalf."""

    def __init__(self, nic: Nic, max_work: int, traffic_class: int) -> None:
        """Makes it on `nic`, for `max_work` outstanding requests. Raises SpringtideError when the device has no more."""
        self._verbs = verbs = load()
        self._nic = nic
        self._traffic_class = traffic_class
        self._first_packet = secrets.randbits(24)
        enums = verbs.enums
        self._opcodes = {
            Opcode.READ: enums.IBV_WR_RDMA_READ,
            Opcode.WRITE: enums.IBV_WR_RDMA_WRITE,
            Opcode.WRITE_WITH_IMMEDIATE: enums.IBV_WR_RDMA_WRITE_WITH_IMM,
            Opcode.SEND_WITH_IMMEDIATE: enums.IBV_WR_SEND_WITH_IMM,
        }
        self._receive_opcodes = (enums.IBV_WC_RECV, enums.IBV_WC_RECV_RDMA_WITH_IMM)
        self._refusals = (
            enums.IBV_WC_LOC_LEN_ERR,
            enums.IBV_WC_LOC_PROT_ERR,
            enums.IBV_WC_LOC_ACCESS_ERR,
            enums.IBV_WC_REM_INV_REQ_ERR,
            enums.IBV_WC_REM_ACCESS_ERR,
        )
        self._channel: Any = None
        self._completions: Any = None
        self._pair: Any = None
        try:
            self._make(max_work)
        except verbs.error as error:
            self.close()
            raise SpringtideError(f"{nic.port} cannot make a queue pair: {error}") from error

    @property
    def fd(self) -> int:
        """A file descriptor that is readable when `poll` has something, after `arm`."""
        return self._fd

    @property
    def address(self) -> QueuePairAddress:
        return QueuePairAddress(
            self._nic.port.address, int(self._pair.qp_num), self._first_packet, self._nic.max_reads_out, self._nic.max_reads_in
        )

    def connect(self, peer: QueuePairAddress) -> None:
        """Connects it to the peer's. Raises SpringtideError when the kernel refuses, for example for want of a route to the peer."""
        verbs, mine = self._verbs, self._nic.port
        route = verbs.addr.GlobalRoute(
            dgid=verbs.addr.GID(peer.port.gid), sgid_index=mine.gid_index, hop_limit=_HOP_LIMIT, traffic_class=self._traffic_class
        )
        # The GID goes along on InfiniBand too, so that a peer in another subnet is routed.
        handle = verbs.addr.AHAttr(port_num=mine.number, is_global=1, gr=route, dlid=peer.port.lid)
        attributes = self._attributes()
        attributes.ah_attr = handle
        attributes.path_mtu = min(mine.address.mtu, peer.port.mtu)
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = peer.number, peer.first_packet, self._first_packet
        attributes.max_dest_rd_atomic = min(self._nic.max_reads_in, peer.max_reads_out)
        attributes.max_rd_atomic = min(self._nic.max_reads_out, peer.max_reads_in)
        attributes.min_rnr_timer, attributes.rnr_retry = _RNR_TIMER, _RNR_RETRIES
        attributes.timeout, attributes.retry_cnt = _TIMEOUT, _RETRIES
        try:
            self._pair.to_rtr(attributes)
            self._pair.to_rts(attributes)
        except verbs.error as error:
            raise SpringtideError(f"{mine} cannot connect a queue pair to {peer.port.gid} (lid {peer.port.lid}): {error}") from error

    def post(self, work: Sequence[WorkRequest], work_id: int) -> None:
        """Hands `work` to the NIC as one list. Only the last completes with `work_id`, once all of it is done. Raises SpringtideError."""
        following: Any = None
        requests = []
        for index in range(len(work) - 1, -1, -1):
            following = self._request(work[index], work_id, signalled=following is None, following=following)
            requests.append(following)
        try:
            self._pair.post_send(following)
        except self._verbs.error as error:
            raise SpringtideError(f"{self._nic.port} does not take {len(work)} work requests: {error}") from error
        finally:
            for request in requests:
                request.close()  # pyverbs does not free their lists by itself

    def post_receive(self) -> None:
        """Makes room for one more message with an immediate."""
        verbs = self._verbs
        nothing = verbs.wr.SGE(0, 0, 0)
        request = verbs.wr.RecvWR(num_sge=1, sg=[nothing])
        request.num_sge = 0  # its bytes, if any, go to the mailbox
        try:
            self._pair.post_recv(request)
        except verbs.error as error:
            raise SpringtideError(f"{self._nic.port} does not take a receive: {error}") from error
        finally:
            request.close()
            nothing.close()

    def arm(self) -> None:
        """Makes the next completion turn `fd` readable. Raises SpringtideError, for example when the device is gone."""
        try:
            self._completions.req_notify(False)
        except self._verbs.error as error:
            raise SpringtideError(f"{self._nic.port} does not announce completions: {error}") from error

    def take_event(self) -> None:
        """Takes what made `fd` readable."""
        try:
            self._channel.get_cq_event(self._completions)
        except self._verbs.error:  # non-blocking: there was none
            return
        self._completions.ack_events(1)

    def poll(self, most: int) -> list[WorkCompletion]:
        """The next completions, at most so many, without waiting. Raises SpringtideError, for example when the device is gone."""
        try:
            _, found = self._completions.poll(most)
        except self._verbs.error as error:
            raise SpringtideError(f"{self._nic.port} does not tell what is completed: {error}") from error
        return [self._done(completion) for completion in found]

    def close(self) -> None:
        """Destroys the queue pair. Idempotent."""
        for made in (self._pair, self._completions, self._channel):
            if made is not None:
                made.close()
        self._pair = self._completions = self._channel = None

    def _make(self, max_work: int) -> None:
        verbs, nic = self._verbs, self._nic
        before = set(_channel_fds())
        self._channel = verbs.cq.CompChannel(nic.context)
        # pyverbs keeps the descriptor to itself, so the kernel is asked which one is new.
        (self._fd,) = set(_channel_fds()) - before
        os.set_blocking(self._fd, False)
        # Every request completes when the pair breaks, so there must be room for all of them.
        self._completions = verbs.cq.CQ(nic.context, max_work + NUM_RECEIVES, channel=self._channel)
        room = verbs.qp.QPCap(
            max_send_wr=max_work, max_recv_wr=NUM_RECEIVES, max_send_sge=1, max_recv_sge=1, max_inline_data=MAX_INLINE_BYTES
        )
        kind = verbs.enums.IBV_QPT_RC
        wanted = verbs.qp.QPInitAttr(qp_type=kind, scq=self._completions, rcq=self._completions, cap=room, sq_sig_all=0)
        self._pair = verbs.qp.QP(nic.domain, wanted)
        self._pair.to_init(self._attributes())
        for _ in range(NUM_RECEIVES):
            self.post_receive()
        self.arm()

    def _attributes(self) -> Any:
        enums = self._verbs.enums
        attributes = self._verbs.qp.QPAttr(port_num=self._nic.port.number)
        attributes.qp_access_flags = enums.IBV_ACCESS_REMOTE_READ | enums.IBV_ACCESS_REMOTE_WRITE
        return attributes

    def _request(self, work: WorkRequest, work_id: int, signalled: bool, following: Any) -> Any:
        verbs, enums = self._verbs, self._verbs.enums
        flags = enums.IBV_SEND_SIGNALED if signalled else 0
        if work.fenced:
            flags |= enums.IBV_SEND_FENCE
        if work.opcode is not Opcode.READ and work.length <= MAX_INLINE_BYTES:
            flags |= enums.IBV_SEND_INLINE
        piece = verbs.wr.SGE(work.local, work.length, work.local_key)
        request = verbs.wr.SendWR(
            wr_id=work_id,
            opcode=self._opcodes[work.opcode],
            num_sge=1,
            sg=[piece],
            imm_data=socket.htonl(work.immediate),
            send_flags=flags,
            next_wr=following,
        )
        piece.close()
        if not work.length:
            request.num_sge = 0  # a piece of length 0 means 2 GiB to some NICs
        if work.opcode is not Opcode.SEND_WITH_IMMEDIATE:
            request.set_wr_rdma(work.remote_key, work.remote)
        return request

    def _done(self, completion: Any) -> WorkCompletion:
        enums, status = self._verbs.enums, completion.status
        if status == enums.IBV_WC_SUCCESS:
            received = completion.opcode in self._receive_opcodes
            return WorkCompletion(completion.wr_id, None, received, socket.ntohl(completion.imm_data), completion.byte_len, False)
        name = next((name for name in _STATUS_NAMES if getattr(enums, name, None) == status), "status")
        error = f"{name.removeprefix('IBV_WC_')} ({int(status)}) on {self._nic.port}"
        return WorkCompletion(completion.wr_id, error, False, 0, 0, status not in self._refusals)


_STATUS_NAMES = (
    "IBV_WC_LOC_LEN_ERR",
    "IBV_WC_LOC_QP_OP_ERR",
    "IBV_WC_LOC_PROT_ERR",
    "IBV_WC_WR_FLUSH_ERR",
    "IBV_WC_LOC_ACCESS_ERR",
    "IBV_WC_REM_INV_REQ_ERR",
    "IBV_WC_REM_ACCESS_ERR",
    "IBV_WC_REM_OP_ERR",
    "IBV_WC_RETRY_EXC_ERR",
    "IBV_WC_RNR_RETRY_EXC_ERR",
    "IBV_WC_REM_ABORT_ERR",
    "IBV_WC_FATAL_ERR",
    "IBV_WC_RESP_TIMEOUT_ERR",
    "IBV_WC_GENERAL_ERR",
)


def _channel_fds() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[infinibandevent]":
                found.append(int(name))
        except OSError:  # the one that listed the directory
            continue
    return found
