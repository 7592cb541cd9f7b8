"""The pool under random orders of everything, with pins, tenants that have quotas, replicas and evictions by order on top."""

from __future__ import annotations

import itertools
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from kvstore_support import keys_of
from test_kvstore_pool_random import HARD_PINS, PROMPTS, Attempt, PoolMachine

from kvstore.core.pins import NothingHeld, PinKind, PinLimit, UnknownPin
from kvstore.core.tenants import QuotaExceeded
from springtide.errors import InvalidRequest, PoolFull
from springtide.ids import AttemptId, BlockKey

OTHERS_FIRST_LABEL = 1
"""Prompts that begin so are those of the tenant with a quota: as with salted keys, no block is shared across tenants."""
PIN_IDS = st.sampled_from(["one", "two", "three"])


class PinnedPoolMachine(PoolMachine):
    QUOTAS: ClassVar[dict[str, int]] = {"limited": 4}

    def tenant_of(self, prompt: list[int]) -> str:
        return "limited" if prompt[:1] == [OTHERS_FIRST_LABEL] else ""

    def tenant_of_attempt(self, attempt: Attempt) -> str:
        return "limited" if attempt.keys[:1] == keys_of(OTHERS_FIRST_LABEL) else ""

    @initialize()
    def make(self) -> None:
        super().make()
        self.pins: dict[str, tuple[PinKind, set[BlockKey], float]] = {}
        self.replicas: list[tuple[AttemptId, range]] = []

    # ---- pins ----

    @rule(pin_id=PIN_IDS, prompt=PROMPTS, kind=st.sampled_from(PinKind), ttl_s=st.sampled_from([5.0, 40.0]))
    def pin(self, pin_id: str, prompt: list[int], kind: PinKind, ttl_s: float) -> None:
        keys = keys_of(*prompt)
        held = set(itertools.takewhile(self.pool_holds, keys))
        before = self.pool.counts()
        try:
            pin = self.pool.pins.pin(pin_id, keys[::-1], kind, ttl_s, self.now)
        except NothingHeld:
            assert not held
        except PinLimit:
            others = [k for name, (other, k, _) in self.pins.items() if other is PinKind.HARD and name != pin_id]
            assert len(held.union(*others)) > HARD_PINS
            assert self.pool.counts() == before
        else:
            assert set(pin.blocks) == held
            self.pins[pin_id] = (kind, held, self.now + ttl_s)

    @rule(pin_id=PIN_IDS, ttl_s=st.sampled_from([5.0, 40.0]))
    def renew_pin(self, pin_id: str, ttl_s: float) -> None:
        try:
            self.pool.pins.renew(pin_id, ttl_s, self.now)
        except UnknownPin:
            assert pin_id not in self._living() or self.pins[pin_id][2] <= self.now
        else:
            kind, keys, _ = self.pins[pin_id]
            self.pins[pin_id] = (kind, keys, self.now + ttl_s)

    @rule(pin_id=PIN_IDS)
    def unpin(self, pin_id: str) -> None:
        try:
            self.pool.pins.unpin(pin_id)
        except UnknownPin:
            assert pin_id not in self._living()
        self.pins.pop(pin_id, None)

    @rule()
    def end_pins(self) -> None:
        self.pool.pins.expire(self.now)
        self.pins = {name: pin for name, pin in self.pins.items() if pin[2] > self.now}
        assert {pin.pin_id for pin in self.pool.pins} == set(self._living())

    def _living(self) -> dict[str, tuple[PinKind, set[BlockKey], float]]:
        """A soft pin that has lost every block has ended."""
        there = {pin.pin_id for pin in self.pool.pins}
        for name, (kind, _, _) in self.pins.items():
            assert name in there or kind is PinKind.SOFT
        return {name: pin for name, pin in self.pins.items() if name in there}

    @invariant()
    def hard_pins_keep_their_blocks(self) -> None:
        for kind, keys, _ in getattr(self, "pins", {}).values():
            assert kind is PinKind.SOFT or keys <= set(self.pool.held_keys())

    @precondition(lambda self: any(kind is PinKind.SOFT for kind, _, _ in self.pins.values()))
    @rule(count=st.integers(1, 4))
    def soft_pins_go_last(self, count: int) -> None:
        """As many slots as can be had without them cost them nothing."""
        soft = {key for pin in self.pool.pins if pin.kind is PinKind.SOFT for key in pin.blocks}
        counts = self.pool.counts()
        referenced_or_not = self.pool.pins.num_soft
        if count > counts.available - referenced_or_not:
            return
        attempt_id = AttemptId(f"attempt-{next(self.names)}")
        slots = list(self.pool.acquire(attempt_id, [], count, 0).slots)
        self._handed_out(slots)
        self.attempts[attempt_id] = Attempt(attempt_id, [], slots, 0, False)
        assert soft <= set(self.pool.held_keys())

    # ---- replicas and evictions ----

    @rule(prompt=PROMPTS, valid=st.integers(0, 4))
    def replicate(self, prompt: list[int], valid: int) -> None:
        keys, attempt_id = keys_of(*prompt), AttemptId(f"replica-{next(self.names)}")
        before = self.pool.counts()
        try:
            acquired = self.pool.admit_replica(attempt_id, keys, self.tenant_of(prompt))
        except (PoolFull, QuotaExceeded, InvalidRequest):
            assert self.pool.counts() == before
            return
        local = acquired.local_blocks
        self._handed_out(list(acquired.slots[local:]))
        if local < len(keys):
            self.pool.begin_fetch(attempt_id, range(local, len(keys)))
            self.replicas.append((attempt_id, range(local, min(local + valid, len(keys)))))
        else:
            self.pool.end_replica(attempt_id)

    @precondition(lambda self: self.replicas)
    @rule()
    def end_replica(self) -> None:
        attempt_id, blocks = self.replicas.pop(0)
        self.pool.end_fetch(attempt_id, blocks.stop)
        self.pool.end_replica(attempt_id)

    @rule(prompt=PROMPTS)
    def evict(self, prompt: list[int]) -> None:
        before = set(self.pool.held_keys())
        evicted = self.pool.evict(keys_of(*prompt)[-1:])
        after = set(self.pool.held_keys())
        assert len(before - after) == evicted.blocks
        assert all(self.pool.pins.kind_of(key) is None for key in before - after)

    def teardown(self) -> None:
        if hasattr(self, "pins"):
            while self.replicas:
                self.end_replica()
            for pin in list(self.pool.pins):
                self.pool.pins.unpin(pin.pin_id)
        super().teardown()


TestPinnedPoolUnderRandomOrders = PinnedPoolMachine.TestCase
TestPinnedPoolUnderRandomOrders.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
del PoolMachine
