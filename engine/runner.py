"""Runs a model over the slots of an arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.attention.torch_cpu import TorchAttention
from engine.base import LayerHooks, SequenceChunk
from engine.models.base import Model
from springtide.blocks import blocks_for
from springtide.kvspec import KVSpec

_KV_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Arena = memoryview | np.ndarray[Any, np.dtype[np.uint8]]


class ModelRunner:
    """The paged KV cache is the arena: keys and values are written to and read from its slots where they lie.

    The arena stays its owner's (the node's store). The runner writes only the slots of the chunks it is given, during `forward`.
    Not safe for concurrent calls: one thread runs it.
    """

    def __init__(self, model: Model, kv_spec: KVSpec, arena: Arena, num_slots: int) -> None:
        """`arena` is writable and at least `num_slots * kv_spec.bytes_per_slot` bytes long; `kv_spec.layers` are the model's own."""
        expected = (model.end - model.begin, model.config.kv_heads, model.config.head_dim, model.dtype)
        given = (kv_spec.layers, kv_spec.kv_heads, kv_spec.head_dim, _KV_DTYPES[kv_spec.dtype])
        if expected != given:
            raise ValueError(f"the model's (layers, kv_heads, head_dim, dtype) are {expected}, the KVSpec says {given}")
        self.model = model
        self.kv_spec = kv_spec
        self.set_arena(arena, num_slots)

    def set_arena(self, arena: Arena, num_slots: int) -> None:
        """Attaches to another arena of the same geometry, as after a restart of the store."""
        self.num_slots = num_slots
        config = self.model.config
        windows = [config.window(layer) for layer in range(self.model.begin, self.model.end)]
        self._attention = TorchAttention(arena_tensor(arena, self.kv_spec, num_slots), config.heads, windows)

    def forward(self, batch: Sequence[SequenceChunk], hooks: LayerHooks | None = None) -> torch.Tensor:
        """Float32 logits [chunks that want them, vocab], in the order of the batch, of a model that has all its layers.

        Raises ValueError when a chunk's slots or positions are out of range.
        """
        hidden = self.forward_layers(batch, None, hooks)
        with torch.inference_mode():
            last_rows = np.cumsum([len(chunk.token_ids) for chunk in batch]) - 1
            wanted = [int(row) for row, chunk in zip(last_rows, batch, strict=True) if chunk.wants_logits]
            if not wanted:
                return torch.empty(0, self.model.config.vocab_size)
            return self.model.logits(hidden[wanted])

    def forward_layers(self, batch: Sequence[SequenceChunk], hidden: torch.Tensor | None, hooks: LayerHooks | None = None) -> torch.Tensor:
        """This stage's layers only: from the stage before, `hidden` [tokens of the batch, hidden size], or None where the model's first
        layer is here; returns the same for the next stage. `hooks` number the layers as the arena does, from 0."""
        for chunk in batch:
            self._check(chunk)
        with torch.inference_mode():
            attention = self._attention.plan(batch)
            if hidden is None:
                hidden = self.model.embed(torch.tensor([token for chunk in batch for token in chunk.token_ids]))
            return self.model.run_layers(hidden, attention, hooks)

    def _check(self, chunk: SequenceChunk) -> None:
        end = chunk.start + len(chunk.token_ids)
        if chunk.start < 0 or end > self.model.config.context_length:
            raise ValueError(f"positions {chunk.start}..{end - 1} are outside the context of {self.model.config.context_length} tokens")
        if blocks_for(end, self.kv_spec.block_tokens) > len(chunk.slots):
            raise ValueError(f"{len(chunk.slots)} slots of {self.kv_spec.block_tokens} tokens cannot hold {end} tokens")
        if not 0 <= min(chunk.slots) <= max(chunk.slots) < self.num_slots:
            raise ValueError(f"slots {min(chunk.slots)}..{max(chunk.slots)} are outside the arena of {self.num_slots} slots")


def arena_tensor(arena: Arena, spec: KVSpec, num_slots: int) -> torch.Tensor:
    """The memory of `arena` as [slots, layers, 2, block_tokens, kv_heads, head_dim]."""
    memory = np.asarray(arena).reshape(-1).view(np.uint8)
    num_bytes = num_slots * spec.bytes_per_slot
    if not memory.flags.writeable or len(memory) < num_bytes:
        raise ValueError(f"an arena of {num_slots} slots needs {num_bytes} writable bytes, not {len(memory)}")
    elements = torch.from_numpy(memory[:num_bytes]).view(_KV_DTYPES[spec.dtype])
    return elements.view(num_slots, spec.layers, 2, spec.block_tokens, spec.kv_heads, spec.head_dim)
