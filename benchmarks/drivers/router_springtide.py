"""The Conductor's prefix index with many stores. Events come as protobuf, as a store sends them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.drivers.holdings import RouterIndexJob
from benchmarks.drivers.protocol import run
from conductor.core.prefix_index import Matches, PrefixIndex
from springtide.ids import BlockKey, Incarnation, NodeId
from springtide.protocol import wire
from springtide.protocol.storage import BlocksStored, Tier
from springtide.rpc import store_pb2


class SpringtideRouterIndex(RouterIndexJob):
    def __init__(self, arguments: Sequence[str]) -> None:
        self._index = PrefixIndex()
        self._sequence: Counter[int] = Counter()
        for worker in range(int(arguments[-2])):
            self._index.snapshot(NodeId(str(worker)), 1, 0, [], Tier.DRAM, complete=True)
        super().__init__(arguments)

    def event(self, worker: int, keys: Sequence[bytes]) -> bytes:
        self._sequence[worker] += 1
        held = tuple(map(BlockKey, keys))
        stored = BlocksStored(NodeId(str(worker)), Incarnation(1), self._sequence[worker], held, Tier.DRAM)
        return wire.STORE_EVENT.encode(stored).SerializeToString()

    def take_in(self, event: bytes) -> None:
        stored = wire.STORE_EVENT.decode(store_pb2.StoreEvent.FromString(event))
        assert isinstance(stored, BlocksStored)
        self._index.stored(stored.node_id, stored.incarnation, stored.sequence, stored.keys, stored.tier)

    def sequence(self, keys: Sequence[bytes]) -> list[BlockKey]:
        return [BlockKey(key) for key in keys]

    def find(self, sequence: list[BlockKey]) -> Matches:
        return self._index.match(sequence)

    def read(self, answer: Matches) -> object:
        return answer.blocks_by_bit()

    def found(self, answer: Matches) -> dict[int, int]:
        return {int(node_id): blocks for node_id, blocks in answer.items()}


if __name__ == "__main__":
    run(SpringtideRouterIndex)
