"""Springtide's engine with what a node does around it, which is the layer of vLLM's `LLMEngine.step`: the cores of a prefill node and of a
decode node decide, the pools of their stores give out slots and keep prefixes, the model computes passes and steps, the sampler follows,
and tokens come as the updates that a gateway would get. All in this process, one after another: calls between processes and transfers from
store to store are in the figures of the cluster.

The slots of a sequence lie anywhere in the arena, as they come from a store that has been in use.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.drivers.engine_work import KV_BYTES, EngineJob, Settings, TokenIds
from benchmarks.drivers.protocol import run
from decode_node.core import DecodeCore
from decode_node.core import actions as decode_actions
from decode_node.core.settings import DecodeSettings
from decode_node.server.steps import StepRunner
from engine.formats.files import describe
from engine.loader import load_model
from engine.profiling import measure_decode, measure_prefill
from engine.runner import ModelRunner
from engine.sampling.sampler import sample
from kvstore.core.eviction import new_policy
from kvstore.core.pool import Pool
from node_runtime.events import SendUpdate, Start, StoreConnected
from prefill_node.core import PrefillCore
from prefill_node.core import actions as prefill_actions
from prefill_node.core import events as prefill_events
from prefill_node.core.layer_stream import LayerGroups
from prefill_node.core.settings import PrefillSettings
from springtide.blocks import block_keys, blocks_for, namespace_root
from springtide.choices import EvictionName
from springtide.chunking import Chunking
from springtide.config import ClusterConfig
from springtide.cost import DecodeCost, PrefillCost
from springtide.ids import AttemptId, Incarnation, NodeId, RequestId, Slot
from springtide.modelinfo import KVDtype
from springtide.protocol import storage
from springtide.protocol.outputs import PrefillDone
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.starts import AbortAttempt, DecodeStart, PrefillStart, Request

DTYPE: KVDtype = "bfloat16"
LONGEST_CONTEXT = 8192
SCRATCH_TOKENS = 2560
"""The context with which a node measures its cost model when it starts."""
FOREVER_S = 1e9
SESSION = 0
PREFILL, DECODE = NodeId("prefill"), NodeId("decode")
WRITER = storage.Writer(PREFILL, Incarnation(1), "")


class NodeCore(Protocol):
    """A node's: decides, free of I/O and clock."""

    def handle(self, event: Any, now: float) -> Sequence[Any]: ...


class PoolOfNode:
    """A node's pool, whose orders are done at once. `places`: where in the arena its slots lie. `sealed` is told of every prompt that is to
    be handed over, while its slots hold it."""

    def __init__(self, places: Sequence[int], eviction: EvictionName, sealed: Callable[[storage.Seal, Sequence[int]], None]) -> None:
        self._places, self._sealed = places, sealed
        self.pool = Pool([0] * len(places), 1, policy=new_policy(eviction, len(places)))
        self._slots: dict[AttemptId, tuple[Slot, ...]] = {}
        """Those that each attempt got for its prompt."""

    def order(self, order: storage.Order) -> Sequence[storage.Notice]:
        """Returns what the store says to it."""
        notice = self._done(order)
        # A store has them to tell its watchers.
        self.pool.take_events()
        return () if notice is None else (notice,)

    def _done(self, order: storage.Order) -> storage.Notice | None:
        match order:
            case storage.Acquire(attempt_id, keys, num_blocks, most_reused):
                acquired = self.pool.acquire(attempt_id, keys, num_blocks, most_reused)
                self._slots[attempt_id] = self._placed(acquired.slots)
                return replace(acquired, slots=self._slots[attempt_id])
            case storage.Reserve(attempt_id, keys, num_blocks):
                reserved = self.pool.reserve(attempt_id, keys, num_blocks)
                self._slots[attempt_id] = self._placed(reserved.slots)
                return replace(reserved, slots=self._slots[attempt_id])
            case storage.Grow(attempt_id, num_blocks):
                return storage.Grown(attempt_id, self._placed(self.pool.grow(attempt_id, num_blocks)))
            case storage.Commit(attempt_id, first_block, keys):
                self.pool.commit(attempt_id, first_block, keys)
            case storage.Seal(attempt_id):
                self._sealed(order, self._slots[attempt_id])
                return storage.HandedOver(attempt_id, 0)
            case storage.Release(attempt_id):
                self.pool.release(attempt_id)
                self._slots.pop(attempt_id, None)
        # The units of a hand-over are not sent one by one: `sealed` has it as a whole.
        return None

    def ingest(self, seal: storage.Seal, written: Sequence[int], blocks_of_arena: np.ndarray[Any, Any]) -> storage.Ingested:
        """Copies a reserved prompt from the slots in which it was computed to its own. `blocks_of_arena`: one row for each slot."""
        attempt_id = seal.attempt_id
        ingest = self.pool.begin_ingest(attempt_id, WRITER)
        assert ingest is not None, f"{attempt_id} has not been reserved"
        missing = slice(ingest.present, ingest.num_blocks)
        blocks_of_arena[list(self._slots[attempt_id][missing])] = blocks_of_arena[list(written[missing])]
        self.pool.cover(attempt_id, PREFILL, storage.Unit(0, 1, 0, ingest.num_blocks))
        ingested = self.pool.seal(attempt_id, PREFILL, seal.first_token)
        assert isinstance(ingested, storage.Ingested), ingested
        return ingested

    def _placed(self, slots: Sequence[Slot]) -> tuple[Slot, ...]:
        return tuple(Slot(self._places[slot]) for slot in slots)


