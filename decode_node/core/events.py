"""What happens to a decode node (beside what `node_runtime` tells either kind of engine)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from node_runtime import storage
from node_runtime.events import Abort, SessionEnded, Tick
from node_runtime.requests import Request
from springtide.sampling import SampledToken


@dataclass(frozen=True, slots=True)
class Start:
    """A gateway's session wants every token of the attempt after its first, which the prefill side samples."""

    session: int
    request: Request
    tbt_slo_ms: float
    """Objective checked at the door; 0 for none."""
    inlined: bool = False
    """There is no prefill side: the prompt is computed here, and its first token is wanted too."""
    waits: bool = False
    """There is none yet: whoever sent this begins it when `Reply.reserved` says so."""
    refusable: bool = True
    """The door may refuse it."""
    expected_tokens: float = 0.0
    """Predicted length of the output still to come; 0: not known."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """`sampled[i]` belongs to row i of the step: one token, or several where the step was repeated (an engine that takes several steps at
    a time, or a simulated one), each of which took `elapsed_ms` in the mean. None for a row that samples nothing."""

    step_id: int
    sampled: Sequence[Sequence[SampledToken] | None]
    elapsed_ms: float


@dataclass(frozen=True, slots=True)
class StepFailed:
    step_id: int
    message: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The attempt's slots are not read any more for its LoadAhead. What is not loaded by now, a step loads."""

    attempt_id: str


Event = Start | Abort | SessionEnded | StepDone | StepFailed | Loaded | Tick | storage.StoreUp | storage.StoreLost | storage.Notice
