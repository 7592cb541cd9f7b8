"""What the core wants done (beside the orders to the store in `springtide.protocol.storage`)."""

from __future__ import annotations

from math import inf

from engine.batch import SamplingRow, Scoring, SequenceChunk
from node_runtime.events import SendUpdate
from springtide.ids import AttemptId
from springtide.protocol import storage
from springtide.protocol.outputs import PrefillDone, PrefillUpdate
from springtide.values import value_class


@value_class(frozen=True, slots=True)
class PassRow:
    """One attempt's chunk. `sampling` is set when the chunk ends the prompt, `scoring` when log-probabilities of the prompt are wanted."""

    attempt_id: AttemptId
    chunk: SequenceChunk
    sampling: SamplingRow | None
    scoring: Scoring | None = None


@value_class(frozen=True, slots=True)
class RunPass:
    """Run the model once over all rows, stage after stage, and answer with PassDone, PassInterrupted or PassFailed; before that with
    PassLeft where there are several stages.

    Each of `pushes` is to be ordered from the store as soon as its last layer is computed; they are sorted by it.
    `awaits`: the attempt, alone in the pass, whose prefix still arrives: its slabs of a layer must be waited for before the layer runs.
    """

    pass_id: int
    rows: tuple[PassRow, ...]
    pushes: tuple[storage.Push, ...]
    awaits: AttemptId | None = None
    predicted_ms: float = inf
    """What it takes in all stages together, without what it waits for; inf where nobody knows."""
    idle: bool = False
    """It is of idle work alone."""

    @property
    def num_tokens(self) -> int:
        """How many are computed."""
        return sum(len(row.chunk.token_ids) for row in self.rows)

    @property
    def scores(self) -> bool:
        """Whether any row wants log-probabilities of its prompt."""
        return any(row.scoring is not None for row in self.rows)


@value_class(frozen=True, slots=True)
class GiveWay:
    """The pass, which is under way and of idle work alone, is to be broken off, and answered with PassGaveWay; unless it is through."""

    pass_id: int


@value_class(frozen=True, slots=True)
class Prefilled:
    """The attempt's prompt, which stays here, is computed, its full blocks committed, and more is to come. Its slots are no concern of the
    group's any more."""

    done: PrefillDone


@value_class(frozen=True, slots=True)
class PrefixShared:
    """The attempt, which is decoded here, need not wait any more for what another one computes of its prompt. So many of its blocks are in
    the store."""

    attempt_id: AttemptId
    blocks: int


ForBeside = Prefilled | PrefixShared
"""What is for those that decode with the same engine."""
Action = storage.Order | RunPass | GiveWay | ForBeside | SendUpdate[PrefillUpdate]
