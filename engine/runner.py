"""Runs a model over the slots of an arena."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from engine.backends.base import AttentionPass
from engine.batch import LayerHooks, SequenceChunk
from engine.device.memory import upload
from engine.device.streams import CopyTimes, DeviceWork
from engine.kv_cache.cache import ArenaCache, PagedCache
from engine.kv_cache.device_cache import DeviceCache
from engine.kv_cache.page_table import OutOfPages
from engine.model.base import Model
from springtide.blocks import blocks_for
from springtide.modelinfo import KVSpec

_KV_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_WARM_UP_TOKENS = 2


@dataclass(frozen=True, slots=True)
class SharedArena:
    """An arena that other processes of this node can map: `memory` uint8 [bytes] begins at `offset` of what is behind `memory_fd`. Whoever
    has it mapped keeps `token_fd` open, if there is one: by its closing the owner knows that nobody writes any more."""

    memory: np.ndarray[Any, np.dtype[np.uint8]]
    memory_fd: int
    offset: int
    token_fd: int | None = None


Arena = memoryview | np.ndarray[Any, np.dtype[np.uint8]] | SharedArena


class ModelRunner:
    """Runs a model. On a CPU the paged KV cache is the arena: keys and values are written to and read from its slots where they lie. A
    model on a device (engine.device) has its cache there, and slabs are copied between the two.

    The arena stays its owner's (the node's store). The runner writes only the slots of the chunks it is given, during `forward`.
    Not safe for concurrent calls: one thread runs it.
    """

    def __init__(self, model: Model, kv_spec: KVSpec, arena: Arena, num_slots: int) -> None:
        """`arena` is writable and at least `num_slots * kv_spec.bytes_per_slot` bytes long. `kv_spec.layers` are the model's own or, where
        several stages share the arena, those of the whole model, of which the runner uses its own."""
        whole = kv_spec.layers == model.config.layers
        expected = (model.config.layers if whole else model.end - model.begin, model.config.kv_heads, model.config.head_dim, model.dtype)
        given = (kv_spec.layers, kv_spec.kv_heads, kv_spec.head_dim, _KV_DTYPES[kv_spec.dtype])
        if expected != given:
            raise ValueError(f"the model's (layers, kv_heads, head_dim, dtype) are {expected}, the KVSpec says {given}")
        self._first_layer = model.begin if whole else 0
        self.model = model
        self.kv_spec = kv_spec
        self._cache: PagedCache | None = None
        self.set_arena(arena, num_slots)

    def set_arena(self, arena: Arena, num_slots: int) -> None:
        """Attaches to another arena of the same geometry, as after a restart of the store."""
        self.num_slots = num_slots
        config, shard, backend = self.model.config, self.model.ranks.shard, self.model.backend
        windows = [config.window(layer) for layer in range(self.model.begin, self.model.end)]
        layers = slice(self._first_layer, self._first_layer + len(windows))
        slabs = arena_tensor(arena, self.kv_spec, num_slots)[:, layers, ..., shard.of(config.kv_heads), :]
        heads = config.heads // shard.size
        # One cache goes before the next comes: a device has not the memory for two.
        self._let_go()
        self._cache = None
        with torch.inference_mode():
            if backend.device is None:
                self._cache = ArenaCache(backend.attention(slabs, heads, windows), num_slots)
            else:
                self._cache = DeviceCache(backend, slabs, heads, windows, self.model.ranks)

    @property
    def cache(self) -> PagedCache:
        assert self._cache is not None, "it is made with the runner"
        return self._cache

    @property
    def most_blocks(self) -> int:
        """The most blocks of one sequence: slots of the arena, or pages of the device."""
        return self.cache.most_blocks

    @property
    def keeps_pages(self) -> bool:
        """Whether it must be told (`forget`) of slots that are given back."""
        return self.cache.keeps_pages

    @property
    def activations_device(self) -> torch.device | None:
        """The device from which `forward_layers` takes what comes from the stage before as it lies; None where that is the host's
        memory."""
        device = self.model.backend.device
        return device.torch_device if device is not None else None

    @property
    def takes_drafts(self) -> bool:
        """Whether several tokens of a sequence may take little longer than one: not on CUDA, as long as nothing else is known. Where steps
        are recorded there, they have one token of each sequence."""
        device = self.model.backend.device
        return device is None or not device.is_cuda

    @property
    def loads_ahead(self) -> bool:
        """Whether `load_ahead` may save a pass from waiting."""
        return self.keeps_pages

    def load_ahead(self, slots: Sequence[int]) -> DeviceWork | None:
        """Begins to load the blocks in these slots of the arena, which nobody writes until it is done, for a pass to come; those before it
        need not wait for that. None where there is nothing to wait for. What was loaded is kept until it is used or forgotten."""
        with torch.inference_mode():
            return self.cache.load_ahead(slots)

    def forget(self, slots: Sequence[int]) -> None:
        """Forgets slots that were given back; no pass uses them before something else has been written there."""
        self.cache.forget(slots)

    def warm_up(self) -> None:
        """What is otherwise done for the first time in somebody's pass, where the cache is a device's: for each arena anew, before any
        other pass in it. Nothing is written into the arena."""
        if not self.keeps_pages:
            return
        config, slots = self.model.config, (0,)
        hidden = None if self.model.begin == 0 else torch.zeros(_WARM_UP_TOKENS, config.hidden_size, dtype=self.model.dtype)
        # Too few for a block, which alone would be stored.
        self.forward_layers([SequenceChunk([0] * _WARM_UP_TOKENS, 0, slots)], hidden)
        self.forget(slots)
        with torch.inference_mode():
            self.cache.warm_up(self.model)

    def copy_times(self) -> CopyTimes:
        """The times of the last pass's copies between the arena and the device; zeros where these are one."""
        return self.cache.copy_times()

    def work_clock(self) -> float:
        """A clock in seconds, of which as many pass between two calls as the passes between them took. On a CPU: the processor time of the
        calling thread, which does its share of every operator, so that other processes' turns and waiting do not count. On a CUDA device:
        the time by which it was through with them."""
        device = self.model.backend.torch_device
        if device.type == "cpu":
            return time.thread_time()
        torch.cuda.synchronize(device)
        return time.perf_counter()

    @property
    def waiting_counts(self) -> bool:
        """Whether time in which the thread waits, in a hook, is in `work_clock` too."""
        return self.model.backend.torch_device.type != "cpu"

    def close(self) -> None:
        """Ends what was started for it. No pass may be in flight."""
        self._let_go()

    def forward(self, batch: Sequence[SequenceChunk], hooks: LayerHooks | None = None) -> torch.Tensor:
        """Float32 logits [tokens that want them, vocab], in the order of the batch, of a model that has all its layers.

        Raises ValueError when a chunk's slots or positions are out of range, OutOfPages when a sequence is longer than the device has pages
        for, or with hooks a batch is.
        """
        if hooks is None and self.keeps_pages:
            return self._forward_on_pages(batch)
        return self.logits(batch, self.forward_layers(batch, None, hooks))

    def _forward_on_pages(self, batch: Sequence[SequenceChunk]) -> torch.Tensor:
        """A batch that there are not enough pages for goes in two, each of which has them all to itself."""
        for chunk in batch:
            self._check(chunk)
        try:
            with torch.inference_mode():
                logits = self.cache.step(self.model, batch)
            return logits if logits is not None else self.logits(batch, self.forward_layers(batch, None))
        except OutOfPages:
            if len(batch) == 1:
                raise
            half = len(batch) // 2
            # The first half's logits may be in memory that the second half's go into.
            return torch.cat([self._forward_on_pages(part).clone() for part in (batch[:half], batch[half:])])

    def logits(self, batch: Sequence[SequenceChunk], hidden: torch.Tensor) -> torch.Tensor:
        """The logits as `forward` returns them, from what `forward_layers` returned at the last stage."""
        with torch.inference_mode():
            ends = accumulate(len(chunk.token_ids) for chunk in batch)
            wanted = [
                row for end, chunk in zip(ends, batch, strict=True) if chunk.wants_logits for row in range(end - 1 - chunk.drafted, end)
            ]
            if not wanted:
                return torch.empty(0, self.model.config.vocab_size, device=hidden.device)
            if len(wanted) == 1:
                hidden = hidden[wanted[0] : wanted[0] + 1]
            elif len(wanted) < len(hidden):
                (rows,) = upload([wanted], hidden.device)
                hidden = hidden.index_select(0, rows)
            return self.model.logits(hidden)

    def logits_between(self, hidden: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Float32 logits [end - begin, vocab] of rows [begin, end) of what `forward_layers` returned at the last stage, of chunks that want
        all. They take as much memory as they have elements: a long chunk's are asked for in pieces."""
        with torch.inference_mode():
            return self.model.logits(hidden[begin:end])

    def forward_layers(self, batch: Sequence[SequenceChunk], hidden: torch.Tensor | None, hooks: LayerHooks | None = None) -> torch.Tensor:
        """Computes this stage's layers only: from the stage before, `hidden` [tokens of the batch, hidden size], which is overwritten, or
        None where the model's first layer is here; returns the same for the next stage. `hooks` number these layers from 0. After the
        model's last layer only what `logits` takes of it is sure to be right: where no chunk wants any, nothing.

        Raises ValueError as `forward` does, before anything is computed."""
        return self._run(batch, self._planned(batch), hidden, hooks)

    def leave_arena(self) -> None:
        """Leaves the arena, in which nothing is computed any more until the next `set_arena`: the device, and other processes of this
        runner, let go of it. Nothing here views its memory."""
        self._let_go()
        self._cache = None

    def _let_go(self) -> None:
        if self._cache is not None:
            self._cache.close()

    def _planned(self, batch: Sequence[SequenceChunk]) -> AttentionPass:
        for chunk in batch:
            self._check(chunk)
        with torch.inference_mode():
            return self.cache.plan(batch)

    def _run(
        self, batch: Sequence[SequenceChunk], planned: AttentionPass, hidden: torch.Tensor | None, hooks: LayerHooks | None
    ) -> torch.Tensor:
        with torch.inference_mode():
            device = self.model.backend.torch_device
            if hidden is None:
                (tokens,) = upload([[token for chunk in batch for token in chunk.token_ids]], device)
                hidden = self.model.embed(tokens)
            return self.cache.run(self.model, hidden.to(device, non_blocking=True), planned, hooks)

    def _check(self, chunk: SequenceChunk) -> None:
        end = chunk.start + len(chunk.token_ids)
        if chunk.start < 0 or end > self.model.config.context_length:
            raise ValueError(f"positions {chunk.start}..{end - 1} are outside the context of {self.model.config.context_length} tokens")
        if blocks_for(end, self.kv_spec.block_tokens) > len(chunk.slots):
            raise ValueError(f"{len(chunk.slots)} slots of {self.kv_spec.block_tokens} tokens cannot hold {end} tokens")


def arena_tensor(arena: Arena, spec: KVSpec, num_slots: int) -> torch.Tensor:
    """The memory of `arena` as [slots, layers, 2, block_tokens, kv_heads, head_dim]."""
    memory = np.asarray(arena.memory if isinstance(arena, SharedArena) else arena).reshape(-1).view(np.uint8)
    num_bytes = num_slots * spec.bytes_per_slot
    if not memory.flags.writeable or len(memory) < num_bytes:
        raise ValueError(f"an arena of {num_slots} slots needs {num_bytes} writable bytes, not {len(memory)}")
    elements = torch.from_numpy(memory[:num_bytes]).view(_KV_DTYPES[spec.dtype])
    return elements.view(num_slots, spec.layers, 2, spec.block_tokens, spec.kv_heads, spec.head_dim)
