"""The Conductor's prefix index with many stores. Events come as protobuf, as a store sends them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.drivers.holdings import RouterIndexJob
from benchmarks.drivers.protocol import run
from conductor.core.index.matches import Matches
from conductor.core.index.prefix_index import PrefixIndex
from conductor.core.types.events import StoreStored
from conductor.server.watch import store_event
from springtide.ids import BlockKey, NodeId
from springtide.protocol.storage import Tier
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
        stored = store_pb2.BlocksStored(keys=keys, tier=store_pb2.TIER_DRAM)
        return store_pb2.StoreEvent(node_id=str(worker), incarnation=1, sequence=self._sequence[worker], stored=stored).SerializeToString()

    def take_in(self, event: bytes) -> None:
        stored = store_event(store_pb2.StoreEvent.FromString(event))
        assert isinstance(stored, StoreStored)
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
