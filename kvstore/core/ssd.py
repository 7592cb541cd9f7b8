"""What the SSD holds, which blocks go there, and which of them make room for others.

The SSD is a second set of blocks beside the arena's, each of them prefix-closed by itself. So each evicts leaf by leaf as it likes, and a
directory that is opened after a crash holds of every block the ancestors. A block that is in both is *clean* in the arena, and *spare* when
all that continues it there is clean too: to drop it costs nothing. Blocks are copied to the SSD ahead of need, the next victims of the
arena first, so that those that go are spare by then; and a copy stays when its block comes back into the arena, so that each is written
once.

Nothing here is ever in use: a copy that goes while it is read is read to its end, for the tier (kvstore.ssd.tier) sees to that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvstore._native import Block
from kvstore.core.eviction_policy import EvictionPolicy
from kvstore.core.index import BlockIndex
from kvstore.core.journal import Journal
from kvstore.core.tenants import Tenant
from springtide.ids import BlockKey, Slot
from springtide.protocol.storage import BlocksRemoved, BlocksStored, Tier

_NO_SLOT = Slot(-1)


class BlockCopy(NamedTuple):
    """A block of the arena that is to be copied to the SSD."""

    key: BlockKey
    parent: BlockKey | None
    slot: Slot


class SsdBlocks:
    """The blocks on the SSD, beside the `arena`'s, whose index must have been made with `tells_dirty`. Whose a block is decides about slots
    only: on the SSD, all are one account's."""

    def __init__(self, arena: BlockIndex, capacity: int, policy: EvictionPolicy, journal: Journal) -> None:
        self._arena = arena
        self._index = BlockIndex(capacity, policy)
        self._account = Tenant("", None)
        self._journal = journal
        self.missed = 0
        """Blocks that left the arena before they were on the SSD."""
        self.losses = 0
        """How many times blocks were `lost`: by order, or with their bytes."""

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: BlockKey) -> bool:
        return self._index.get(key) is not None

    def keys(self) -> list[BlockKey]:
        """The keys of all blocks, parents before children."""
        return self._index.keys()

    def held_blocks(self) -> list[Block]:
        """All blocks, as `keys`, in a fraction of the time."""
        return self._index.blocks()

    def num_held(self, keys: Sequence[BlockKey]) -> int:
        """The length of the longest held prefix."""
        return len(self._index.match(keys))

    # ---- to the SSD ----

    def next_copies(self, at_most: int, tenant: Tenant | None = None, in_flight: Collection[BlockKey] = ()) -> list[BlockCopy]:
        """Copies to be made: of the blocks that the arena would drop next (for `tenant`, where one with a quota is given), those that are
        neither on the SSD nor `in_flight` to it, and their ancestors, parents first."""
        chosen: dict[BlockKey, BlockCopy] = {}
        leaves = self._arena.dirty_leaves(tenant)
        for leaf in leaves:
            for block in reversed(_dirty_line(leaf, chosen, in_flight)):
                chosen[block.key] = BlockCopy(block.key, None if block.parent is None else block.parent.key, block.slot)
                if len(chosen) == at_most:
                    leaves.close()
                    return list(chosen.values())
        return list(chosen.values())

    def added(self, blocks: Iterable[tuple[BlockKey, BlockKey | None]], losses: int | None = None) -> list[BlockKey]:
        """Takes in what the tier holds now, keys with their parents', parents first. `losses` is what it was when they were chosen from the
        arena. Returns those that the tier has to remove: their parents went, or they may have been evicted by order while they were
        written."""
        if losses not in (None, self.losses):
            return [key for key, _ in blocks if key not in self]
        stored: list[BlockKey] = []
        refused: list[BlockKey] = []
        for chain in _chains(blocks):
            self._add_chain(chain, stored, refused)
        self._journal.tell(BlocksStored, stored, Tier.SSD)
        return refused

    def _add_chain(self, chain: Sequence[tuple[BlockKey, BlockKey | None]], stored: list[BlockKey], refused: list[BlockKey]) -> None:
        held: list[Block] = []
        for key, parent_key in chain:
            parent = None if parent_key is None else self._index.get(parent_key)
            if parent_key is not None and parent is None:
                refused.append(key)
                continue
            if key in self:
                continue
            if parent is not None and parent.refs == 0:
                self._index.reference(parent)
                held.append(parent)
            held.append(self._index.insert(key, parent, _NO_SLOT, self._account))
            stored.append(key)
            self._mark(key, clean=True)
        for block in reversed(held):
            self._index.dereference(block)

    # ---- from the SSD ----

    def used(self, keys: Sequence[BlockKey]) -> None:
        """Counts this prefix as read: it goes later."""
        blocks = self._index.match(keys)
        for block in blocks:
            self._index.reference(block)
        for block in reversed(blocks):
            self._index.dereference(block)

    def make_room(self, count: int) -> list[BlockKey]:
        """Gives up `count` blocks, or all there are: children before their parents. The tier has to remove them."""
        victims = [block.key for block in self._index.evict(min(count, len(self._index)))]
        self._gone(victims)
        return victims

    def lost(self, keys: Collection[BlockKey] | None, spared: Collection[BlockKey] = ()) -> list[BlockKey]:
        """Gives up these, or all when None, which are of no use any more, and what continues them, but for those `spared` (and the
        ancestors of each). Returns what went, which the tier has to remove, children first; O(blocks), but for leaves."""
        self.losses += 1
        gone: list[BlockKey] = []
        for block in reversed(self._index.with_descendants(keys)):
            if block.key not in spared:
                self._index.discard(block)
                gone.append(block.key)
        self._gone(gone)
        return gone

    def _gone(self, keys: list[BlockKey]) -> None:
        for key in keys:
            self._mark(key, clean=False)
        self._journal.tell(BlocksRemoved, keys, Tier.SSD)

    # ---- the arena ----

    def entered_arena(self, block: Block) -> None:
        """Takes note of a new block there."""
        if block.key in self:
            self._arena.set_clean(block, True)

    def left_arena(self, blocks: Iterable[Block]) -> None:
        """Takes note of blocks that went there, children before their parents. Their copies were of no use until now, and are to stay as
        long as if they had been used."""
        for block in blocks:
            copy = self._index.get(block.key)
            if copy is None:
                self.missed += 1
            else:
                self._index.reference(copy)
                self._index.dereference(copy)

    def _mark(self, key: BlockKey, clean: bool) -> None:
        block = self._arena.get(key)
        if block is not None:
            self._arena.set_clean(block, clean)

    def validate(self) -> None:
        """Asserts the invariants; O(blocks)."""
        self._index.validate()
        assert self._index.num_unreferenced == len(self._index), "nobody holds what is on the SSD"
        for block in self._arena.blocks():
            assert block.clean == (block.key in self), "clean is what is on the SSD too"


def _dirty_line(leaf: Block, chosen: Collection[BlockKey], in_flight: Collection[BlockKey]) -> list[Block]:
    """The block and its ancestors, up to the first that is on the SSD, in flight to it or chosen. The ancestors of those are, too."""
    line: list[Block] = []
    block: Block | None = leaf
    while block is not None and not block.clean and block.key not in chosen and block.key not in in_flight:
        line.append(block)
        block = block.parent
    return line


def _chains(blocks: Iterable[tuple[BlockKey, BlockKey | None]]) -> Iterator[list[tuple[BlockKey, BlockKey | None]]]:
    """The runs of `blocks` in which each continues the one before."""
    chain: list[tuple[BlockKey, BlockKey | None]] = []
    for key, parent in blocks:
        if chain and chain[-1][0] != parent:
            yield chain
            chain = []
        chain.append((key, parent))
    if chain:
        yield chain
