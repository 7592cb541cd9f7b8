"""Making the paths of a connection: all of them at first, later those that were lost."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from messenger.base import Identity
from messenger.options import RdmaOptions
from messenger.rdma.control import ControlClient
from messenger.rdma.lane import MAX_WORK
from messenger.rdma.nic import Nic, Registration, RemoteRegion
from messenger.rdma.ports import pair_ports
from messenger.rdma.queue_pair import QueuePair
from messenger.rdma.wire import AnsweredOffer, AnsweredPath, OfferedPath
from springtide.errors import PeerLost, SpringtideError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedPath:
    """A queue pair that both sides have connected; nobody knows yet whether packets come through."""

    rail: int
    index: int
    """The peer's number for it."""
    pair: QueuePair
    nic: Nic
    local: Registration
    remote: RemoteRegion


class PathMaker:
    """The maker of paths to one peer. A rail is a port here and a port there, the same for as long as the connection lives; it has one path
    or none."""

    def __init__(
        self,
        control: ControlClient,
        nics: Sequence[Nic],
        local: Sequence[Registration],
        identity: Identity,
        incarnation: int,
        options: RdmaOptions,
    ) -> None:
        """`local`: the own region, as registered with each of `nics`. `incarnation`: the one that the peer must have."""
        self._control = control
        self._local = local
        self._identity = identity
        self._incarnation = incarnation
        self._options = options
        self.nics = nics
        self.num_rails = 0
        """Known once it has been asked for paths."""

    async def open(self, rails: Collection[int] | None = None, session: bytes = b"") -> tuple[AnsweredOffer, list[OpenedPath]]:
        """Paths over `rails` (None: all), for `session` (empty: a new one). Not all that were wanted need be there. Raises
        SpringtideError, as a rule PeerLost."""
        timeout_s = self._options.connect_timeout_s
        ports = await self._control.greet(self._incarnation, timeout_s)
        pairing = pair_ports([nic.port.address for nic in self.nics], ports)
        self.num_rails = len(pairing)
        wanted = [rail for rail in range(len(pairing)) if rails is None or rail in rails]
        if not wanted:
            raise PeerLost("no port of this machine and of the peer's are on the same kind of network")
        pairs: list[QueuePair] = []
        try:
            for rail in wanted:
                pairs.append(QueuePair(self.nics[pairing[rail][0]], MAX_WORK, self._options.traffic_class))
            offer = [OfferedPath(pair.address, pairing[rail][1]) for pair, rail in zip(pairs, wanted, strict=True)]
            answer = await self._control.connect(self._incarnation, self._identity, offer, session, timeout_s)
        except BaseException:
            for pair in pairs:
                pair.close()
            raise
        return answer, self._connected(pairing, zip(wanted, pairs, answer.paths, strict=True))

    def _connected(
        self, pairing: Sequence[tuple[int, int]], rows: Iterable[tuple[int, QueuePair, AnsweredPath | None]]
    ) -> list[OpenedPath]:
        opened = []
        for rail, pair, answered in rows:
            here = pairing[rail][0]
            try:
                if answered is None:
                    raise PeerLost("the peer could not connect it")
                pair.connect(answered.pair)
                opened.append(OpenedPath(rail, answered.index, pair, self.nics[here], self._local[here], answered.remote))
            except SpringtideError as error:
                logger.warning("going on without a path over %s: %s", self.nics[here].port, error)
                pair.close()
        return opened
