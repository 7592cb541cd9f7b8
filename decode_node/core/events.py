"""What happens to a decode node (beside what `node_runtime` tells either kind of engine)."""

from __future__ import annotations

from collections.abc import Sequence

from node_runtime.events import EngineEvent
from springtide.ids import AttemptId
from springtide.protocol.outputs import Failure, PrefillDone, SampledToken
from springtide.protocol.starts import DecodeStart
from springtide.values import value_class


@value_class(frozen=True, slots=True)
class StepDone:
    """A step has ended. `sampled[i]` belongs to row i of the step: one token, or several where the step was repeated (an engine that takes
    several steps at a time, or a simulated one), each of which took `elapsed_ms` in the mean; a Failure for one that no token can
    follow."""

    step_id: int
    sampled: Sequence[Sequence[SampledToken] | Failure]
    elapsed_ms: float
    beside_idle: bool | None = None
    """Other engines of the machine did idle work meanwhile; None: for a part of the time, or nobody knows."""
    drafted: Sequence[int] = ()
    """How many tokens of each row were guessed. Then the step was not repeated: a row has one token more than of these were right, or none
    at all where its output was at its end already. Empty: there are no guesses here."""
    foretold: Sequence[bool] = ()
    """Of which rows these were foretold, not guessed; as long as `drafted`."""
    shared: bool = False
    """Chunks of prompts were computed with it: what it took says nothing of it alone."""

    @property
    def between_tokens_ms(self) -> float:
        """Of its sequences, in the mean: of a step with guesses they have several tokens."""
        counts = [len(tokens) for tokens in self.sampled if not isinstance(tokens, Failure) and tokens]
        return self.elapsed_ms * len(counts) / sum(counts) if self.drafted and counts else self.elapsed_ms


@value_class(frozen=True, slots=True)
class StepFailed:
    """A step has come to nothing."""

    step_id: int
    message: str


@value_class(frozen=True, slots=True)
class Loaded:
    """The attempt's slots are not read any more for its LoadAhead. What is not loaded by now, a step loads."""

    attempt_id: AttemptId


@value_class(frozen=True, slots=True)
class PromptComputed:
    """The prompt of an inlined attempt is in its slots, the full blocks committed; `done` has its first token. With that the output may be
    at its end: then the slots have been given back."""

    done: PrefillDone


@value_class(frozen=True, slots=True)
class PromptFailed:
    """The prompt of an inlined attempt cannot be computed. It has no slots any more, or soon will not."""

    attempt_id: AttemptId
    failure: Failure


@value_class(frozen=True, slots=True)
class PrefixShared:
    """The inlined attempt need not wait any more for what another one computes of its prompt. So many of its blocks are in the store."""

    attempt_id: AttemptId
    blocks: int


StepEvent = StepDone | StepFailed | Loaded | PromptComputed | PromptFailed | PrefixShared
Event = EngineEvent[DecodeStart] | StepEvent
