"""What the core wants done (beside the orders to the store in `springtide.protocol.storage`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from decode_node.core.drafting import Foretold, PromptLookup
from engine.batch import SamplingRow
from node_runtime.events import SendUpdate
from springtide.ids import AttemptId
from springtide.protocol import storage
from springtide.protocol.outputs import DecodeUpdate
from springtide.protocol.starts import AbortAttempt, PrefillStart
from springtide.values import value_class


class StepRow(NamedTuple):
    """One sequence's share of a step: its last token, at position `start`, is computed into `slots`, and the next is sampled. Where guesses
    of a step before it were right, its last token is so many positions further; where these have brought its output to its end, it has
    none, and nothing is computed of it."""

    attempt_id: AttemptId
    start: int
    slots: Sequence[int]
    sampling: SamplingRow
    output_ids: list[int]
    """The very list that `sampling` has. From the sequence's first step on it belongs to whoever runs the steps, which adds each token
    that is sampled: a step that is launched while another runs feeds tokens that the core has not seen yet."""
    most_drafted: int = 0
    """So many more tokens may be guessed, or were foretold, and are computed after the last one: their slots are among `slots`. What is
    sampled is what would be without, one token after each of these that is right."""
    lookup: PromptLookup | None = None
    """What guesses them. It belongs to whoever runs the steps, as `output_ids` do."""
    foretold: Foretold | None = None
    """What has those that were. Where there is one, nothing is guessed."""

    def draft(self, most: int) -> list[int]:
        """The tokens, at most so many, as the step begins."""
        most = min(most, self.most_drafted)
        if self.foretold is not None:
            return self.foretold.draft(len(self.output_ids), most)
        return [] if self.lookup is None else self.lookup.draft(most)

    @property
    def position(self) -> int:
        """The place in the output of the token that is sampled."""
        return self.start + 1 - len(self.sampling.prompt_ids)


@value_class(frozen=True, slots=True)
class RunStep:
    """Run the model once over `rows` when all steps launched before have ended, sample a token for each, and answer with StepDone or
    StepFailed."""

    step_id: int
    rows: tuple[StepRow, ...]

    @property
    def context_tokens(self) -> int:
        """The context of all its sequences, the tokens that are computed included."""
        return sum(row.start for row in self.rows) + len(self.rows)

    @property
    def most_drafted(self) -> int:
        """The tokens that may be guessed, of all of them."""
        return sum(row.most_drafted for row in self.rows)


@value_class(frozen=True, slots=True)
class LoadAhead:
    """Bring the prompt in these slots, which nobody writes meanwhile, to where steps compute, while these go on, and answer with Loaded."""

    attempt_id: AttemptId
    slots: Sequence[int]


@value_class(frozen=True, slots=True)
class ComputePrompt:
    """Have the prompt of an inlined attempt, which has slots, computed by what of this very engine computes prompts, and answer with
    PromptComputed or PromptFailed; unless the attempt is aborted before. Until then the slots are its affair. `arrived_at` and `asked_at`:
    when the attempt came here, and the store was asked."""

    start: PrefillStart
    acquired: storage.Acquired
    arrived_at: float
    asked_at: float


Action = storage.Order | RunStep | LoadAhead | ComputePrompt | AbortAttempt | SendUpdate[DecodeUpdate]
"""AbortAttempt: of a prompt that is being computed; its slots are given back by who computes it."""
