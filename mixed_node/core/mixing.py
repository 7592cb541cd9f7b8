"""How long a chunk of a prompt may be that is computed with a decode step, and what both take together. Pure."""

from __future__ import annotations

from collections import deque

from decode_node.core.core import ForeseenStep
from prefill_node.core.scheduling import WithStep
from springtide.cost import IDLE_STEP_SHARE

OBJECTIVE_SHARE = 0.95
"""Of the objective for the time between tokens, what a step with prompts in it may take: clients see the way of a token, too."""
_WINDOW, _ENOUGH = 32, 4
_EXCEEDED = 1 / 16
"""Of the steps with prompts in them, what may take longer than was planned."""


class MixedCost:
    """What a step and the tokens of prompts take together beyond the sum of what either is predicted to take: so much that hardly any of
    the recent ones took more. Where predictions are good, more of the objective is there for prompts."""

    def __init__(self) -> None:
        self.extra_ms = 0.0
        self._extras: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, step_ms: float, tokens_ms: float, elapsed_ms: float) -> None:
        """A step and tokens of prompts that were predicted to take so long have taken so long together."""
        if step_ms + tokens_ms > 0 and elapsed_ms > 0:
            self._extras.append(elapsed_ms - step_ms - tokens_ms)
            if len(self._extras) >= _ENOUGH:
                self.extra_ms = sorted(self._extras)[-1 - int(_EXCEEDED * len(self._extras))]

    def with_step(self, step: ForeseenStep) -> WithStep:
        """What a pass that is computed with the step has to heed."""
        share = IDLE_STEP_SHARE if step.idle else OBJECTIVE_SHARE
        return WithStep(share * step.objective_ms - self.extra_ms - step.predicted_ms, step.slots, step.idle)
