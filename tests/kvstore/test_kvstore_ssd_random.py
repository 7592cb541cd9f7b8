"""The SSD tier in random orders of everything, with crashes at every byte and bits flipped, against a dictionary."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from ssd_support import ODD_BLOCK_BYTES, DyingDisk, block, key, open_tier, read

from kvstore.ssd.tier import PutBlock
from springtide.clock import ManualClock

T = TypeVar("T")
SLOTS = 12
CAPACITY_BYTES = 8192 + SLOTS * 4096
PARENTS: list[int | None] = [None, 0, 1, 2, 1, 4, 0, None, 7, 8, 8, None, None, 12, 13, 14]
"""Of block i: a small forest, larger than the tier."""
NUMBERS = st.integers(0, len(PARENTS) - 1)


def descendants(number: int) -> list[int]:
    """Children before their parents, `number` last."""
    return [below for child, parent in enumerate(PARENTS) if parent == number for below in descendants(child)] + [number]


def ancestors(number: int) -> list[int]:
    """From the root down to `number`."""
    parent = PARENTS[number]
    return [*([] if parent is None else ancestors(parent)), number]


class TierMachine(RuleBasedStateMachine):
    """`held` is what the tier must hold, `maybe` what a crash or a flipped bit leaves open. Nothing may ever be read wrong."""

    @initialize()
    def make(self) -> None:
        self.runner = asyncio.Runner()
        self.scratch = tempfile.TemporaryDirectory()
        self.directory = Path(self.scratch.name)
        self.held: set[int] = set()
        self.maybe: set[int] = set()
        self.open()

    def open(self) -> None:
        self.damaged = False
        self.disk = DyingDisk()
        self.clock = ManualClock()
        self.tier = self.run(open_tier(self.directory, CAPACITY_BYTES, ODD_BLOCK_BYTES, disk=self.disk, clock=self.clock))

    def run(self, operation: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(operation)

    @rule(number=NUMBERS)
    def put(self, number: int) -> None:
        """A chain from its root."""
        blocks = [make_block(i) for i in ancestors(number)]
        free = self.tier.counts().free
        missing = [i for i in ancestors(number) if key(i) not in self.tier]
        stored = self.run(self.tier.put(blocks))
        if self.disk.left is None:
            assert stored == [key(i) not in map(key, missing[free:]) for i in ancestors(number)]
        for i, held in zip(ancestors(number), stored, strict=True):
            if held and not self.damaged:
                self.held.add(i)
            else:
                self.maybe.add(i)

    @rule(number=NUMBERS)
    def remove(self, number: int) -> None:
        self.run(self.tier.remove([key(i) for i in descendants(number)]))
        gone = set(descendants(number))
        self.held -= gone
        if self.disk.left is None:
            self.maybe -= gone
        else:
            self.maybe |= gone

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        (outcome,) = self.run(read(self.tier, [number], ODD_BLOCK_BYTES))
        assert outcome != "wrong"
        if outcome == "right":
            assert number in self.held | self.maybe
        elif number in self.held:
            raise AssertionError(f"block {number} is lost: {outcome}")
        else:
            self.run(self.tier.remove([key(i) for i in descendants(number)]))
            self.weaken(descendants(number))

    @rule()
    def restart(self) -> None:
        self.run(self.tier.close())
        self.open()
        for number in list(self.held):
            if key(number) not in self.tier:
                raise AssertionError(f"block {number} is lost at the restart")

    @rule(number=NUMBERS, num_bytes=st.integers(0, 3 * 4096 + 300), remove=st.booleans())
    def crash(self, number: int, num_bytes: int, remove: bool) -> None:
        """In the midst of an operation, `num_bytes` into its writes. What was acknowledged before is there afterwards."""
        self.disk.left = num_bytes
        if remove:
            self.remove(number)
        else:
            self.put(number)
        self.restart()

    @rule(position=st.floats(0, 1), bit=st.integers(0, 7))
    def flip(self, position: float, bit: int) -> None:
        """Anything may be lost then, but nothing is read wrong. A header's bit takes its segment with it at the next restart, with what is
        put until then."""
        for path in self.directory.glob("*.kvsegment"):
            with path.open("r+b") as file:
                offset = int(position * (path.stat().st_size - 1))
                file.seek(offset)
                (byte,) = file.read(1)
                file.seek(offset)
                file.write(bytes([byte ^ 1 << bit]))
        self.weaken(list(self.held))
        self.damaged = True

    @rule(seed=st.integers(0, 1 << 16))
    def truncate(self, seed: int) -> None:
        """While it is closed."""
        self.run(self.tier.close())
        for path in self.directory.glob("*.kvsegment"):
            with path.open("r+b") as file:
                file.truncate(random.Random(seed).randrange(path.stat().st_size))
        self.weaken(list(self.held))
        self.open()
        assert len(self.tier) == 0

    def weaken(self, numbers: list[int]) -> None:
        self.maybe |= set(numbers)
        self.held -= set(numbers)

    @invariant()
    def holds_what_it_must_and_no_more(self) -> None:
        if not hasattr(self, "tier"):
            return
        keys = {int.from_bytes(own, "big") for own, _ in self.tier.blocks()}
        assert self.held <= keys <= self.held | self.maybe
        assert all(PARENTS[number] is None or PARENTS[number] in keys for number in keys)
        counts = self.tier.counts()
        assert counts.held + counts.free <= counts.capacity

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.run(self.tier.close())
            self.runner.close()
            self.scratch.cleanup()


def make_block(number: int) -> PutBlock:
    return block(number, PARENTS[number], ODD_BLOCK_BYTES)


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
