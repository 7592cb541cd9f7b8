"""Runs steps over the model, on its thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from decode_node.core.actions import RunStep, StepRow
from decode_node.core.events import StepDone, StepFailed
from engine.batch import Int32Array, SamplingRow, SequenceChunk
from engine.device.memory import upload
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
        """Runs the step. Each sequence's last tokens may be of the step before: they are read, and the next ones added, here alone."""
        started = time.perf_counter()
        try:
            step = self.begin(run)
            if step.chunks:
                step.draw(self._draw, self._runner.forward(step.chunks))
        except Exception as error:
            logger.exception("a step over %s failed", ", ".join(row.attempt_id for row in run.rows))
            return StepFailed(run.step_id, f"the step failed: {error!r}")
        return step.done((time.perf_counter() - started) * 1000)

    def begin(self, run: RunStep) -> Step:
        """What is to be computed for it."""
        indices, chunks = [], []
        for index, (row, slots) in enumerate(zip(run.rows, self._arrays(run.rows), strict=True)):
            params, output_ids = row.sampling.params, row.output_ids
            # Guesses of a step before, which were right, may have brought it to its end.
            left = params.max_tokens - len(output_ids)
            if left > 0:
                draft = row.draft(left - 1)
                start = len(row.sampling.prompt_ids) + len(output_ids) - 1
                indices.append(index)
                chunks.append(SequenceChunk([output_ids[-1], *draft], start, slots, drafted=len(draft)))
        return Step(run, indices, chunks)

    def _arrays(self, rows: Sequence[StepRow]) -> list[Int32Array]:
        kept, self._slots = self._slots, {}
        for row in rows:
            made = kept.get(row.attempt_id)
            if made is None or made[0] is not row.slots:
                made = row.slots, np.array(row.slots, np.int32)
                made[1].setflags(write=False)
            self._slots[row.attempt_id] = made
        return [made[1] for made in self._slots.values()]


class Step:
    """A step that is being run: `chunks` are to be computed."""

    def __init__(self, run: RunStep, indices: Sequence[int], chunks: Sequence[SequenceChunk]) -> None:
        """Each chunk is that of one row, by its index. Of the other rows nothing is computed."""
        self.chunks = chunks
        self._run, self._indices = run, indices
        self._sampled: list[list[SampledToken] | Failure] = [[] for _ in run.rows]

    def draw(self, draw: Draw, logits: torch.Tensor, others: Sequence[SamplingRow] = ()) -> Sequence[SampledToken | Failure]:
        """Draws tokens from `logits`, those of the chunks and then those of `others`, and adds them to the outputs. Returns what was drawn
        for the others.

        Each token is drawn by itself when those before it are known, and as long as the guesses were these: it is what it would be without
        any, whatever it depends on."""
        *firsts, end = accumulate((chunk.num_wanted for chunk in self.chunks), initial=0)
        samplings = [self._run.rows[index].sampling for index in self._indices]
        rows = [*firsts, *range(end, end + len(others))]
        drawn = draw(_rows(logits, rows), [*samplings, *others]) if rows else ()
        going, position = self._take(range(len(firsts)), drawn, 0), 1
        while going:
            ahead = draw(_rows(logits, [firsts[place] + position for place in going]), [samplings[place] for place in going])
            going, position = self._take(going, ahead, position), position + 1
        return drawn[len(firsts) :]

    def _take(self, places: Sequence[int], drawn: Sequence[SampledToken | Failure], position: int) -> list[int]:
        """Adds what was drawn after each chunk's token at `position`. Returns where that was guessed."""
        going = []
        for place, token in zip(places, drawn, strict=False):
            chunk, index = self.chunks[place], self._indices[place]
            sampled, output_ids = self._sampled[index], self._run.rows[index].output_ids
            if isinstance(token, SampledToken):
                assert isinstance(sampled, list)
                sampled.append(token)
                output_ids.append(token.token_id)
                if position < chunk.drafted and token.token_id == chunk.token_ids[position + 1]:
                    going.append(place)
            elif not sampled:
                # Of a sequence that cannot go on nothing is used, but it may take part in the next step already. After tokens that are
                # used, the next step finds that it cannot.
                self._sampled[index] = token
                output_ids.append(0)
        return going

    def done(self, elapsed_ms: float) -> StepDone:
        """What came of it."""
        drafted = [0] * len(self._run.rows)
        for index, chunk in zip(self._indices, self.chunks, strict=True):
            drafted[index] = chunk.drafted
        if not any(drafted):
            return StepDone(self._run.step_id, self._sampled, elapsed_ms)
        foretold = [row.foretold is not None for row in self._run.rows]
        return StepDone(self._run.step_id, self._sampled, elapsed_ms, drafted=drafted, foretold=foretold)


def _rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits.index_select(0, upload([rows], logits.device)[0])
