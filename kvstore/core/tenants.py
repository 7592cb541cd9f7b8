"""Tenants and their quotas. Whose a block is decides who pays for its slot; that tenants never share a block is the keys' doing, for a
namespace's root is salted with its tenant (springtide.blocks.namespace_root)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from springtide.errors import InvalidRequest, SpringtideError

EVERY_OTHER = "*"
"""The key in a table of quotas for each tenant that it does not name, requests without a tenant included."""


class QuotaExceeded(SpringtideError):
    """The tenant holds as much as it may, and what it holds is in use. Others' blocks are not pushed out for it."""


@dataclass(slots=True, eq=False)
class Tenant:
    """The account of one tenant."""

    name: str
    quota: int | None
    """The most slots that it may hold; None: as many as there are."""
    slots: int = 0
    """The slots that it holds: private to its attempts, or of blocks that they stored."""
    unreferenced: int = 0
    """The part of them that nobody references: of committed blocks."""
    spare: int = 0
    """The spare ones among those: on the SSD too, with all that continues them."""

    @property
    def num_unused_or_spare(self) -> int:
        """The number of slots that it can have without losing a block that is not on the SSD. It has a quota."""
        assert self.quota is not None, "asked of tenants with a quota"
        return self.quota - self.slots + self.spare

    def own_evictions(self, count: int, num_blocks: int, leave_in_quota: int = 0) -> int:
        """The number of its own blocks that have to go before an attempt of it, which then has `num_blocks`, may take `count` more slots,
        with so many left that it could still have.

        Raises InvalidRequest when it never may, QuotaExceeded when too many of its blocks are in use.
        """
        if self.quota is None:
            return 0
        if num_blocks > self.quota:
            raise InvalidRequest(f"{num_blocks} blocks are more than the quota of tenant {self.name!r}: {self.quota} (kv.tenant_quotas)")
        in_use = self.slots - self.unreferenced
        if in_use + count + leave_in_quota > self.quota:
            kept = f", {leave_in_quota} are kept for others of it" if leave_in_quota else ""
            raise QuotaExceeded(
                f"tenant {self.name!r} holds {self.slots} of its quota of {self.quota} blocks (kv.tenant_quotas), "
                f"{in_use} of them in use{kept}: no room for {count} more"
            )
        return max(0, self.slots + count - self.quota)


class TenantAccounts:
    """The accounts of everybody who holds something. `quotas`: slots by tenant name, or EVERY_OTHER."""

    def __init__(self, quotas: Mapping[str, int] | None = None) -> None:
        self._quotas = dict(quotas or {})
        self._tenants: dict[str, Tenant] = {}

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def slots_of(self, name: str) -> int:
        """The number of slots that it holds."""
        tenant = self._tenants.get(name)
        return tenant.slots if tenant is not None else 0

    def find(self, name: str) -> Tenant:
        """The tenant of that name, made when it is not there. Whoever takes no slots for it calls `forget_if_idle`."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._quotas.get(name, self._quotas.get(EVERY_OTHER)))
        return tenant

    def forget_if_idle(self, tenant: Tenant) -> None:
        """Drops the account of one that holds nothing: names come from clients."""
        if tenant.slots == 0 and self._tenants.get(tenant.name) is tenant:
            del self._tenants[tenant.name]
