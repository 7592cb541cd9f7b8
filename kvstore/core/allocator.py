"""Which slot is whose: slots are given to attempts, become those of committed blocks, and come back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvstore._native import Block
from kvstore.core.attempt_slots import OWNERS, AttemptSlots, Holder
from kvstore.core.index import BlockIndex
from kvstore.core.journal import Journal
from kvstore.core.pins import Pins
from kvstore.core.results import UnknownAttempt
from kvstore.core.slots import SlotTable
from kvstore.core.ssd import SsdBlocks
from kvstore.core.tenants import Tenant, TenantAccounts
from springtide.errors import InvalidRequest, PoolFull, SpringtideError
from springtide.ids import AttemptId, BlockKey, Slot
from springtide.protocol.storage import BlocksRemoved, BlocksStored, Tier

_REMEMBERED_ATTEMPTS = 1 << 16


class SlotAllocator:
    """The allocator under every operation of the pool: slots move between free, private to one attempt, and that of a committed block, here
    and nowhere else."""

    def __init__(
        self, slots: SlotTable, index: BlockIndex, pins: Pins, tenants: TenantAccounts, journal: Journal, ssd: SsdBlocks | None = None
    ) -> None:
        self.slots = slots
        self.index = index
        self.pins = pins
        self.tenants = tenants
        self._journal = journal
        self._ssd = ssd
        self.attempts: dict[AttemptId, AttemptSlots] = {}
        self.orphans: dict[AttemptId, AttemptSlots] = {}
        """Attempts that nobody wants any more, while somebody still holds slots of theirs."""
        self._gone: OrderedDict[AttemptId, None] = OrderedDict()
        self.looked_up_blocks = 0
        self.hit_blocks = 0

    def is_over(self, attempt_id: AttemptId) -> bool:
        """Whether it was here and has ended, lately."""
        return attempt_id in self._gone

    def with_owner(self, attempt_id: AttemptId) -> AttemptSlots:
        """The attempt that its owner still wants. Raises UnknownAttempt when there is none (any more)."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None or not attempt.wanted:
            raise UnknownAttempt(f"attempt {attempt_id} is not known here")
        return attempt

    def with_engine(self, attempt_id: AttemptId) -> AttemptSlots:
        """The attempt that the engine still holds. Raises UnknownAttempt when there is none (any more)."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None or Holder.ENGINE not in attempt.holders:
            raise UnknownAttempt(f"attempt {attempt_id} is not known here")
        return attempt

    def look_up(self, keys: Sequence[BlockKey], tenant: str | None = None) -> list[Block]:
        """The longest held prefix, none of another than `tenant` if one is given; counted for the hit rate."""
        found = self.index.match(keys)
        if tenant is not None and found and found[0].tenant.name != tenant:
            found = []
        self.looked_up_blocks += len(keys)
        self.hit_blocks += len(found)
        return found

    def admit(
        self,
        attempt_id: AttemptId,
        keys: Sequence[BlockKey],
        num_blocks: int,
        max_reused: int,
        tenant_name: str,
        owner: Holder,
        leave_available: int = 0,
        leave_in_quota: int = 0,
    ) -> AttemptSlots:
        """A new attempt with the longest held prefix of `keys` up to `max_reused`, referenced, and private slots for the rest, with so many
        slots left that are free or evictable, and that its tenant could still have.

        Raises PoolFull, QuotaExceeded, or InvalidRequest when the attempt was here before, the numbers make no sense or the quota is less.
        """
        if attempt_id in self.attempts or self.is_over(attempt_id):
            raise InvalidRequest(f"attempt {attempt_id} was here before; every try takes a new id")
        if num_blocks < 1 or len(keys) > num_blocks:
            raise InvalidRequest(f"attempt {attempt_id} asks for {num_blocks} blocks with {len(keys)} keys")
        tenant = self.tenants.find(tenant_name)
        reused = self.look_up(keys[:max_reused], tenant_name)
        for block in reused:
            self.index.reference(block)
        try:
            fresh = self.allocate(num_blocks - len(reused), tenant, num_blocks, leave_available, leave_in_quota)
        except SpringtideError:
            for block in reversed(reused):
                self.index.dereference(block)
            self.tenants.forget_if_idle(tenant)
            raise
        attempt = AttemptSlots(
            attempt_id,
            tenant,
            list(keys),
            slots=[*(block.slot for block in reused), *fresh],
            blocks=[*reused, *([None] * len(fresh))],
            complete=len(reused),
            holders={owner: range(num_blocks)},
            num_private=len(fresh),
        )
        self.attempts[attempt_id] = attempt
        return attempt

    def allocate(self, count: int, tenant: Tenant, num_blocks: int, leave_available: int = 0, leave_in_quota: int = 0) -> list[Slot]:
        """Free slots for an attempt of `tenant` that then has `num_blocks`, after evicting as many blocks as it takes: the tenant's own
        until its quota suffices, then anybody's. Raises PoolFull, QuotaExceeded or InvalidRequest, with nothing changed."""
        own = tenant.own_evictions(count, num_blocks, leave_in_quota)
        short = count - own - self.slots.num_free
        if count + leave_available > self.slots.num_free + self.index.num_unreferenced:
            kept = f", {leave_available} of which are kept for others" if leave_available else ""
            raise PoolFull(
                f"{count} slots asked for; {self.slots.num_free} of {self.slots.num_slots} are free "
                f"and {self.index.num_unreferenced} evictable{kept}"
            )
        victims = self.index.evict(own, tenant) if own else []
        if short > 0:
            victims += self.index.evict(short)
        tenant.slots += count  # first, so that a tenant whose every block goes is not forgotten
        self.drop(victims)
        return self.slots.take(count)

    def drop(self, victims: Sequence[Block]) -> None:
        """Gives back the slots of blocks that the index has evicted, and tells whoever counts them."""
        self.pins.evicted(victims)
        self.slots.give_back([block.slot for block in victims])
        for block in victims:
            block.tenant.slots -= 1
            self.tenants.forget_if_idle(block.tenant)
        if self._ssd is not None:
            self._ssd.left_arena(victims)
        self._journal.tell(BlocksRemoved, [block.key for block in victims], Tier.DRAM)

    def publish(self, attempt: AttemptSlots, end: int, new_keys: Sequence[BlockKey] = ()) -> None:
        """Makes the attempt's blocks before `end` visible, or those before the first whose key is held under another parent or tenant."""
        attempt.keys += new_keys
        added = []
        parent = attempt.blocks[attempt.complete - 1] if attempt.complete else None
        for position in range(attempt.complete, end):
            slot, key = attempt.slots[position], attempt.keys[position]
            assert slot is not None, "the engine holds it"
            block = self.index.get(key)
            if block is None:
                block = self.index.insert(key, parent, slot, attempt.tenant)
                if self._ssd is not None:
                    self._ssd.entered_arena(block)
                attempt.num_private -= 1
                added.append(key)
            elif block.parent is not parent or block.tenant is not attempt.tenant:
                break
            else:
                self.index.reference(block)
            attempt.blocks[position] = parent = block
            attempt.complete = position + 1
        self._journal.tell(BlocksStored, added, Tier.DRAM)

    def let_go(self, attempt_id: AttemptId, holder: Holder) -> None:
        """Gives back what nobody else holds, from the end, so that references stay prefix-closed and leaves go first."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None or attempt.holders.pop(holder, None) is None:
            return
        if holder in OWNERS:
            self.orphans[attempt_id] = attempt
        if not attempt.held_in_full:
            self._give_back(attempt)
        if not attempt.holders:
            self._forget(attempt_id)

    def _give_back(self, attempt: AttemptSlots) -> None:
        slots, blocks = attempt.slots, attempt.blocks
        held = attempt.held if attempt.holders else None
        private: list[Slot] = []
        for position in range(len(slots) - 1, -1, -1):
            slot, block = slots[position], blocks[position]
            if slot is None or (held is not None and held(position)):
                continue
            slots[position] = blocks[position] = None
            if block is None or block.slot != slot:
                private.append(slot)
            if block is not None:
                self.index.dereference(block)
        attempt.num_private -= len(private)
        attempt.tenant.slots -= len(private)
        self.slots.give_back(private)

    def _forget(self, attempt_id: AttemptId) -> None:
        attempt = self.attempts.pop(attempt_id)
        self.tenants.forget_if_idle(attempt.tenant)
        self.orphans.pop(attempt_id, None)
        self.remember_over(attempt_id)

    def remember_over(self, attempt_id: AttemptId) -> None:
        """Keeps in mind that the attempt has ended: who asks for it is told, and nobody waits for it."""
        self._gone[attempt_id] = None
        if len(self._gone) > _REMEMBERED_ATTEMPTS:
            self._gone.popitem(last=False)
