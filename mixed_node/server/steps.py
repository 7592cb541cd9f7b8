"""Runs steps, chunks of prompts, and both together over the model, on its thread."""

from __future__ import annotations

import logging
import time

from decode_node.core.actions import RunStep
from decode_node.core.events import StepDone, StepFailed
from decode_node.server.steps import StepRunner
from engine.kv_cache.page_table import OutOfPages
from engine.runner import ModelRunner
from engine.sampling.sampler import Draw
from mixed_node.core.actions import RunMixed
from prefill_node.stage.compute import Hooks, PassPart, compute, part_ended, scores_of
from springtide.protocol.stages import StageOutcome, StagePassEnded

logger = logging.getLogger(__name__)


class MixedRunner:
    """Runs one after another: belongs to the model's thread."""

    def __init__(self, runner: ModelRunner, draw: Draw) -> None:
        self._runner = runner
        self._draw = draw
        self._steps = StepRunner(runner, draw)

    def run(
        self, mixed: RunMixed, of_pass: tuple[PassPart, Hooks] | None
    ) -> tuple[StepDone | StepFailed | None, StagePassEnded | None, float]:
        """What came of the step and of the pass, and the milliseconds of both."""
        started = time.perf_counter()
        step, ran = mixed.step, None
        ended: StepDone | StepFailed | None = None
        if of_pass is None:
            assert step is not None, "there is a step or a pass"
            ended = self._steps.run(step)
        elif step is None:
            ran = self._run_pass(*of_pass)
        else:
            try:
                ended, ran = self._run_both(step, *of_pass)
            except OutOfPages:
                # Nothing of it has been computed: each of the two has the pages to itself.
                ended = self._steps.run(step)
                ran = self._run_pass(*of_pass)
        return ended, ran, (time.perf_counter() - started) * 1000

    def _run_pass(self, part: PassPart, hooks: Hooks) -> StagePassEnded:
        return compute(self._runner, part, None, None, hooks, self._draw)

    def _run_both(self, step: RunStep, part: PassPart, hooks: Hooks) -> tuple[StepDone | StepFailed, StagePassEnded]:
        """The rows of the step come first: they wait for nothing. Raises OutOfPages when the
        device has none for both."""
        started, began = time.perf_counter(), self._runner.work_clock()
        try:
            own = self._steps.begin(step)
            chunks = [*own.chunks, *part.chunks]
            hidden = self._runner.forward_layers(chunks, None, hooks if part.report_layers else None)
            drawn = own.draw(self._draw, self._runner.logits(chunks, hidden), part.sampling or ())
            scores = scores_of(self._runner, part, hidden, sum(len(chunk.token_ids) for chunk in own.chunks)) if part.scoring else []
        except OutOfPages:
            raise
        except Exception as error:
            logger.exception("a step over %s with chunks of prompts failed", ", ".join(row.attempt_id for row in step.rows))
            message = f"the step failed: {error!r}"
            return StepFailed(step.step_id, message), part_ended(part, StageOutcome.FAILED, message)
        elapsed_ms = (time.perf_counter() - started) * 1000
        busy_ms = max(0.0, self._runner.work_clock() - began) * 1000
        return own.done(elapsed_ms), part_ended(part, StageOutcome.DONE, "", drawn, scores, busy_ms)
