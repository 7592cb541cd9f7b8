"""The pool of one node: every rule about who holds which slot.

A slot is free, private to one attempt, or the slot of a committed block; `validate` asserts that it is exactly one of them. All methods are
synchronous and either do all they say or raise without a trace, but for `commit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from typing import TYPE_CHECKING

from kvstore._native import Block
from kvstore.core.allocator import SlotAllocator
from kvstore.core.attempt_slots import AttemptSlots, Holder
from kvstore.core.eviction import new_policy
from kvstore.core.eviction_policy import EvictionPolicy
from kvstore.core.index import BlockIndex
from kvstore.core.ingest import Ingest
from kvstore.core.invariants import validate
from kvstore.core.journal import Journal
from kvstore.core.leases import Lease, LeaseTable
from kvstore.core.listing import Listing
from kvstore.core.pins import Pins, SoftPins
from kvstore.core.results import Evicted, IngestFailed, PoolCounts, TransferCancelled, UnknownAttempt
from kvstore.core.slots import SlotTable
from kvstore.core.ssd import SsdBlocks
from kvstore.core.tenants import TenantAccounts
from springtide.errors import InvalidRequest, SpringtideError
from springtide.ids import AttemptId, BlockKey, Incarnation, NodeId, Slot
from springtide.protocol.storage import Acquired, BlockEvent, Ingested, IngestTargets, LeasedPrefix, Reserved, Unit, Writer

if TYPE_CHECKING:
    import numpy as np

_UNNAMED, _FIRST = NodeId(""), Incarnation(1)
"""Whose a pool is that nobody else hears of."""


class Pool:
    """The pool of store `node_id`, of this `incarnation`: lease ids count from that on, so that an old one never fits. `generations` and
    `settle` as in SlotTable, `quotas` as in TenantAccounts. At most `hard_pins` blocks can be under hard pins; None: half of the slots.
    With an SSD (`ssd_capacity` blocks), `ssd` says what it holds; to write and to read it is the caller's."""

    def __init__(
        self,
        generations: MutableSequence[int] | np.ndarray,
        num_layers: int,
        *,
        node_id: NodeId = _UNNAMED,
        incarnation: Incarnation = _FIRST,
        lease_s: float = 30.0,
        policy: EvictionPolicy | None = None,
        quotas: Mapping[str, int] | None = None,
        hard_pins: int | None = None,
        settle: Callable[[Sequence[Slot]], None] | None = None,
        ssd_capacity: int | None = None,
        ssd_policy: EvictionPolicy | None = None,
    ) -> None:
        soft: SoftPins = {}
        index = BlockIndex(len(generations), policy or new_policy("lru", len(generations)), soft, tells_dirty=ssd_capacity is not None)
        self._journal = Journal(node_id, incarnation)
        self.ssd: SsdBlocks | None = None
        if ssd_capacity is not None:
            self.ssd = SsdBlocks(index, ssd_capacity, ssd_policy or new_policy("lru", ssd_capacity), self._journal)
        self.pins = Pins(index, soft, len(generations) // 2 if hard_pins is None else hard_pins)
        self.listing = Listing(index, self.pins)
        self.tenants = TenantAccounts(quotas)
        self._allocator = SlotAllocator(SlotTable(generations, settle), index, self.pins, self.tenants, self._journal, self.ssd)
        self._leases = LeaseTable(lease_s, incarnation)
        self._num_layers = num_layers

    # ---- attempts ----

    def acquire(
        self,
        attempt_id: AttemptId,
        keys: Sequence[BlockKey],
        num_blocks: int,
        max_reused_blocks: int,
        tenant: str = "",
        leave_available: int = 0,
        leave_in_quota: int = 0,
    ) -> Acquired:
        """Takes slots for a prompt of `num_blocks`: the longest held prefix of `keys` up to `max_reused_blocks`, referenced, and private
        ones. `leave_available` slots have to be available still, and `leave_in_quota` to the tenant.

        Raises PoolFull, QuotaExceeded, or InvalidRequest when the attempt is known already, the numbers make no sense, or the tenant's
        quota can never hold so many blocks.
        """
        attempt = self._allocator.admit(
            attempt_id, keys, num_blocks, max_reused_blocks, tenant, Holder.ENGINE, leave_available, leave_in_quota
        )
        return Acquired(attempt_id, _slots_of(attempt), attempt.complete)

    def reserve(
        self,
        attempt_id: AttemptId,
        keys: Sequence[BlockKey],
        num_blocks: int,
        tenant: str = "",
        leave_available: int = 0,
        leave_in_quota: int = 0,
    ) -> Reserved:
        """Takes slots as `acquire`, for a prompt that a peer will write (`open_ingest`)."""
        attempt = self._allocator.admit(attempt_id, keys, num_blocks, len(keys), tenant, Holder.ENGINE, leave_available, leave_in_quota)
        attempt.ingest = Ingest(self._num_layers, num_blocks, attempt.complete)
        return Reserved(attempt_id, _slots_of(attempt), attempt.complete)

    def grow(self, attempt_id: AttemptId, num_blocks: int) -> list[Slot]:
        """Takes that many more private slots. Raises PoolFull, QuotaExceeded, InvalidRequest as `acquire`, UnknownAttempt."""
        attempt = self._allocator.with_engine(attempt_id)
        slots = self._allocator.allocate(num_blocks, attempt.tenant, len(attempt.slots) + num_blocks)
        attempt.slots += slots
        attempt.blocks += [None] * len(slots)
        attempt.num_private += len(slots)
        attempt.holders[Holder.ENGINE] = range(len(attempt.slots))
        return slots

    def commit(self, attempt_id: AttemptId, first_block: int, keys: Sequence[BlockKey]) -> None:
        """Makes blocks [first_block, first_block + len(keys)) visible, which are final in all layers: others find them from now on. Where
        an equal block is held already, that one stays and this attempt's copy remains private. Repeats change nothing.

        Raises UnknownAttempt, or InvalidRequest when a block before is not final or a key is not the one given before; and when a key is
        held under another parent, the blocks before that one being visible then.
        """
        attempt = self._allocator.with_engine(attempt_id)
        if attempt.ingest is not None and not attempt.ingest.complete:
            raise InvalidRequest(f"commit of {attempt_id}: its prompt has not arrived yet")
        if Holder.FETCH in attempt.holders:
            raise InvalidRequest(f"commit of {attempt_id}: its prefix has not arrived yet")
        end = first_block + len(keys)
        if first_block > attempt.complete or end > len(attempt.slots):
            raise InvalidRequest(
                f"commit of blocks [{first_block}, {end}) of {attempt_id}, "
                f"which has {len(attempt.slots)} blocks, the first {attempt.complete} final"
            )
        known = attempt.keys[first_block:end]
        if known != list(keys[: len(known)]):
            raise InvalidRequest(f"commit of {attempt_id} from block {first_block} on: the keys are not those given before")
        self._allocator.publish(attempt, end, keys[len(attempt.keys) - first_block :])
        if attempt.complete < end:
            raise InvalidRequest(f"commit of {attempt_id}: the key of block {attempt.complete} is that of a block with another parent")

    def committing(self, keys: Sequence[BlockKey]) -> bool:
        """Whether these blocks, of which the last is not held, are an engine's attempt's, which has not committed them yet."""
        place = len(keys) - 1
        return (
            bool(keys)
            and self._allocator.index.get(keys[-1]) is None
            and any(
                attempt.complete <= place < len(attempt.keys) and attempt.keys[place] == keys[place] and Holder.ENGINE in attempt.holders
                for attempt in self._allocator.attempts.values()
            )
        )

    def release(self, attempt_id: AttemptId) -> None:
        """Ends the attempt for the engine, which will not touch its slots again, nor ask for any. A repeat is a no-op."""
        if attempt_id in self._allocator.attempts:
            self._allocator.let_go(attempt_id, Holder.ENGINE)
        else:
            self._allocator.remember_over(attempt_id)

    def engine_ended(self) -> list[AttemptId]:
        """Ends the engine, which asks for nothing more; yet a pass of its may still be writing. Its attempts, which are over, stay in
        quarantine until `engine_fenced`. Returns them."""
        unfenced = [attempt_id for attempt_id, attempt in self._allocator.attempts.items() if Holder.ENGINE in attempt.holders]
        for attempt_id in unfenced:
            holders = self._allocator.attempts[attempt_id].holders
            holders[Holder.UNFENCED_ENGINE] = holders[Holder.ENGINE]
            self._allocator.let_go(attempt_id, Holder.ENGINE)
        return unfenced

    def engine_fenced(self, unfenced: Sequence[AttemptId]) -> None:
        """Gives up the slots of an engine's attempts: it is certain that the engine writes no more."""
        for attempt_id in unfenced:
            self._allocator.let_go(attempt_id, Holder.UNFENCED_ENGINE)

    # ---- transfers by this store ----

    def begin_fetch(self, attempt_id: AttemptId, blocks: range) -> tuple[Slot, ...]:
        """Lets the store write these private blocks of the attempt, until `end_fetch`. Returns their slots. Raises UnknownAttempt."""
        attempt = self._allocator.with_owner(attempt_id)
        assert blocks.start == attempt.complete, "a fetch follows the blocks that are there"
        attempt.holders[Holder.FETCH] = blocks
        return tuple(slot for slot in attempt.slots[blocks.start : blocks.stop] if slot is not None)

    def end_fetch(self, attempt_id: AttemptId, valid_blocks: int) -> None:
        """Ends the fetch: nothing more will be written; the attempt's first `valid_blocks` are there in all layers and become visible."""
        attempt = self._allocator.attempts.get(attempt_id)
        if attempt is None or Holder.FETCH not in attempt.holders:
            return
        if attempt.wanted and valid_blocks > attempt.complete:
            self._allocator.publish(attempt, valid_blocks)
        self._allocator.let_go(attempt_id, Holder.FETCH)

    def begin_hand_over(self, attempt_id: AttemptId) -> tuple[Slot, ...]:
        """Lets the store read every block of the prompt, until `end_hand_over`. Returns their slots. Raises UnknownAttempt."""
        attempt = self._allocator.with_engine(attempt_id)
        attempt.holders[Holder.HAND_OVER] = range(len(attempt.slots))
        return _slots_of(attempt)

    def end_hand_over(self, attempt_id: AttemptId) -> None:
        self._allocator.let_go(attempt_id, Holder.HAND_OVER)

    def admit_replica(self, attempt_id: AttemptId, keys: Sequence[BlockKey], tenant: str) -> Acquired:
        """Takes slots as `acquire`, for blocks that this store brings here by itself (`begin_fetch`, `end_fetch`), until `end_replica`."""
        attempt = self._allocator.admit(attempt_id, keys, len(keys), len(keys), tenant, Holder.STORE)
        return Acquired(attempt_id, _slots_of(attempt), attempt.complete)

    def end_replica(self, attempt_id: AttemptId) -> None:
        self._allocator.let_go(attempt_id, Holder.STORE)

    # ---- ingest: a peer writes ----

    def open_ingest(self, attempt_id: AttemptId, writer: Writer) -> IngestTargets | None:
        """The slots into which `writer` is to put the prompt's blocks; as `begin_ingest`."""
        ingest = self.begin_ingest(attempt_id, writer)
        if ingest is None:
            return None
        slots = _slots_of(self._allocator.attempts[attempt_id])[: ingest.num_blocks]
        return IngestTargets(self.incarnation, slots, self._generations(slots), ingest.present)

    def begin_ingest(self, attempt_id: AttemptId, writer: Writer) -> Ingest | None:
        """The ingest of the prompt's blocks by `writer`; None when the attempt has not been reserved yet. From now on the absent blocks'
        slots are pinned until the writer closes or is fenced. The same writer may ask again.

        Raises UnknownAttempt when the attempt is over, InvalidRequest when it belongs to another writer or is none to be written.
        """
        attempt = self._allocator.attempts.get(attempt_id)
        if attempt is None:
            if self._allocator.is_over(attempt_id):
                raise UnknownAttempt(f"attempt {attempt_id} is over")
            return None
        ingest = attempt.ingest
        if ingest is None:
            raise InvalidRequest(f"attempt {attempt_id} is not one to be written by a peer")
        if Holder.ENGINE not in attempt.holders or ingest.closed:
            raise UnknownAttempt(f"attempt {attempt_id} is over")
        if ingest.writer is None:
            ingest.writer = writer
            attempt.holders[Holder.INGEST] = range(ingest.present, ingest.num_blocks)
        elif ingest.writer != writer:
            raise InvalidRequest(f"attempt {attempt_id} is being written by {ingest.writer}, not {writer}")
        return ingest

    def cover(self, attempt_id: AttemptId, writer: NodeId, unit: Unit) -> Ingested | IngestFailed | None:
        """Takes note that the writer's bytes of `unit` are in place."""
        found = self._ingesting(attempt_id, writer)
        if found is None:
            return None
        attempt, ingest = found
        try:
            ingest.cover(unit)
        except InvalidRequest as error:
            return self.fail_ingest(attempt_id, error)
        return self._complete_ingest(attempt, ingest)

    def seal(self, attempt_id: AttemptId, writer: NodeId, first_token: int) -> Ingested | IngestFailed | None:
        """Takes note that the writer has written everything. When it has arrived, the prompt's full blocks become visible."""
        found = self._ingesting(attempt_id, writer)
        if found is None:
            return None
        attempt, ingest = found
        ingest.first_token = first_token
        return self._complete_ingest(attempt, ingest)

    def close_ingest(self, attempt_id: AttemptId, writer: NodeId, incarnation: Incarnation) -> IngestFailed | None:
        """Ends the ingest: the writer will not write again, or gave up before it was told where. A failure when the engine still waited for
        it."""
        attempt = self._allocator.attempts.get(attempt_id)
        if attempt is not None and attempt.ingest is not None and attempt.ingest.writer is None:
            return self.fail_ingest(attempt_id, TransferCancelled(f"{writer} gave up the hand-over before it began"))
        found = self._ingesting(attempt_id, writer)
        if found is None or found[1].writer is None or found[1].writer.incarnation != incarnation:
            return None
        missing = found[1].missing_blocks
        failure = self.fail_ingest(attempt_id, TransferCancelled(f"{writer} gave up the hand-over with {missing} blocks missing"))
        self._allocator.let_go(attempt_id, Holder.INGEST)
        return failure

    def fence(self, writer: Writer) -> None:
        """Ends every ingest by the writer, of whom it is certain that nothing can land any more."""
        for attempt_id in self.ingests_of(writer):
            self.close_ingest(attempt_id, writer.node_id, writer.incarnation)

    def fail_ingest(self, attempt_id: AttemptId, error: SpringtideError) -> IngestFailed | None:
        """Tells the engine to wait no longer; the writer may still write, so the slots stay pinned."""
        attempt = self._allocator.attempts.get(attempt_id)
        if attempt is None or attempt.ingest is None or attempt.ingest.closed or Holder.ENGINE not in attempt.holders:
            return None
        attempt.ingest.closed = True
        return IngestFailed(attempt_id, error)

    def writers(self) -> set[Writer]:
        """The stores that may write here."""
        return {writer for attempt in self._allocator.attempts.values() if (writer := _open_writer(attempt)) is not None}

    def ingests_of(self, writer: Writer) -> list[AttemptId]:
        """The attempts that it may write."""
        return [attempt_id for attempt_id, attempt in self._allocator.attempts.items() if _open_writer(attempt) == writer]

    def quarantined_ingests(self) -> list[tuple[AttemptId, Writer]]:
        """The attempts whose engine waits no more, or in vain, but whose writer has not closed."""
        return [
            (attempt_id, writer)
            for attempt_id, attempt in self._allocator.attempts.items()
            if (writer := _open_writer(attempt)) is not None
            and (attempt_id in self._allocator.orphans or (attempt.ingest and attempt.ingest.closed))
        ]

    # ---- leases: a peer reads ----

    def lease(self, reader: str, keys: Sequence[BlockKey], now: float, tenant: str | None = None) -> LeasedPrefix:
        """References the longest held prefix of `keys`, for `lease_s`; none of another than `tenant` if one is given."""
        ttl_ms = int(self._leases.ttl_s * 1000)
        blocks = self._allocator.look_up(keys, tenant)
        if not blocks:
            return LeasedPrefix(0, self.incarnation, (), (), ttl_ms, "")
        for block in blocks:
            self._allocator.index.reference(block)
        lease = self._leases.add(reader, blocks, now)
        slots = tuple([block.slot for block in blocks])
        return LeasedPrefix(lease.lease_id, self.incarnation, slots, self._generations(slots), ttl_ms, blocks[0].tenant.name)

    def renew_leases(self, lease_ids: Sequence[int], now: float) -> list[int]:
        """Lets them run anew. Returns those that no longer exist."""
        return [lease_id for lease_id in lease_ids if not self._leases.renew(lease_id, now)]

    def release_lease(self, lease_id: int) -> None:
        """Ends it. A repeat is a no-op."""
        lease = self._leases.remove(lease_id)
        if lease is not None:
            self._end_lease(lease)

    def expire_leases(self, now: float) -> int:
        """Ends those whose time is over. Returns how many they were."""
        expired = self._leases.pop_expired(now)
        for lease in expired:
            self._end_lease(lease)
        return len(expired)

    def num_held(self, keys: Sequence[BlockKey]) -> int:
        """The length of the longest held prefix. Not counted for the hit rate: nobody uses it."""
        return len(self._allocator.index.match(keys))

    # ---- by order of an operator ----

    def evict(self, keys: Sequence[BlockKey] | None) -> Evicted:
        """Removes these blocks and all that continue them, or everything when None, but for what is in use or pinned; O(blocks). Of what
        goes, and of what was on the SSD alone, the tier has to remove the copies."""
        index, chosen = self._allocator.index, None if keys is None else frozenset(keys)
        victims: list[Block] = []
        spared: set[BlockKey] = set()
        for block in reversed(index.with_descendants(chosen)):
            if block.evictable and self.pins.kind_of(block.key) is None:
                index.discard(block)
                victims.append(block)
            else:
                spared.add(block.key)
        self._allocator.drop(victims)
        copies = [] if self.ssd is None else self.ssd.lost(chosen, spared)
        return Evicted(len(victims), len(spared), copies)

    # ---- watching ----

    def take_events(self) -> list[BlockEvent]:
        """The events since the last call, numbered from 1 without a gap."""
        return self._journal.take()

    @property
    def node_id(self) -> NodeId:
        return self._journal.node_id

    @property
    def incarnation(self) -> Incarnation:
        return self._journal.incarnation

    @property
    def sequence(self) -> int:
        """The number of the last event."""
        return self._journal.sequence

    @property
    def looked_up_blocks(self) -> int:
        return self._allocator.looked_up_blocks

    @property
    def hit_blocks(self) -> int:
        return self._allocator.hit_blocks

    @property
    def num_slots(self) -> int:
        return self._allocator.slots.num_slots

    @property
    def num_available(self) -> int:
        """The number of free slots, and of those of blocks that nobody references; as `counts` has them."""
        return self._allocator.slots.num_free + self._allocator.index.num_unreferenced

    @property
    def num_free_or_spare(self) -> int:
        """The number of slots that can be had without losing a block that is not on the SSD."""
        return self._allocator.slots.num_free + self._allocator.index.num_spare

    def tenant_of(self, keys: Sequence[BlockKey]) -> str | None:
        """The tenant whose the prompt's held blocks are; None when none is held."""
        first = self._allocator.index.match(keys[:1])
        return first[0].tenant.name if first else None

    @property
    def num_blocks(self) -> int:
        """The number of blocks that are held, in use or not."""
        return len(self._allocator.index)

    def held_keys(self) -> list[BlockKey]:
        """The keys of all blocks, parents before children; together with `sequence` a snapshot."""
        return self._allocator.index.keys()

    def held_blocks(self) -> list[Block]:
        """All blocks, as `held_keys`, in a fraction of the time."""
        return self._allocator.index.blocks()

    def counts(self) -> PoolCounts:
        """The slots by state; O(attempts)."""
        free, cached = self._allocator.slots.num_free, self._allocator.index.num_unreferenced
        quarantined = sum(attempt.num_private for attempt in self._allocator.orphans.values() if attempt.quarantined)
        in_use = self._allocator.slots.num_slots - free - cached - quarantined
        ingests = sum(_open_writer(attempt) is not None for attempt in self._allocator.attempts.values())
        return PoolCounts(free, cached, in_use, quarantined, len(self._leases), ingests)

    def validate(self) -> None:
        """Asserts the invariants; O(slots)."""
        validate(self._allocator, self._leases)
        if self.ssd is not None:
            self.ssd.validate()
        assert self.counts().total == self._allocator.slots.num_slots

    # ---- how it is done ----

    def _ingesting(self, attempt_id: AttemptId, writer: NodeId) -> tuple[AttemptSlots, Ingest] | None:
        attempt = self._allocator.attempts.get(attempt_id)
        opened_by = _open_writer(attempt) if attempt is not None else None
        if attempt is None or attempt.ingest is None or opened_by is None or opened_by.node_id != writer:
            return None
        return attempt, attempt.ingest

    def _complete_ingest(self, attempt: AttemptSlots, ingest: Ingest) -> Ingested | None:
        if ingest.first_token is None or ingest.missing_blocks:
            return None
        waiting = Holder.ENGINE in attempt.holders and not ingest.closed
        ingest.closed = True
        if waiting:
            self._allocator.publish(attempt, len(attempt.keys))
        self._allocator.let_go(attempt.attempt_id, Holder.INGEST)
        return Ingested(attempt.attempt_id, ingest.first_token) if waiting else None

    def _generations(self, slots: Sequence[Slot]) -> tuple[int, ...]:
        return tuple(map(self._allocator.slots.generation, slots))

    def _end_lease(self, lease: Lease) -> None:
        for block in reversed(lease.blocks):
            self._allocator.index.dereference(block)


def _slots_of(attempt: AttemptSlots) -> tuple[Slot, ...]:
    return tuple(slot for slot in attempt.slots if slot is not None)


def _open_writer(attempt: AttemptSlots) -> Writer | None:
    return attempt.ingest.writer if attempt.ingest is not None and Holder.INGEST in attempt.holders else None
