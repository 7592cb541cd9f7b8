"""The pool under random orders of everything that engines, peers and time can do to it."""

from __future__ import annotations

import itertools
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvstore_support import keys_of

from kvstore.core.pool import Pool
from kvstore.core.results import IngestFailed, UnknownAttempt
from kvstore.core.tenants import QuotaExceeded
from springtide.errors import InvalidRequest, PoolFull
from springtide.ids import AttemptId, BlockKey, Incarnation, NodeId
from springtide.protocol.storage import BlocksStored, Ingested, IngestTargets, Unit, Writer

NUM_SLOTS, NUM_LAYERS, LEASE_S, HARD_PINS = 12, 3, 30.0, 4
INCARNATION = Incarnation(7)
WRITERS = [Writer(NodeId(f"peer-{i}"), Incarnation(100 + i), "") for i in range(2)]
PROMPTS = st.sampled_from([[], [0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 0, 1], [0, 0, 1, 1], [1], [1, 0]])
"""Few, so that attempts meet."""


class Attempt:
    def __init__(self, attempt_id: AttemptId, keys: list[BlockKey], slots: list[int], present: int, reserved: bool) -> None:
        self.attempt_id, self.keys, self.slots, self.complete, self.reserved = attempt_id, keys, slots, present, reserved
        self.num_prompt_blocks = len(slots)
        self.engine = True
        self.unfenced: list[tuple[int, int]] = []
        """Slots that its engine, whose stream has ended, may still write, with their generations."""
        self.waiting = reserved
        self.fetching: range | None = None
        self.handing_over = False
        self.writer: Writer | None = None
        self.targets = IngestTargets(INCARNATION)
        self.outcomes: list[Ingested | IngestFailed] = []


