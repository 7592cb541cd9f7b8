"""How long a chunk of a prompt may be that is computed with a decode step, and what both take together. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median

from decode_node.core.core import ForeseenStep
from prefill_node.core.scheduling import WithStep
from springtide.cost import IDLE_STEP_SHARE

OBJECTIVE_SHARE = 0.85
"""Of the objective for the time between tokens, what a step with prompts in it is planned to take: predictions miss, and clients see the
way of a token, too."""
_WINDOW, _ENOUGH = 16, 4
_LEAST, _MOST = 0.5, 4.0


class MixedCost:
    """What a step and a pass take together, as a multiple of the sum of what either takes alone: the median of the recent ones."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._ratios: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, step_ms: float, pass_ms: float, elapsed_ms: float) -> None:
        """A step and a pass that were predicted to take so long alone have taken so long together."""
        if step_ms + pass_ms > 0 and elapsed_ms > 0:
            self._ratios.append(elapsed_ms / (step_ms + pass_ms))
            if len(self._ratios) >= _ENOUGH:
                self.factor = min(max(median(self._ratios), _LEAST), _MOST)

    def with_step(self, step: ForeseenStep) -> WithStep:
        """What a pass that is computed with the step has to heed."""
        share = IDLE_STEP_SHARE if step.idle else OBJECTIVE_SHARE
        return WithStep(share * step.objective_ms / self.factor - step.predicted_ms, step.slots, step.idle)
