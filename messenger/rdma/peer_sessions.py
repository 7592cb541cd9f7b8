"""The lending side: the queue pairs of every peer that may read and write this process's region."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass

from messenger import metrics
from messenger.base import Identity, NotifyHandler, Region
from messenger.options import RdmaOptions
from messenger.rdma.nic import Nic, Registration, RemoteRegion
from messenger.rdma.notices import NoticeInbox
from messenger.rdma.path import RdmaPath
from messenger.rdma.ports import Port, PortAddress
from messenger.rdma.queue_pair import NUM_RECEIVES, QueuePair
from messenger.rdma.wire import AnsweredOffer, AnsweredPath, OfferedPath, lent
from springtide.errors import SpringtideError

logger = logging.getLogger(__name__)

_MAX_WORK = 2 * NUM_RECEIVES
"""Work requests that a path of this side may have outstanding: acknowledgements and heartbeats."""
_MAX_PATHS = 64
"""Most paths in one offer."""


@dataclass(frozen=True, slots=True)
class LentNic:
    """A NIC, with the region registered for peers."""

    nic: Nic
    memory: Registration
    generations: Registration


class PeerSession:
    """The owner's end of one connection of one peer. It ends when the peer says so, when its last path breaks, or when it is fenced."""

    def __init__(self, peer: Identity, on_notify: NotifyHandler) -> None:
        self.peer = peer
        self.inbox = NoticeInbox(peer.name, on_notify)
        self.paths: dict[int, RdmaPath] = {}
        self.num_offered = 0
        """Paths that were offered so far; their numbers go up to it."""
        self._mailboxes: dict[Nic, Registration] = {}

    def mailbox(self, nic: Nic) -> Registration:
        if nic not in self._mailboxes:
            self._mailboxes[nic] = nic.register(self.inbox.memory, peers_read=False, peers_write=True)
        return self._mailboxes[nic]

    def close_path(self, index: int) -> None:
        """Closes one path: nothing of the peer lands through it any more. Idempotent."""
        path = self.paths.pop(index, None)
        if path is not None:
            path.close()

    def close(self) -> None:
        """Closes every path, and the mailbox. Idempotent."""
        for index in list(self.paths):
            self.close_path(index)
        for nic, registered in self._mailboxes.items():
            nic.forget(registered)
        self._mailboxes.clear()


class PeerSessions:
    """Every session that peers have with this process: the `Lender` of the control RPC."""

    def __init__(self, nics: list[LentNic], region: Region, on_notify: NotifyHandler, options: RdmaOptions) -> None:
        self._nics = nics
        self._region = region
        self._on_notify = on_notify
        self._options = options
        self._sessions: dict[bytes, PeerSession] = {}

    def ports(self) -> list[PortAddress]:
        return [lent_nic.nic.port.address for lent_nic in self._nics]

    def open(self, caller: Identity, paths: list[OfferedPath], session: bytes) -> AnsweredOffer:
        """Does what `Lender.open` does. Raises SpringtideError when the session is over, or not one path of it can be connected."""
        if len(paths) > _MAX_PATHS:
            raise SpringtideError(f"an offer of {len(paths)} paths, more than {_MAX_PATHS}")
        token = session or secrets.token_bytes(16)
        found = self._sessions.get(token) if session else self._sessions.setdefault(token, PeerSession(caller, self._on_notify))
        if found is None or found.peer != caller:
            raise SpringtideError("the session is over")
        answered: list[AnsweredPath | None] = []
        problem = "none was offered"
        for path in paths:
            try:
                answered.append(self._connect(token, found, path))
            except SpringtideError as error:
                logger.warning("no path from %s: %s", caller.name, error)
                problem = error.message
                answered.append(None)
        if not found.paths:
            self.leave(token, None)
            raise SpringtideError(f"no path can be connected: {problem}")
        return AnsweredOffer(token, self._region.memory.nbytes, self._region.granule, answered)

    def leave(self, session: bytes, path: int | None) -> None:
        found = self._sessions.get(session)
        if found is None:
            return
        if path is not None:
            found.close_path(path)
        if path is None or not found.paths:
            found.close()
            del self._sessions[session]

    def fence(self, peer: Identity) -> None:
        """Cuts off every session of `peer`."""
        for token in [token for token, session in self._sessions.items() if session.peer == peer]:
            self.leave(token, None)

    def close(self) -> None:
        for token in list(self._sessions):
            self.leave(token, None)

    def _connect(self, token: bytes, session: PeerSession, offered: OfferedPath) -> AnsweredPath:
        index = session.num_offered
        session.num_offered += 1
        if not 0 <= offered.port < len(self._nics):
            raise SpringtideError(f"port {offered.port} was asked for; there are {len(self._nics)}")
        lent_nic = self._nics[offered.port]
        pair = QueuePair(lent_nic.nic, _MAX_WORK, self._options.traffic_class)
        try:
            address = pair.address
            mailbox = session.mailbox(lent_nic.nic)
            pair.connect(offered.pair)
        except BaseException:
            pair.close()
            raise

        def on_lost(path: RdmaPath, error: SpringtideError) -> None:
            self._on_lost(token, index, lent_nic.nic.port, error)

        name = f"{session.peer.name} over {lent_nic.nic.port}"
        session.paths[index] = RdmaPath(pair, name, session.inbox.on_receive, on_lost, self._options.silence_s)
        remote = RemoteRegion(lent(lent_nic.memory), lent(lent_nic.generations), lent(mailbox))
        return AnsweredPath(index, address, remote)

    def _on_lost(self, token: bytes, index: int, port: Port, error: SpringtideError) -> None:
        metrics.RDMA_PATHS_LOST.labels(port.device).inc()
        logger.info("a peer's path ended: %s", error)
        self.leave(token, index)
