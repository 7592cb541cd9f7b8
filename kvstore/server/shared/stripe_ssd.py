"""The SSD of one memory: what this has of each block, on the disk of its node.

A store with whole slots has one. Of a bundle each store has one, and all have the same blocks: each block in as many pieces as there are
stores. Which blocks these are the first store's index says (kvstore.core.ssd); shared/ssd.py orders all of them about alike.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

import grpc.aio
import numpy as np

from kvstore.server.shared.failures import error_of
from kvstore.ssd.disk import aligned_memory
from kvstore.ssd.health import TierState
from kvstore.ssd.tier import PutBlock, SsdTier, TierCounts
from springtide.errors import SpringtideError
from springtide.ids import BlockKey, Slot
from springtide.protocol import wire
from springtide.protocol.layer_stores import CopiesGot, CopiesPut, GetCopies, KeptBlocks, PutCopies, RemoveCopies, SsdState
from springtide.rpc import layer_store_pb2 as pb
from springtide.rpc.layer_store_pb2_grpc import LayerStoreStub

KEYS_A_MESSAGE = 1 << 16
_BLOCKS_OF_A_LONG_READ = 1024
_SEVERITY = [*TierState]


class Copy(NamedTuple):
    """A block to be written of slots that were copied."""

    place: int
    """Which of them."""
    key: BlockKey
    parent: BlockKey | None


class StripeSsd(Protocol):
    """The SSD of one memory. It is this side's for as long as this process lives: nothing that it is asked for is given up half way."""

    async def kept(self) -> list[BlockKey]:
        """What is there, parents before their children."""
        ...

    def copy_out(self, slots: Sequence[Slot]) -> Awaitable[int]:
        """Copies slots to where one `put`, which must come, writes them from. Those of this process are copied at the call, others by when
        the answer is there. Returns what `put` knows the copies by."""
        ...

    async def put(self, copy_id: int, copies: Sequence[Copy]) -> tuple[Sequence[bool], Sequence[BlockKey]]:
        """Writes these of what was copied, parents first. Returns of each whether it is held now, and the parents that are not."""
        ...

    async def get(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> Sequence[SpringtideError | None]:
        """Reads blocks into slots, which are at rest when this ends. Returns what went wrong, if anything; the block is not held then."""
        ...

    async def check(self, keys: Sequence[BlockKey]) -> Sequence[SpringtideError | None]:
        """The same, into no slots."""
        ...

    async def remove(self, keys: Sequence[BlockKey]) -> None:
        """Children with or before their parents."""
        ...

    def counts(self) -> TierCounts: ...

    def estimated_read_s(self, num_blocks: int) -> float: ...

    def hanging_s(self) -> float: ...

    async def close(self) -> None: ...


class OwnSsd(StripeSsd):
    """That of the memory of this process. `memory` is all of it, uint8 [slots * bytes_per_slot]."""

    def __init__(self, tier: SsdTier, memory: np.ndarray, bytes_per_slot: int) -> None:
        self.tier = tier
        self._memory = memory.data
        self.bytes_per_slot = bytes_per_slot
        self._copied: dict[int, memoryview] = {}
        self._copy_ids = itertools.count()
        self._spare: list[memoryview] = []
        """Memory that was copied to before."""

    async def kept(self) -> list[BlockKey]:
        return [key for key, _ in self.tier.blocks()]

    def copy_out(self, slots: Sequence[Slot]) -> Awaitable[int]:
        size, copy_id = self.bytes_per_slot, next(self._copy_ids)
        memory = self._copied[copy_id] = self._scratch(len(slots))
        for i, slot in enumerate(slots):
            memory[i * size : (i + 1) * size] = self._slot(slot)
        copied: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        copied.set_result(copy_id)
        return copied

    async def put(self, copy_id: int, copies: Sequence[Copy]) -> tuple[Sequence[bool], Sequence[BlockKey]]:
        memory, size = self._copied.pop(copy_id), self.bytes_per_slot
        parts = [PutBlock(copy.key, copy.parent, memory[copy.place * size : (copy.place + 1) * size]) for copy in copies]
        held = await self.tier.put(parts)
        self._spare.append(memory)
        return held, [copy.parent for copy in copies if copy.parent is not None and copy.parent not in self.tier]

    async def get(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> Sequence[SpringtideError | None]:
        return await self.tier.get(keys, [self._slot(slot) for slot in slots])

    async def check(self, keys: Sequence[BlockKey]) -> Sequence[SpringtideError | None]:
        memory, size = self._scratch(len(keys)), self.bytes_per_slot
        errors = await self.tier.get(keys, [memory[i * size : (i + 1) * size] for i in range(len(keys))])
        self._spare.append(memory)
        return errors

    async def remove(self, keys: Sequence[BlockKey]) -> None:
        await self.tier.remove(keys)

    def counts(self) -> TierCounts:
        return self.tier.counts()

    def estimated_read_s(self, num_blocks: int) -> float:
        return self.tier.estimated_read_s(num_blocks)

    def hanging_s(self) -> float:
        return self.tier.hanging_s()

    async def close(self) -> None:
        await self.tier.close()
        self._memory.release()

    def _slot(self, slot: Slot) -> memoryview:
        return self._memory[slot * self.bytes_per_slot : (slot + 1) * self.bytes_per_slot]

    def _scratch(self, num_blocks: int) -> memoryview:
        num_bytes = num_blocks * self.bytes_per_slot
        for i, memory in enumerate(self._spare):
            if len(memory) >= num_bytes:
                return self._spare.pop(i)
        self._spare.clear()  # too small all of them
        return aligned_memory(num_bytes)


def state_of(ssd: StripeSsd) -> SsdState:
    counts = ssd.counts()
    first_read_s, long_read_s = ssd.estimated_read_s(1), ssd.estimated_read_s(_BLOCKS_OF_A_LONG_READ)
    return SsdState(
        state=counts.state.value,
        held=counts.held,
        free=counts.free,
        capacity=counts.capacity,
        retired=counts.retired,
        dropped=counts.dropped,
        first_read_s=first_read_s,
        next_read_s=(long_read_s - first_read_s) / (_BLOCKS_OF_A_LONG_READ - 1),
        hanging_s=ssd.hanging_s(),
    )


class LayerStoreSsd(StripeSsd):
    """That of a layer store. `ask` calls a method of its stub, and raises PeerLost when the layer store is lost."""

    def __init__(self, stub: LayerStoreStub, ask: Callable[[Any, Any], Awaitable[Any]], state: SsdState) -> None:
        self._stub = stub
        self._ask = ask
        self.state = state
        """As it said last."""

    async def kept(self) -> list[BlockKey]:
        keys: list[BlockKey] = []
        parts: AsyncIterable[pb.KeptBlocks] = self._stub.ListKept(pb.ListKeptRequest())
        try:
            async for part in parts:
                kept: KeptBlocks = wire.KEPT_BLOCKS.decode(part)
                keys += kept.keys
        except grpc.aio.AioRpcError as error:
            raise error_of(error, "asking a layer store what it has on its SSD") from error
        return keys

    def copy_out(self, slots: Sequence[Slot]) -> Awaitable[int]:
        return asyncio.create_task(self._copy_out(slots), name="copy out of a layer store")

    async def _copy_out(self, slots: Sequence[Slot]) -> int:
        reply: pb.CopyOutReply = await self._ask(self._stub.CopyOut, pb.CopyOutRequest(slots=slots))
        return reply.copy_id

    async def put(self, copy_id: int, copies: Sequence[Copy]) -> tuple[Sequence[bool], Sequence[BlockKey]]:
        places, keys, parents = zip(*copies, strict=True) if copies else ((), (), ())
        request = wire.PUT_COPIES.encode(PutCopies(copy_id, places, keys, parents))
        put: CopiesPut = wire.COPIES_PUT.decode(await self._ask(self._stub.Put, request))
        self.state = put.ssd
        return put.held, put.lacking

    async def get(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> Sequence[SpringtideError | None]:
        got: CopiesGot = wire.COPIES_GOT.decode(await self._ask(self._stub.Get, wire.GET_COPIES.encode(GetCopies(tuple(keys), slots))))
        self.state = got.ssd
        return [SpringtideError(got.failed[i]) if i in got.failed else None for i in range(len(keys))]

    async def check(self, keys: Sequence[BlockKey]) -> Sequence[SpringtideError | None]:
        return await self.get(keys, ())

    async def remove(self, keys: Sequence[BlockKey]) -> None:
        for begin in range(0, len(keys), KEYS_A_MESSAGE):
            request = wire.REMOVE_COPIES.encode(RemoveCopies(tuple(keys[begin : begin + KEYS_A_MESSAGE])))
            self.state = wire.SSD_STATE.decode(await self._ask(self._stub.Remove, request))

    def counts(self) -> TierCounts:
        state = self.state
        return TierCounts(TierState(state.state), state.held, state.free, state.capacity, state.retired, state.dropped)

    def estimated_read_s(self, num_blocks: int) -> float:
        return self.state.first_read_s + (num_blocks - 1) * self.state.next_read_s

    def hanging_s(self) -> float:
        return self.state.hanging_s

    async def close(self) -> None:
        """It is the layer store's, and closes with it."""


def counts_of_all(counts: Sequence[TierCounts]) -> TierCounts:
    """Of SSDs that have the same blocks, in pieces: a block needs all of them."""
    reasons = sorted({reason for each in counts for reason in each.dropped})
    return TierCounts(
        state=max((each.state for each in counts), key=_SEVERITY.index),
        held=min(each.held for each in counts),
        free=min(each.free for each in counts),
        capacity=min(each.capacity for each in counts),
        retired=max(each.retired for each in counts),
        dropped={reason: sum(each.dropped.get(reason, 0) for each in counts) for reason in reasons},
    )


async def agree(ssds: Sequence[StripeSsd]) -> None:
    """Has them drop what not all of them have kept from before. What all have is prefix-closed, for what each has is."""
    kept = [await ssd.kept() for ssd in ssds]
    whole = set(kept[0]).intersection(*kept[1:])
    for ssd, keys in zip(ssds, kept, strict=True):
        await ssd.remove([key for key in reversed(keys) if key not in whole])
