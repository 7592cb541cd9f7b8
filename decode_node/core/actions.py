"""What the core wants done (beside the orders to the store in `springtide.protocol.storage`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.batch import SamplingRow
from node_runtime.events import SendUpdate
from springtide.ids import AttemptId
from springtide.protocol import storage
from springtide.protocol.outputs import DecodeUpdate
from springtide.values import value_class


class StepRow(NamedTuple):
    """One sequence's share of a step: its last token, at position `start`, is computed into `slots`, and the next is sampled. Or, where
    there is a `prompt`, these tokens of it, from `start` on; a token is sampled if they are the last."""

    attempt_id: AttemptId
    start: int
    slots: Sequence[int]
    sampling: SamplingRow
    output_ids: list[int]
    """The very list that `sampling` has. From the sequence's first step on it belongs to whoever runs the steps, which adds each token
    that is sampled: a step that is launched while another runs feeds tokens that the core has not seen yet."""
    prompt: Sequence[int] = ()
    samples: bool = True

    @property
    def num_tokens(self) -> int:
        """How many are computed."""
        return len(self.prompt) or 1

    @property
    def position(self) -> int:
        """The place in the output of the token that is sampled."""
        return self.start + self.num_tokens - len(self.sampling.prompt_ids)


@value_class(frozen=True, slots=True)
class RunStep:
    """Run the model once over `rows` when all steps launched before have ended, sample a token for each, and answer with StepDone or
    StepFailed."""

    step_id: int
    rows: tuple[StepRow, ...]

    @property
    def context_tokens(self) -> int:
        """The context of all its sequences, the tokens that are computed included."""
        return sum(row.start + row.num_tokens for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """How many are computed: in a step without prompts, its batch."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def has_prompts(self) -> bool:
        return any(row.prompt for row in self.rows)


@value_class(frozen=True, slots=True)
class LoadAhead:
    """Bring the prompt in these slots, which nobody writes meanwhile, to where steps compute, while these go on, and answer with Loaded."""

    attempt_id: AttemptId
    slots: Sequence[int]


Action = storage.Order | RunStep | LoadAhead | SendUpdate[DecodeUpdate]
