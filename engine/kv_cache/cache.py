"""Where keys and values are while a pass computes: the interface, and the arena itself as the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from engine.backends.base import AttentionBackend, AttentionPass
from engine.batch import Int32Array, LayerHooks, SequenceChunk
from engine.device.streams import CopyTimes, DeviceWork
from engine.model.base import Model


class PagedCache(ABC):
    """The KV cache over the slots of one arena."""

    keeps_pages = False
    """Whether it remembers slots from pass to pass, so that it must hear of those that are given back."""
    most_blocks: int
    """Of one pass."""

    @abstractmethod
    def warm_up(self, model: Model) -> None:
        """Prepares what `step` otherwise prepares in the first step of each size."""

    @abstractmethod
    def plan(self, batch: Sequence[SequenceChunk]) -> AttentionPass:
        """Plans the attention of the `run` that follows. Raises as AttentionBackend.plan does."""

    @abstractmethod
    def run(self, model: Model, hidden: torch.Tensor, planned: AttentionPass, hooks: LayerHooks | None) -> torch.Tensor:
        """The model's layers, as Model.run_layers. A layer's slabs are in the arena when `hooks.after` is called for it, and the blocks
        that the pass has filled when it returns."""

    @abstractmethod
    def step(self, model: Model, batch: Sequence[SequenceChunk]) -> torch.Tensor | None:
        """The logits of a pass of one new token for each sequence, if there is a quicker way to them than `plan` and `run`."""

    @abstractmethod
    def load_ahead(self, slots: Sequence[int] | Int32Array) -> DeviceWork | None:
        """Begins to load blocks that are in the arena, for a pass to come, beside those that come before it; nothing may be written into
        the slots until it is done. None where there is nothing to wait for: no copies are needed, or there is no room for them without
        taking it from those who are computed with, and the pass loads them itself. A pass that comes before it is done is right too: it
        waits. Raises ValueError when slots that are to be loaded are outside the arena."""

    @abstractmethod
    def forget(self, slots: Sequence[int] | Int32Array) -> None:
        """Forgets slots that were given back: others may write into them."""

    @abstractmethod
    def copy_times(self) -> CopyTimes:
        """The times of the last pass's copies; zeros where it was refused."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the arena. Idempotent."""


class ArenaCache(PagedCache):
    """The model computes on the arena's own memory."""

    def __init__(self, attention: AttentionBackend, num_slots: int) -> None:
        self._attention = attention
        self.most_blocks = num_slots

    def warm_up(self, model: Model) -> None:
        """Does nothing: there is no quicker step."""

    def plan(self, batch: Sequence[SequenceChunk]) -> AttentionPass:
        return self._attention.plan(batch)

    def run(self, model: Model, hidden: torch.Tensor, planned: AttentionPass, hooks: LayerHooks | None) -> torch.Tensor:
        return model.run_layers(hidden, planned, hooks)

    def step(self, model: Model, batch: Sequence[SequenceChunk]) -> torch.Tensor | None:
        return None

    def load_ahead(self, slots: Sequence[int] | Int32Array) -> DeviceWork | None:
        return None

    def forget(self, slots: Sequence[int] | Int32Array) -> None:
        """Has nothing to forget."""

    def copy_times(self) -> CopyTimes:
        return CopyTimes()

    def close(self) -> None:
        """The arena is the caller's."""
