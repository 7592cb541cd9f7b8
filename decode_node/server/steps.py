"""Runs steps over the model, on its thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from decode_node.core.actions import RunStep, StepRow
from decode_node.core.events import StepDone, StepFailed
from engine.batch import Int32Array, SequenceChunk
from engine.runner import ModelRunner
from engine.sampling.sampler import Draw, sample
from springtide.protocol.outputs import Failure, SampledToken

logger = logging.getLogger(__name__)


class StepRunner:
    """Runs one step after another: belongs to the model's thread. A sequence's slots, which grow once in a block's tokens, become an array
    when they do and not at every step: nothing that a step takes here grows with the context. An array never changes, by which further
    ranks know it again."""

    def __init__(self, runner: ModelRunner, draw: Draw = sample) -> None:
        """`draw`: a Sampler's, where outputs may be held to grammars."""
        self._runner = runner
        self._draw = draw
        self._slots: dict[str, tuple[Sequence[int], Int32Array]] = {}
        """What the slots of the last step's attempts were made from."""

    def run(self, run: RunStep) -> StepDone | StepFailed:
        """Runs the step. Each sequence's last token may be of the step before: it is read, and the next one added, here alone."""
        started = time.perf_counter()
        try:
            logits = self._runner.forward(self.chunks(run))
            sampled = taken_in(run, self._draw(logits, [row.sampling for row in run.rows]))
        except Exception as error:
            logger.exception("a step over %s failed", ", ".join(row.attempt_id for row in run.rows))
            return StepFailed(run.step_id, f"the step failed: {error!r}")
        return StepDone(run.step_id, sampled, (time.perf_counter() - started) * 1000)

    def chunks(self, run: RunStep) -> list[SequenceChunk]:
        """What the step computes."""
        slots = self._arrays(run.rows)
        return [SequenceChunk(row.output_ids[-1:], row.start, own) for row, own in zip(run.rows, slots, strict=True)]

    def _arrays(self, rows: Sequence[StepRow]) -> list[Int32Array]:
        kept, self._slots = self._slots, {}
        for row in rows:
            made = kept.get(row.attempt_id)
            if made is None or made[0] is not row.slots:
                made = row.slots, np.array(row.slots, np.int32)
                made[1].setflags(write=False)
            self._slots[row.attempt_id] = made
        return [made[1] for made in self._slots.values()]


def taken_in(run: RunStep, drawn: Sequence[SampledToken | Failure]) -> list[tuple[SampledToken] | Failure]:
    """Adds what was drawn for each row to its output; returns what StepDone has of it."""
    for row, token in zip(run.rows, drawn, strict=True):
        # Of a sequence that cannot go on nothing is used, but it may take part in the next step already.
        row.output_ids.append(token.token_id if isinstance(token, SampledToken) else 0)
    return [(token,) if isinstance(token, SampledToken) else token for token in drawn]