class LocalNode:
    """A core with its store. What it wants to have computed is in `work`, what it has for its gateway in `updates`."""

    def __init__(self, core: NodeCore, store: PoolOfNode) -> None:
        self._core, self._store = core, store
        self.work: deque[Any] = deque()
        self.updates: deque[Any] = deque()
        self.tell(StoreConnected(store.pool.num_slots))

    def tell(self, event: Any) -> None:
        events = deque([event])
        while events:
            for action in self._core.handle(events.popleft(), time.monotonic()):
                match action:
                    case prefill_actions.RunPass() | decode_actions.RunStep():
                        self.work.append(action)
                    case SendUpdate(_, update):
                        self.updates.append(update)
                    case _:
                        events.extend(self._store.order(action))


class SpringtideEngine(EngineJob):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        torch.set_num_threads(settings.threads)
        info, config = describe(str(settings.directory)), ClusterConfig()
        self._block_tokens = config.kv.block_tokens
        spec = info.kv_spec(DTYPE, self._block_tokens)
        self._namespace = namespace_root(info.fingerprint, DTYPE, self._block_tokens)
        num_slots = KV_BYTES // spec.bytes_per_slot
        # Filled, so that all of it counts as memory in use, as vLLM's does.
        arena = np.full(num_slots * spec.bytes_per_slot, 0, np.uint8)
        self._blocks_of_arena = arena.reshape(num_slots, spec.bytes_per_slot)
        self._runner = ModelRunner(load_model(info, DTYPE), spec, arena, num_slots)
        self._steps = StepRunner(self._runner)
        places: list[int] = np.random.default_rng(0).permutation(num_slots).tolist()
        scratch, max_batch = places[: blocks_for(SCRATCH_TOKENS, self._block_tokens)], config.decode_node.max_batch
        prefill_cost = PrefillCost.fit(measure_prefill(self._runner, scratch, config.prefill_node.chunk_tokens))
        decode_cost = DecodeCost.fit(measure_decode(self._runner, scratch, max_batch))
        self._ingested: list[storage.Ingested] = []
        half = num_slots // 2
        self._decode_store = PoolOfNode(places[half:], config.kv.eviction, self._hand_over)
        self._prefill = LocalNode(
            PrefillCore(
                PrefillSettings(
                    Chunking(prefill_cost, config.prefill_node.chunk_tokens, config.prefill_node.chunk_ms),
                    LayerGroups(spec.layers, spec.bytes_per_slab, config.kv.layer_group_size),
                    self._block_tokens,
                    info.eos_token_ids,
                )
            ),
            PoolOfNode(places[:half], config.kv.eviction, self._hand_over),
        )
        self._decode = LocalNode(
            DecodeCore(
                DecodeSettings(
                    decode_cost,
                    self._block_tokens,
                    max_batch,
                    info.eos_token_ids,
                    ingest_lease_s=FOREVER_S,
                    slot_wait_s=FOREVER_S,
                    overlap=config.decode_node.overlap,
                )
            ),
            self._decode_store,
        )
        self._numbers = itertools.count()
        self._held: list[Request] = []
        self._outputs: dict[AttemptId, TokenIds] = {}

    def prefill(self, prompt: TokenIds, cached: int) -> int:
        (done,) = self._prefilled([self._request(prompt, 1)])
        assert done.cached_tokens == cached, f"{done.cached_tokens} tokens were cached, not {cached}"
        return done.output.tokens[0].token_id

    def hold(self, prompts: Sequence[TokenIds]) -> TokenIds:
        """Prompts that were held before are computed again from what is cached of them."""
        for request in self._held:
            self._decode.tell(AbortAttempt(request.attempt_id))
        while self._decode.work:
            self._step()
        self._held = [self._request(prompt, LONGEST_CONTEXT - len(prompt)) for prompt in prompts]
        for request in self._held:
            self._decode.tell(Start(SESSION, DecodeStart(request, tbt_slo_ms=0.0, refusable=False)))
        first = [done.output.tokens[0].token_id for done in self._prefilled(self._held)]
        self._outputs = {request.attempt_id: [token] for request, token in zip(self._held, first, strict=True)}
        ingested, self._ingested = self._ingested, []
        for notice in ingested:
            self._decode.tell(notice)
        # The first steps have begun with those that came first.
        while len(self._decode.work[0].rows) < len(prompts):
            self._step()
        return first

    def decode(self, steps: int) -> list[TokenIds]:
        """Counted from the first token on: what came after it while others were waited for is part of it."""
        for _ in range(steps):
            self._step()
        return [self._outputs[request.attempt_id][1 : 1 + steps] for request in self._held]

    def _prefilled(self, requests: Sequence[Request]) -> list[PrefillDone]:
        """What the prefill node says of each."""
        for request in requests:
            self._prefill.tell(Start(SESSION, PrefillStart(request, "here", DECODE, ttft_budget_ms=0.0)))
        while self._prefill.work:
            self._prefill.tell(self._pass(self._prefill.work.popleft()))
        done: dict[AttemptId, PrefillDone] = {}
        while self._prefill.updates:
            update = self._prefill.updates.popleft()
            assert isinstance(update, PrefillDone), update
            done[update.output.attempt_id] = update
        return [done[request.attempt_id] for request in requests]

    def _pass(self, run: prefill_actions.RunPass) -> prefill_events.PassDone:
        began = time.perf_counter()
        logits = self._runner.forward([row.chunk for row in run.rows])
        ending = [row.sampling for row in run.rows if row.sampling is not None]
        tokens = iter(sample(logits, ending) if ending else [])
        sampled = [next(tokens) if row.sampling is not None else None for row in run.rows]
        return prefill_events.PassDone(run.pass_id, sampled, (time.perf_counter() - began) * 1000)

    def _step(self) -> None:
        self._decode.tell(self._steps.run(self._decode.work.popleft()))
        while self._decode.updates:
            update = self._decode.updates.popleft()
            assert not update.failed, update.failed
            for output in update.outputs:
                self._outputs[output.attempt_id] += [token.token_id for token in output.tokens]

    def _hand_over(self, seal: storage.Seal, slots: Sequence[int]) -> None:
        """The decode node hears of it when all prompts are there."""
        self._ingested.append(self._decode_store.ingest(seal, slots, self._blocks_of_arena))

    def _request(self, prompt: TokenIds, most_tokens: int) -> Request:
        """What a gateway makes of a prompt, the keys of its blocks included."""
        name = str(next(self._numbers))
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=most_tokens)
        keys = tuple(block_keys(self._namespace, prompt, self._block_tokens))
        return Request(AttemptId(name), RequestId(name), "", prompt, len(prompt), params, self._namespace, keys, self._block_tokens)


if __name__ == "__main__":
    run(lambda arguments: SpringtideEngine(Settings.from_arguments(arguments)))
