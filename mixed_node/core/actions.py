"""What the core wants done, beside what `prefill_node` and `decode_node` have of their own."""

from __future__ import annotations

from decode_node.core.actions import LoadAhead, RunStep
from node_runtime.events import SendUpdate
from prefill_node.core.actions import GiveWay, RunPass
from springtide.protocol import storage
from springtide.protocol.outputs import DecodeUpdate, PrefillUpdate
from springtide.values import value_class


@value_class(frozen=True, slots=True)
class RunMixed:
    """Run the model once over the rows of both, of which there is one at least, when all that were launched before have ended, and answer
    with MixedDone."""

    step: RunStep | None
    run: RunPass | None


MixedAction = RunMixed | LoadAhead | GiveWay | SendUpdate[PrefillUpdate]
Action = storage.Order | SendUpdate[DecodeUpdate] | MixedAction
