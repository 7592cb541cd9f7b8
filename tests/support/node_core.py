"""What the tests of the node cores share: requests, a store that answers in any order, and what no core may ever do to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from node_runtime import events
from springtide.blocks import block_keys, namespace_root
from springtide.ids import AttemptId, RequestId
from springtide.modelinfo import ModelInfo
from springtide.protocol import storage
from springtide.protocol.outputs import Failure, FailureCode
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.starts import Request

BLOCK_TOKENS = 8
EOS = 0
INFO = ModelInfo("", "tiny", "llama", "f" * 8, context_length=4096, layers=4, kv_heads=1, head_dim=4, vocab_size=1000, eos_token_ids=(EOS,))
NAMESPACE = namespace_root("tiny", "float32", BLOCK_TOKENS)


def make_request(
    attempt_id: str, num_tokens: int, *, num_prompt_tokens: int | None = None, max_tokens: int = 8, text: int | None = None
) -> Request:
    """`text`: prompts of one begin alike, those of different ones do not; None: it has one of its own."""
    seed = int.from_bytes(attempt_id.encode()) if text is None else text
    token_ids = [1 + (seed * 31 + i) % 900 for i in range(num_tokens)]
    return Request(
        attempt_id=AttemptId(attempt_id),
        request_id=RequestId(f"req-{attempt_id}"),
        tenant="",
        token_ids=tuple(token_ids),
        num_prompt_tokens=num_tokens if num_prompt_tokens is None else num_prompt_tokens,
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        namespace=NAMESPACE,
        keys=tuple(block_keys(NAMESPACE, token_ids, BLOCK_TOKENS)),
        block_tokens=BLOCK_TOKENS,
    )


def traced(begin: events.Start) -> events.Start:  # type: ignore[type-arg]
    return replace(begin, start=replace(begin.start, request=replace(begin.start.request, traced=True)))


def failure(code: FailureCode, message: str = "by the test") -> Failure:
    return Failure(code, message)


class StoreLedger:
    """The store's view of an engine: what it has asked for, and which slots it may use. Asserts that orders keep to the contract."""

    def __init__(self, num_slots: int) -> None:
        self.free = list(range(num_slots))
        self.unanswered: dict[str, storage.Acquire | storage.Reserve] = {}
        self.growing: list[storage.Grow] = []
        self.held: dict[str, list[int]] = {}
        self.handing_over: set[str] = set()
        self.sealed: set[str] = set()
        self.committed: Counter[str] = Counter()
        self.released: set[str] = set()

    def order(self, order: storage.Order) -> None:
        attempt_id = order.attempt_id
        assert attempt_id not in self.released or (isinstance(order, storage.Release) and attempt_id in self.handing_over), (
            f"{order} after its release"
        )
        match order:
            case storage.Acquire() | storage.Reserve():
                assert attempt_id not in self.held and attempt_id not in self.unanswered
                self.unanswered[attempt_id] = order
            case storage.Grow():
                assert attempt_id in self.held
                self.growing.append(order)
            case storage.Commit(_, first_block, keys):
                assert first_block <= self.committed[attempt_id]
                assert first_block + len(keys) <= len(self.held[attempt_id])
                self.committed[attempt_id] = first_block + len(keys)
            case storage.OpenHandOver():
                assert attempt_id in self.held
            case storage.Push(_, layer_begin, layer_end, block_begin, block_end):
                assert 0 <= layer_begin < layer_end <= INFO.layers
                assert 0 <= block_begin < block_end <= len(self.held[attempt_id])
            case storage.Seal():
                assert attempt_id in self.held
                self.sealed.add(attempt_id)
            case storage.Release(_, finish_hand_over):
                self._release(attempt_id, finish_hand_over)

    def _release(self, attempt_id: str, finish_hand_over: bool) -> None:
        if attempt_id in self.released:
            self.handing_over.remove(attempt_id)
            return
        assert attempt_id in self.held or attempt_id in self.unanswered, f"{attempt_id} is released, but nothing was asked for it"
        self.released.add(attempt_id)
        self.unanswered.pop(attempt_id, None)
        self.growing = [grow for grow in self.growing if grow.attempt_id != attempt_id]
        self.free += self.held.pop(attempt_id, [])
        if finish_hand_over:
            assert attempt_id in self.sealed
            self.handing_over.add(attempt_id)

    def give(self, attempt_id: str) -> tuple[int, ...] | None:
        """Answers the Acquire or Reserve: its slots, or None when the pool is full."""
        asked = self.unanswered.pop(attempt_id)
        if asked.num_blocks > len(self.free):
            return None
        self.held[attempt_id] = [self.free.pop() for _ in range(asked.num_blocks)]
        if isinstance(asked, storage.Reserve):
            self.committed[attempt_id] = len(asked.keys)
        return tuple(self.held[attempt_id])

    def lost(self) -> None:
        """Another incarnation, which knows nobody."""
        total = len(self.free) + sum(map(len, self.held.values()))
        self.__init__(total)  # type: ignore[misc]

    def may_use(self, attempt_id: str, slots: Sequence[int]) -> bool:
        return list(slots) == self.held.get(attempt_id, [])[: len(slots)]
