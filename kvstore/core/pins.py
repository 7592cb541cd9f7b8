"""Pins: blocks that are kept for somebody, for a time. A hard pin is a reference, a soft one a place at the end of the eviction order."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from kvstore._native import Block
from kvstore.core.index import BlockIndex
from springtide.errors import InvalidRequest, SpringtideError
from springtide.ids import BlockKey

MAX_PIN_ID_LENGTH = 256
_COMPACT_ABOVE = 1024


class PinKind(Enum):
    """How strongly a pin keeps its blocks."""

    SOFT = "soft"
    """Evicted only when nothing else can go."""
    HARD = "hard"
    """Never evicted; at most `hard_limit` blocks of a store are, of which a tenant, where requests have one, leaves as many as it has."""


class UnknownPin(SpringtideError):
    """There is no pin of that id, or no longer."""


class NothingHeld(SpringtideError):
    """None of the blocks named is held here."""


class PinLimit(SpringtideError):
    """A hard pin is refused: so many would leave too little of the arena to serve from."""


@dataclass(slots=True, eq=False)
class Pin:
    """One pin, and what it keeps."""

    pin_id: str
    kind: PinKind
    blocks: dict[BlockKey, Block]
    """Parents before their children, and closed under parents."""
    expires_at: float

    @property
    def tenant(self) -> str:
        """Whose its blocks are; whose the first of them is, should it keep several tenants'."""
        return next(iter(self.blocks.values())).tenant.name if self.blocks else ""


SoftPins = dict[BlockKey, list[Pin]]
"""The soft pins that keep each block. Shared with the eviction order, which asks only whether there are any."""


