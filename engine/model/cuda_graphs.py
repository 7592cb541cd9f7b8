"""Decode steps that are recorded once for each size of batch and then replayed, so that launching them takes no time (CUDA graphs)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from engine.backends.base import SIZES, AttentionBackend, FixedStep, size_for, sizes_up_to
from engine.batch import SequenceChunk
from engine.device.memory import upload
from engine.model.base import Model

logger = logging.getLogger(__name__)

Compute = Callable[[], torch.Tensor]
RecordGraph = Callable[[Compute], Compute]
"""From something that computes, always from and into the same memory, to what does the same again."""


def as_it_is(compute: Compute) -> Compute:
    """What records nothing, where nothing can be recorded."""
    return compute


@dataclass(frozen=True, slots=True)
class _Step:
    """Of a fixed size. `compute` takes `tokens`, int64 [sequences], and gives float32 logits [sequences, vocab]."""

    attention: FixedStep
    tokens: torch.Tensor
    compute: Compute


class StepGraphs:
    """Batches are filled up with sequences of one token in `scratch_page`, which is nobody's."""

    def __init__(
        self, attention: AttentionBackend, scratch_page: int, device: torch.device, record: RecordGraph, most: int = SIZES[-1]
    ) -> None:
        """Steps are of up to `most` sequences, filled up."""
        self._attention = attention
        self._filler = SequenceChunk((0,), 0, (scratch_page,))
        self._device = device
        self._record = record
        self._sizes = sizes_up_to(most)
        self._recorded: dict[int, _Step] = {}
        self._failed: set[int] = set()

    @property
    def recorded(self) -> Collection[int]:
        """Sizes that are replayed."""
        return self._recorded.keys()

    @property
    def failed(self) -> Collection[int]:
        """Sizes that cannot be."""
        return self._failed

    def fits(self, model: Model, batch: Sequence[SequenceChunk]) -> bool:
        """Whether a batch is a decode step that can be replayed."""
        size = size_for(len(batch))
        if size not in self._sizes or size in self._failed or not _can_record(model):
            return False
        return all(len(chunk.token_ids) == 1 and chunk.wants_logits and not chunk.wants_all for chunk in batch)

    def record_all(self, model: Model) -> None:
        """Records the steps that are not yet: now, rather than in the first step of each size. The largest first, whose memory the others
        find."""
        if _can_record(model):
            for size in reversed(self._sizes):
                self._filled(model, [self._filler] * size)

    def run(self, model: Model, batch: Sequence[SequenceChunk]) -> torch.Tensor | None:
        """Float32 logits [sequences, vocab] of a batch that `fits` and whose slots are pages, good until the next run; None where it cannot
        be done after all. Errors of computing it are raised."""
        size = size_for(len(batch))
        assert size is not None
        compute = self._filled(model, [*batch, *[self._filler] * (size - len(batch))])
        return None if compute is None else compute()[: len(batch)]

    def _filled(self, model: Model, batch: Sequence[SequenceChunk]) -> Compute | None:
        """What computes a batch of one of the sizes."""
        size = len(batch)
        try:
            step = self._recorded.get(size) or self._prepared(model, size)
            if step is None or not step.attention.fill(batch):
                return None
            step.tokens.copy_(upload([[chunk.token_ids[0] for chunk in batch]], self._device)[0])
            if size not in self._recorded:
                step = self._recorded[size] = replace(step, compute=self._record(step.compute))
        except RuntimeError:
            logger.warning("decode steps of %d cannot be recorded and are launched kernel by kernel, which is slower", size, exc_info=True)
            self._recorded.pop(size, None)
            self._failed.add(size)
            return None
        return step.compute

    def _prepared(self, model: Model, size: int) -> _Step | None:
        attention = self._attention.fixed_step(size)
        if attention is None:
            self._failed.add(size)
            return None
        tokens = torch.zeros(size, dtype=torch.int64, device=self._device)

        def compute() -> torch.Tensor:
            return model.logits(model.run_layers(model.embed(tokens), attention, None))

        return _Step(attention, tokens, compute)


def _can_record(model: Model) -> bool:
    """It is whole, and does not decide on the host which experts a token goes to."""
    return model.config.experts is None and model.begin == 0 and model.end == model.config.layers
