"""The invariants of a pool: what must hold at every moment. Asserted after each step of the randomised tests; O(slots)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvstore.core.attempt_slots import AttemptSlots
from kvstore.core.pins import PinKind

if TYPE_CHECKING:
    from kvstore.core.allocator import SlotAllocator
    from kvstore.core.index import BlockIndex
    from kvstore.core.leases import LeaseTable
    from kvstore.core.pins import Pins
    from kvstore.core.slots import SlotTable
    from springtide.ids import AttemptId


def validate(allocator: SlotAllocator, leases: LeaseTable) -> None:
    """Asserts all of them. Raises AssertionError naming what is broken."""
    attempts = allocator.attempts
    allocator.index.validate()
    allocator.pins.validate()
    _each_slot_has_one_owner(allocator.slots, allocator.index, attempts)
    _references_add_up(allocator.index, leases, allocator.pins, attempts)
    _each_tenant_pays_for_its_slots(allocator)
    for attempt in attempts.values():
        _attempt_is_sound(attempt)
    unwanted = {attempt_id for attempt_id, attempt in attempts.items() if not attempt.wanted}
    assert allocator.orphans.keys() == unwanted, "orphans are those that nobody wants"


def _each_slot_has_one_owner(slots: SlotTable, index: BlockIndex, attempts: dict[AttemptId, AttemptSlots]) -> None:
    owners = Counter(slots.free())
    owners.update(block.slot for block in index.blocks())
    for attempt in attempts.values():
        private = [slot for position, slot in enumerate(attempt.slots) if slot is not None and attempt.private(position)]
        assert attempt.num_private == len(private)
        owners.update(private)
    assert set(owners) == set(range(slots.num_slots)), "no slot is lost"
    assert all(count == 1 for count in owners.values()), "no slot is owned twice"


def _references_add_up(index: BlockIndex, leases: LeaseTable, pins: Pins, attempts: dict[AttemptId, AttemptSlots]) -> None:
    references = Counter(id(block) for lease in leases for block in lease.blocks)
    references.update(id(block) for pin in pins if pin.kind is PinKind.HARD for block in pin.blocks.values())
    references.update(id(block) for attempt in attempts.values() for block in attempt.blocks if block is not None)
    held = {id(block): block for block in index.blocks()}
    assert references.keys() <= held.keys(), "what is referenced is held"
    assert all(block.refs == references[identity] for identity, block in held.items())


def _each_tenant_pays_for_its_slots(allocator: SlotAllocator) -> None:
    slots = Counter(block.tenant for block in allocator.index.blocks())
    unreferenced = Counter(block.tenant for block in allocator.index.blocks() if block.refs == 0)
    for attempt in allocator.attempts.values():
        slots[attempt.tenant] += attempt.num_private
    assert +slots == {tenant: tenant.slots for tenant in allocator.tenants}, "each slot in use is on one tenant's account"
    for tenant in allocator.tenants:
        assert tenant.unreferenced == unreferenced[tenant]
        assert tenant.quota is None or tenant.slots <= tenant.quota, "a quota is kept"


def _attempt_is_sound(attempt: AttemptSlots) -> None:
    assert attempt.holders, "an attempt that nobody holds is gone"
    assert 0 <= attempt.complete <= min(len(attempt.keys), len(attempt.slots))
    for position, (slot, block) in enumerate(zip(attempt.slots, attempt.blocks, strict=True)):
        assert (slot is not None) == attempt.held(position), "a place is kept exactly as long as somebody holds it"
        if slot is None:
            assert block is None, "who gives up a place references no block there"
            continue
        assert (block is not None) == (position < attempt.complete), "final blocks, and only they, are committed"
        if block is not None:
            assert block.key == attempt.keys[position]