class Pins:
    """The pins of a store. All operations do what they say or raise without a trace."""

    def __init__(self, index: BlockIndex, soft: SoftPins, hard_limit: int) -> None:
        self._index = index
        self._soft = soft
        self._hard: dict[BlockKey, int] = {}
        """How many hard pins keep a block."""
        self._hard_of: Counter[str] = Counter()
        """How many blocks of each tenant are under hard pins."""
        self._pins: dict[str, Pin] = {}
        self._expiry: list[tuple[float, str]] = []
        """A heap. Entries of pins that were renewed or removed stay until they surface."""
        self.hard_limit = hard_limit

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_hard(self) -> int:
        """The number of blocks under at least one hard pin."""
        return len(self._hard)

    @property
    def num_soft(self) -> int:
        """The number of blocks under at least one soft pin."""
        return len(self._soft)

    def kind_of(self, key: BlockKey) -> PinKind | None:
        """The strongest kind that keeps the block."""
        if key in self._hard:
            return PinKind.HARD
        return PinKind.SOFT if key in self._soft else None

    def pin(self, pin_id: str, keys: Sequence[BlockKey], kind: PinKind, ttl_s: float, now: float) -> Pin:
        """Keeps those of `keys` that are held, and all their ancestors, for `ttl_s`. A pin of the same id is replaced.

        Raises InvalidRequest, NothingHeld, and PinLimit when more than `hard_limit` blocks would be under hard pins, or a tenant would not
        leave as much of that as it has.
        """
        if not 0 < len(pin_id) <= MAX_PIN_ID_LENGTH:
            raise InvalidRequest(f"pin_id must have 1 to {MAX_PIN_ID_LENGTH} characters, not {len(pin_id)}", param="pin_id")
        expires_at = now + _checked_ttl(ttl_s)
        blocks = self._with_ancestors(keys)
        if not blocks:
            raise NothingHeld(f"pin {pin_id!r}: none of the {len(keys)} blocks is held here")
        old = self._pins.get(pin_id)
        if kind is PinKind.HARD:
            self._check_limit(pin_id, blocks, old)
        pin = Pin(pin_id, kind, blocks, expires_at)
        self._hold(pin)
        if old is not None:
            self._let_go(old)
        self._pins[pin_id] = pin
        self._expect_end(pin)
        return pin

    def renew(self, pin_id: str, ttl_s: float, now: float) -> Pin:
        """Lets the pin end in `ttl_s` from now. Raises UnknownPin, InvalidRequest."""
        pin = self._pins.get(pin_id)
        if pin is None or pin.expires_at <= now:
            raise UnknownPin(f"there is no pin {pin_id!r} here")
        pin.expires_at = now + _checked_ttl(ttl_s)
        self._expect_end(pin)
        return pin

    def unpin(self, pin_id: str) -> Pin:
        """Ends the pin. Raises UnknownPin."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            raise UnknownPin(f"there is no pin {pin_id!r} here")
        self._let_go(pin)
        return pin

    def expire(self, now: float) -> int:
        """Ends those whose time is over. Returns how many they were."""
        ended = 0
        while self._expiry and self._expiry[0][0] <= now:
            _, pin_id = heapq.heappop(self._expiry)
            pin = self._pins.get(pin_id)
            if pin is not None and pin.expires_at <= now:
                self.unpin(pin_id)
                ended += 1
        return ended

    def evicted(self, blocks: Iterable[Block]) -> None:
        """Takes from soft pins what went to make room. One that has lost everything ends."""
        if not self._soft:
            return
        for block in blocks:
            for pin in self._soft.pop(block.key, ()):
                del pin.blocks[block.key]
                if not pin.blocks:
                    del self._pins[pin.pin_id]

    def _expect_end(self, pin: Pin) -> None:
        heapq.heappush(self._expiry, (pin.expires_at, pin.pin_id))
        if len(self._expiry) > 2 * len(self._pins) + _COMPACT_ABOVE:
            self._expiry = [(other.expires_at, other.pin_id) for other in self._pins.values()]
            heapq.heapify(self._expiry)

    def _with_ancestors(self, keys: Sequence[BlockKey]) -> dict[BlockKey, Block]:
        found: dict[BlockKey, Block] = {}
        for key in keys:
            line: list[Block] = []
            block = self._index.get(key)
            while block is not None and block.key not in found:
                line.append(block)
                block = block.parent
            found.update((block.key, block) for block in reversed(line))
        return found

    def _check_limit(self, pin_id: str, blocks: dict[BlockKey, Block], old: Pin | None) -> None:
        before = old.blocks if old is not None and old.kind is PinKind.HARD else {}
        freed = Counter(block.tenant.name for key, block in before.items() if self._hard[key] == 1 and key not in blocks)
        added = Counter(block.tenant.name for key, block in blocks.items() if key not in self._hard)
        wanted = len(self._hard) - freed.total() + added.total()
        left = self.hard_limit - wanted
        if left < 0:
            raise PinLimit(
                f"hard pin {pin_id!r} of {len(blocks)} blocks: {wanted} blocks would be under hard pins, "
                f"of which this store takes {self.hard_limit} (kv.hard_pin_share)"
            )
        for tenant in added.keys() - {""}:
            own = self._hard_of[tenant] - freed[tenant] + added[tenant]
            if own > left:
                raise PinLimit(
                    f"hard pin {pin_id!r} of {len(blocks)} blocks: {own} blocks of {tenant!r} would be under hard pins, and {left} left "
                    f"of the {self.hard_limit} that this store takes (kv.hard_pin_share): a tenant leaves as many as it has"
                )

    def _hold(self, pin: Pin) -> None:
        for key, block in pin.blocks.items():
            if pin.kind is PinKind.HARD:
                self._index.reference(block)
                self._hard_of[block.tenant.name] += key not in self._hard
                self._hard[key] = self._hard.get(key, 0) + 1
            elif key in self._soft:
                self._soft[key].append(pin)
            else:
                with self._index.reordering(block):
                    self._soft[key] = [pin]

    def _let_go(self, pin: Pin) -> None:
        for key in reversed(pin.blocks):
            block = pin.blocks[key]
            if pin.kind is PinKind.HARD:
                self._hard[key] -= 1
                if not self._hard[key]:
                    del self._hard[key]
                    self._hard_of[block.tenant.name] -= 1
                self._index.dereference(block)
            elif len(self._soft[key]) > 1:
                self._soft[key].remove(pin)
            else:
                with self._index.reordering(block):
                    del self._soft[key]

    def validate(self) -> None:
        """Asserts what must hold between the pins, their counts and the index."""
        for pin_id, pin in self._pins.items():
            assert pin.pin_id == pin_id and pin.blocks, "a pin keeps something"
            for key, block in pin.blocks.items():
                assert self._index.get(key) is block, "what is pinned is held"
                assert block.parent is None or block.parent.key in pin.blocks, "the parent of what is pinned is pinned"
                assert (key in self._hard) if pin.kind is PinKind.HARD else (pin in self._soft[key]), "pins are counted"
        kept = {kind: [key for pin in self._pins.values() if pin.kind is kind for key in pin.blocks] for kind in PinKind}
        assert sum(self._hard.values()) == len(kept[PinKind.HARD]) and set(self._hard) == set(kept[PinKind.HARD])
        assert sum(map(len, self._soft.values())) == len(kept[PinKind.SOFT]) and set(self._soft) == set(kept[PinKind.SOFT])
        assert len(self._hard) <= self.hard_limit, "hard pins keep their limit"
        of_tenants = Counter(held.tenant.name for key in self._hard if (held := self._index.get(key)) is not None)
        assert +self._hard_of == of_tenants, "hard pins are counted for their tenants"


def _checked_ttl(ttl_s: float) -> float:
    if not 0 < ttl_s < math.inf:
        raise InvalidRequest(f"ttl_s must be finite and more than 0, not {ttl_s}", param="ttl_s")
    return ttl_s
