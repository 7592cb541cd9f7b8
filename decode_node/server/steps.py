"""Runs a step over the model, on its thread."""

from __future__ import annotations

import logging
import time

from decode_node.core.actions import RunStep
from decode_node.core.events import StepDone, StepFailed
from engine.runner import ModelRunner
from engine.sampler import sample

logger = logging.getLogger(__name__)


def run_step(runner: ModelRunner, run: RunStep) -> StepDone | StepFailed:
    started = time.perf_counter()
    try:
        sampled = sample(runner.forward(run.batch), run.sampling)
    except Exception as error:
        logger.exception("a step over %s failed", ", ".join(run.attempt_ids))
        return StepFailed(run.step_id, f"the step failed: {error!r}")
    return StepDone(run.step_id, [(token,) for token in sampled], (time.perf_counter() - started) * 1000)
