"""Leases: a peer's promise to read some blocks soon, and this store's to keep them until then."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore._native import Block


@dataclass(slots=True)
class Lease:
    """One lease, and what it references."""

    lease_id: int
    reader: str
    blocks: Sequence[Block]
    """A prefix from a first block on; each is referenced by the lease."""
    expires_at: float


class LeaseTable:
    """The leases of a store. All run equally long, so the order of renewal is that of expiry."""

    def __init__(self, ttl_s: float, first_id: int) -> None:
        self.ttl_s = ttl_s
        self._next_id = first_id
        self._leases: OrderedDict[int, Lease] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def add(self, reader: str, blocks: Sequence[Block], now: float) -> Lease:
        lease = Lease(self._next_id, reader, blocks, now + self.ttl_s)
        self._next_id += 1
        self._leases[lease.lease_id] = lease
        return lease

    def renew(self, lease_id: int, now: float) -> bool:
        """Lets it run anew. False when there is no such lease (any more)."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.expires_at <= now:
            return False
        lease.expires_at = now + self.ttl_s
        self._leases.move_to_end(lease_id)
        return True

    def remove(self, lease_id: int) -> Lease | None:
        return self._leases.pop(lease_id, None)

    def pop_expired(self, now: float) -> list[Lease]:
        """Removes those whose time is over."""
        expired = []
        while self._leases and (lease := next(iter(self._leases.values()))).expires_at <= now:
            expired.append(lease)
            del self._leases[lease.lease_id]
        return expired