class PoolMachine(RuleBasedStateMachine):
    QUOTAS: ClassVar[dict[str, int]] = {}

    def tenant_of(self, prompt: list[int]) -> str:
        return ""

    @initialize()
    def make(self) -> None:
        self.generations = [0] * NUM_SLOTS
        self.pool = Pool(self.generations, NUM_LAYERS, lease_s=LEASE_S, incarnation=INCARNATION, quotas=self.QUOTAS, hard_pins=HARD_PINS)
        self.attempts: dict[AttemptId, Attempt] = {}
        self.over: list[AttemptId] = []
        self.leases: dict[int, tuple[float, list[tuple[int, int]]]] = {}
        self.now = 0.0
        self.names = itertools.count()
        self.last_generation = [0] * NUM_SLOTS
        self.held: set[BlockKey] = set()
        self.sequence = 0

    # ---- the engine ----

    @rule(prompt=PROMPTS, partial=st.booleans(), max_reused=st.integers(0, 5))
    def acquire(self, prompt: list[int], partial: bool, max_reused: int) -> None:
        self._admit(prompt, partial, max_reused)

    @rule(prompt=PROMPTS, partial=st.booleans())
    def reserve(self, prompt: list[int], partial: bool) -> None:
        self._admit(prompt, partial, None)

    def _admit(self, prompt: list[int], partial: bool, max_reused: int | None) -> None:
        keys, num_blocks = keys_of(*prompt), max(len(prompt) + partial, 1)
        attempt_id = AttemptId(f"attempt-{next(self.names)}")
        before, tenant = self.pool.counts(), self.tenant_of(prompt)
        try:
            if max_reused is None:
                reserved = self.pool.reserve(attempt_id, keys, num_blocks, tenant)
                slots, reused = list(reserved.slots), reserved.present_blocks
            else:
                acquired = self.pool.acquire(attempt_id, keys, num_blocks, max_reused, tenant)
                slots, reused = list(acquired.slots), acquired.local_blocks
                assert reused <= max_reused
        except PoolFull:
            assert before.available < num_blocks
            assert self.pool.counts() == before, "a refused attempt leaves no trace"
            return
        except (QuotaExceeded, InvalidRequest):
            assert self._in_use(tenant) + num_blocks > self.QUOTAS[tenant]
            assert self.pool.counts() == before, "a refused attempt leaves no trace"
            return
        assert len(set(slots)) == len(slots) == num_blocks
        self._handed_out(slots[reused:])
        self.attempts[attempt_id] = Attempt(attempt_id, keys, slots, reused, max_reused is None)

    @precondition(lambda self: self._with_engine())
    @rule(data=st.data(), count=st.integers(1, 4))
    def grow(self, data: st.DataObject, count: int) -> None:
        attempt = data.draw(st.sampled_from(self._with_engine()))
        available = self.pool.counts().available
        try:
            slots = self.pool.grow(attempt.attempt_id, count)
        except PoolFull:
            assert available < count
        except (QuotaExceeded, InvalidRequest):
            tenant = self.tenant_of_attempt(attempt)
            assert self._in_use(tenant) + count > self.QUOTAS[tenant]
        else:
            self._handed_out(slots)
            attempt.slots += slots

    @precondition(lambda self: self._with_engine())
    @rule(data=st.data(), count=st.integers(0, 3), back=st.integers(0, 2), label=st.integers(0, 1))
    def commit(self, data: st.DataObject, count: int, back: int, label: int) -> None:
        """Of what comes next, possibly repeating blocks before."""
        attempt = data.draw(st.sampled_from(self._with_engine()))
        first = max(attempt.complete - back, 0)
        end = min(attempt.complete + count, len(attempt.slots))
        keys = list(attempt.keys)
        while len(keys) < end:
            keys.append(BlockKey((keys[-1][1:] if keys else b"k" * 15) + bytes([label])))
        try:
            self.pool.commit(attempt.attempt_id, first, keys[first:end])
        except InvalidRequest:
            assert attempt.fetching or (attempt.reserved and not any(isinstance(o, Ingested) for o in attempt.outcomes))
            return
        assert not attempt.fetching, "blocks on their way are not final"
        attempt.keys, attempt.complete = keys, max(attempt.complete, end)

    @precondition(lambda self: self.attempts or self.over)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        attempt_id = data.draw(st.sampled_from([*self.attempts, *self.over[-3:]]))
        self.pool.release(attempt_id)
        if attempt_id in self.attempts:
            self.attempts[attempt_id].engine = False
            self._settle(self.attempts[attempt_id])

    @precondition(lambda self: self._with_engine())
    @rule()
    def engine_ends(self) -> None:
        unfenced = self.pool.engine_ended()
        assert set(unfenced) == {attempt.attempt_id for attempt in self._with_engine()}
        for attempt_id in unfenced:
            attempt = self.attempts[attempt_id]
            attempt.engine, attempt.unfenced = False, [(slot, self.generations[slot]) for slot in attempt.slots]

    @precondition(lambda self: any(attempt.unfenced for attempt in self.attempts.values()))
    @rule()
    def ended_engine_is_fenced(self) -> None:
        for attempt in [attempt for attempt in self.attempts.values() if attempt.unfenced]:
            self.pool.engine_fenced([attempt.attempt_id])
            attempt.unfenced = []
            self._settle(attempt)

    # ---- transfers of this store ----

    @precondition(lambda self: self._with_engine())
    @rule(data=st.data(), count=st.integers(1, 3))
    def begin_fetch(self, data: st.DataObject, count: int) -> None:
        attempt = data.draw(st.sampled_from(self._with_engine()))
        blocks = range(attempt.complete, min(attempt.complete + count, len(attempt.keys)))
        if attempt.reserved or attempt.fetching or not blocks:
            return
        assert list(self.pool.begin_fetch(attempt.attempt_id, blocks)) == attempt.slots[blocks.start : blocks.stop]
        attempt.fetching = blocks

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), valid=st.integers(0, 3))
    def end_fetch(self, data: st.DataObject, valid: int) -> None:
        attempt = data.draw(st.sampled_from(list(self.attempts.values())))
        if attempt.fetching is None:
            self.pool.end_fetch(attempt.attempt_id, 3)  # repeated: no-op
            return
        valid_blocks = min(attempt.fetching.start + valid, attempt.fetching.stop)
        self.pool.end_fetch(attempt.attempt_id, valid_blocks)
        if attempt.engine:
            attempt.complete = valid_blocks
        attempt.fetching = None
        self._settle(attempt)

    @precondition(lambda self: self._with_engine())
    @rule(data=st.data())
    def begin_hand_over(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(self._with_engine()))
        assert list(self.pool.begin_hand_over(attempt.attempt_id)) == attempt.slots
        attempt.handing_over = True

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def end_hand_over(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(list(self.attempts.values())))
        self.pool.end_hand_over(attempt.attempt_id)
        attempt.handing_over = False
        self._settle(attempt)

    # ---- a peer writes ----

    @rule(data=st.data(), writer=st.sampled_from(WRITERS))
    def open_ingest(self, data: st.DataObject, writer: Writer) -> None:
        attempt_id = data.draw(st.sampled_from([AttemptId("never seen"), *self.attempts, *self.over[-3:]]))
        attempt = self.attempts.get(attempt_id)
        try:
            targets = self.pool.open_ingest(attempt_id, writer)
        except UnknownAttempt:
            assert attempt is None or not attempt.engine or not attempt.waiting
            return
        except InvalidRequest:
            assert attempt is not None and (not attempt.reserved or attempt.writer != writer)
            return
        if targets is None:
            assert attempt_id == "never seen"
            return
        assert attempt is not None and list(targets.slots) == attempt.slots[: attempt.num_prompt_blocks]
        assert targets.incarnation == INCARNATION
        attempt.writer, attempt.targets = writer, targets

    @precondition(lambda self: self._reserved())
    @rule(data=st.data(), writer=st.sampled_from(WRITERS), steps=st.integers(1, 4), shuffle=st.booleans())
    def write(self, data: st.DataObject, writer: Writer, steps: int, shuffle: bool) -> None:
        """As a writer should, some way or all the way."""
        attempt = data.draw(st.sampled_from(self._reserved()))
        if attempt.writer is None and attempt.engine and attempt.waiting:
            attempt.targets = self.pool.open_ingest(attempt.attempt_id, writer) or IngestTargets(INCARNATION)
            attempt.writer = writer
        if attempt.writer is None:
            return
        node = attempt.writer.node_id
        half = Unit(0, 1, 0, attempt.num_prompt_blocks), Unit(1, NUM_LAYERS, 0, attempt.num_prompt_blocks)
        work = [lambda: self.pool.cover(attempt.attempt_id, node, half[0]), lambda: self.pool.cover(attempt.attempt_id, node, half[1])]
        work += [lambda: self.pool.seal(attempt.attempt_id, node, 42), work[0]]
        for step in reversed(work) if shuffle else work[:steps]:
            self._note(attempt.attempt_id, step())

    @precondition(lambda self: self.attempts or self.over)
    @rule(data=st.data(), writer=st.sampled_from(WRITERS), bounds=st.tuples(*[st.integers(0, 6)] * 4), everything=st.booleans())
    def cover(self, data: st.DataObject, writer: Writer, bounds: tuple[int, int, int, int], everything: bool) -> None:
        """From any writer, of any attempt, of any unit: also late, repeated and senseless ones."""
        attempt_id = data.draw(st.sampled_from([*self.attempts, *self.over[-3:]]))
        attempt = self.attempts.get(attempt_id)
        unit = Unit(0, NUM_LAYERS, 0, attempt.num_prompt_blocks) if everything and attempt else Unit(*bounds)
        self._note(attempt_id, self.pool.cover(attempt_id, writer.node_id, unit))

    @precondition(lambda self: self.attempts or self.over)
    @rule(data=st.data(), writer=st.sampled_from(WRITERS))
    def seal(self, data: st.DataObject, writer: Writer) -> None:
        attempt_id = data.draw(st.sampled_from([*self.attempts, *self.over[-3:]]))
        self._note(attempt_id, self.pool.seal(attempt_id, writer.node_id, 42))

    @precondition(lambda self: self.attempts or self.over)
    @rule(data=st.data(), writer=st.sampled_from(WRITERS))
    def close_ingest(self, data: st.DataObject, writer: Writer) -> None:
        attempt_id = data.draw(st.sampled_from([*self.attempts, *self.over[-3:]]))
        self._note(attempt_id, self.pool.close_ingest(attempt_id, writer.node_id, writer.incarnation))

    @rule(writer=st.sampled_from(WRITERS))
    def lose_and_fence(self, writer: Writer) -> None:
        for attempt_id in self.pool.ingests_of(writer):
            self._note(attempt_id, self.pool.fail_ingest(attempt_id, InvalidRequest("lost")))
        self.pool.fence(writer)
        assert writer not in self.pool.writers()
        for attempt in list(self.attempts.values()):
            self._settle(attempt)

    def _note(self, attempt_id: AttemptId, outcome: Ingested | IngestFailed | None) -> None:
        attempt = self.attempts.get(attempt_id)
        if outcome is not None:
            assert attempt is not None and attempt.waiting and attempt.engine, "only who waits is told"
            attempt.waiting = False
            attempt.outcomes.append(outcome)
            assert len(attempt.outcomes) == 1, "told once"
            if isinstance(outcome, Ingested):
                attempt.complete = len(keys_in_prompt(attempt))
        if attempt is not None:
            self._settle(attempt)

    # ---- a peer reads ----

    @rule(prompt=PROMPTS)
    def lease(self, prompt: list[int]) -> None:
        keys = keys_of(*prompt)
        leased = self.pool.lease("reader", keys, self.now)
        held = list(itertools.takewhile(self.pool_holds, keys))
        assert len(leased.slots) == len(held), "the longest prefix that is held"
        if leased.lease_id:
            self.leases[leased.lease_id] = (self.now + LEASE_S, list(zip(leased.slots, leased.generations, strict=True)))

    def pool_holds(self, key: BlockKey) -> bool:
        return key in self.pool.held_keys()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(list(self.leases)))
        _, slots = self.leases[lease_id]
        lost = self.pool.renew_leases([lease_id, 1], self.now)
        assert lost == [1]
        self.leases[lease_id] = (self.now + LEASE_S, slots)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release_lease(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(list(self.leases)))
        for _ in range(2):  # repeated: no-op
            self.pool.release_lease(lease_id)
        del self.leases[lease_id]

    @rule(seconds=st.sampled_from([1.0, 10.0, 29.0, 31.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        expired = [lease_id for lease_id, (expires, _) in self.leases.items() if expires <= self.now]
        assert self.pool.expire_leases(self.now) == len(expired)
        for lease_id in expired:
            del self.leases[lease_id]

    # ---- what must always hold ----

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        self.pool.validate()

    @invariant()
    def what_somebody_may_touch_is_not_given_away(self) -> None:
        for _, slots in self.leases.values():
            assert all(self.generations[slot] == generation for slot, generation in slots)
        for attempt in self.attempts.values():
            assert all(self.generations[slot] == generation for slot, generation in attempt.unfenced)
            if attempt.writer in self.pool.writers() and attempt.attempt_id in self.pool.ingests_of(attempt.writer):
                targets = list(zip(attempt.targets.slots, attempt.targets.generations, strict=True))
                assert all(self.generations[slot] == generation for slot, generation in targets[attempt.targets.present_blocks :])

    @invariant()
    def events_tell_exactly_what_is_held(self) -> None:
        for event in self.pool.take_events():
            assert event.sequence == self.sequence + 1
            self.sequence = event.sequence
            if isinstance(event, BlocksStored):
                assert self.held.isdisjoint(event.keys)
                self.held.update(event.keys)
            else:
                assert self.held.issuperset(event.keys)
                self.held.difference_update(event.keys)
        assert self.held == set(self.pool.held_keys())

    def teardown(self) -> None:
        """When everybody has let go, everything can be had again."""
        if not hasattr(self, "pool"):
            return
        for attempt_id in list(self.attempts):
            self.pool.release(attempt_id)
            self.pool.engine_fenced([attempt_id])
            self.pool.end_fetch(attempt_id, 0)
            self.pool.end_hand_over(attempt_id)
        for writer in WRITERS:
            self.pool.fence(writer)
        self.pool.expire_leases(self.now + LEASE_S)
        self.pool.validate()
        assert self.pool.counts().available == NUM_SLOTS
        assert len(self.pool.acquire(AttemptId("the last"), [], NUM_SLOTS, 0).slots) == NUM_SLOTS
        assert self.pool.held_keys() == []

    def tenant_of_attempt(self, attempt: Attempt) -> str:
        return ""

    def _in_use(self, tenant: str) -> int:
        return next((each.slots - each.unreferenced for each in self.pool.tenants if each.name == tenant), 0)

    def _reserved(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts.values() if attempt.reserved]

    def _handed_out(self, slots: list[int]) -> None:
        """Every handle from before is stale by now."""
        for slot in slots:
            assert self.generations[slot] > self.last_generation[slot]
            self.last_generation[slot] = self.generations[slot]

    def _with_engine(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts.values() if attempt.engine]

    def _settle(self, attempt: Attempt) -> None:
        writing = attempt.writer is not None and attempt.attempt_id in self.pool.ingests_of(attempt.writer)
        if (
            not (attempt.engine or attempt.unfenced or attempt.fetching or attempt.handing_over or writing)
            and attempt.attempt_id in self.attempts
        ):
            del self.attempts[attempt.attempt_id]
            self.over.append(attempt.attempt_id)


def keys_in_prompt(attempt: Attempt) -> list[BlockKey]:
    return attempt.keys[: attempt.num_prompt_blocks]


TestPoolUnderRandomOrders = PoolMachine.TestCase
TestPoolUnderRandomOrders.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
