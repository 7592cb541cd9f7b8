"""Who holds which slot: the bookkeeping under every operation of the pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvstore.core.attempt import Attempt, Holder, Place
from kvstore.core.block import Block
from kvstore.core.index import BlockIndex
from kvstore.core.results import PoolEvent, Removed, Stored, UnknownAttempt
from kvstore.core.slots import SlotTable
from springtide.errors import InvalidRequest, PoolFull
from springtide.ids import AttemptId, BlockKey, Slot

_REMEMBERED_ATTEMPTS = 1 << 16


class Ledger:
    """Slots move between free, private to one attempt, and that of a committed block, here and nowhere else."""

    def __init__(self, slots: SlotTable, index: BlockIndex) -> None:
        self.slots = slots
        self.index = index
        self.attempts: dict[AttemptId, Attempt] = {}
        self.orphans: dict[AttemptId, Attempt] = {}
        """Attempts whose engine has let go, while somebody else still holds slots of theirs."""
        self._gone: OrderedDict[AttemptId, None] = OrderedDict()
        self._events: list[PoolEvent] = []
        self.sequence = 0
        """Of the last event."""
        self.looked_up_blocks = 0
        self.hit_blocks = 0

    def is_over(self, attempt_id: AttemptId) -> bool:
        """It was here and has ended, lately."""
        return attempt_id in self._gone

    def with_engine(self, attempt_id: AttemptId) -> Attempt:
        """Raises UnknownAttempt when the engine does not hold such an attempt."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None or Holder.ENGINE not in attempt.holders:
            raise UnknownAttempt(f"attempt {attempt_id} is not known here")
        return attempt

    def look_up(self, keys: Sequence[BlockKey]) -> list[Block]:
        """The longest held prefix; counted for the hit rate."""
        found = self.index.match(keys)
        self.looked_up_blocks += len(keys)
        self.hit_blocks += len(found)
        return found

    def admit(self, attempt_id: AttemptId, keys: Sequence[BlockKey], num_blocks: int, max_reused: int) -> Attempt:
        """A new attempt with the longest held prefix of `keys` up to `max_reused`, referenced, and private slots for the rest.

        Raises PoolFull, or InvalidRequest when the attempt was here before or the numbers make no sense.
        """
        if attempt_id in self.attempts or self.is_over(attempt_id):
            raise InvalidRequest(f"attempt {attempt_id} was here before; every try takes a new id")
        if num_blocks < 1 or len(keys) > num_blocks:
            raise InvalidRequest(f"attempt {attempt_id} asks for {num_blocks} blocks with {len(keys)} keys")
        reused = self.look_up(keys[:max_reused])
        for block in reused:
            self.index.reference(block)
        try:
            fresh = self.allocate(num_blocks - len(reused))
        except PoolFull:
            for block in reversed(reused):
                self.index.dereference(block)
            raise
        places: list[Place | None] = [Place(block.slot, block) for block in reused]
        places += [Place(slot) for slot in fresh]
        attempt = Attempt(attempt_id, list(keys), places, len(reused), {Holder.ENGINE: range(num_blocks)}, num_private=len(fresh))
        self.attempts[attempt_id] = attempt
        return attempt

    def allocate(self, count: int) -> list[Slot]:
        """Free slots, after evicting as many blocks as it takes. Raises PoolFull, with nothing changed."""
        short = count - self.slots.num_free
        if short > self.index.num_unreferenced:
            raise PoolFull(
                f"{count} slots asked for; {self.slots.num_free} of {self.slots.num_slots} are free "
                f"and {self.index.num_unreferenced} evictable"
            )
        if short > 0:
            victims = self.index.evict(short)
            self.slots.give_back(block.slot for block in victims)
            self.sequence += 1
            self._events.append(Removed(self.sequence, [block.key for block in victims]))
        return self.slots.take(count)

    def publish(self, attempt: Attempt, end: int, new_keys: Sequence[BlockKey] = ()) -> None:
        """Makes the attempt's blocks before `end` visible, or those before the first whose key is held under another parent."""
        attempt.keys += new_keys
        added = []
        while attempt.complete < end:
            place, key = attempt.places[attempt.complete], attempt.keys[attempt.complete]
            before = attempt.places[attempt.complete - 1] if attempt.complete else None
            parent = before.block if before is not None else None
            assert place is not None, "the engine holds it"
            block = self.index.get(key)
            if block is None:
                block = self.index.insert(key, parent, place.slot)
                attempt.num_private -= 1
                added.append(key)
            elif block.parent is not parent:
                break
            self.index.reference(block)
            place.block = block
            attempt.complete += 1
        if added:
            self.sequence += 1
            self._events.append(Stored(self.sequence, added))

    def let_go(self, attempt_id: AttemptId, holder: Holder) -> None:
        """Gives back what nobody else holds, from the end, so that references stay prefix-closed and leaves go first."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None or attempt.holders.pop(holder, None) is None:
            return
        if holder is Holder.ENGINE:
            self.orphans[attempt_id] = attempt
        for position in range(len(attempt.places) - 1, -1, -1):
            place = attempt.places[position]
            if place is None or attempt.held(position):
                continue
            attempt.places[position] = None
            if place.private:
                attempt.num_private -= 1
                self.slots.give_back([place.slot])
            if place.block is not None:
                self.index.dereference(place.block)
        if not attempt.holders:
            self._forget(attempt_id)

    def take_events(self) -> list[PoolEvent]:
        events, self._events = self._events, []
        return events

    def _forget(self, attempt_id: AttemptId) -> None:
        del self.attempts[attempt_id]
        self.orphans.pop(attempt_id, None)
        self._gone[attempt_id] = None
        if len(self._gone) > _REMEMBERED_ATTEMPTS:
            self._gone.popitem(last=False)
