"""What happens to an engine that prefills and decodes."""

from __future__ import annotations

from decode_node.core.events import Loaded, StepDone, StepFailed
from node_runtime.events import EngineEvent, Start
from prefill_node.core.events import PassEnded
from springtide.protocol.starts import DecodeStart, PrefillStart
from springtide.values import value_class


@value_class(frozen=True, slots=True)
class MixedDone:
    """The first of those that are in flight has ended: what came of its step and of its pass, as far as it had them."""

    step: StepDone | StepFailed | None
    ran: PassEnded | None


MixedEvent = MixedDone | Loaded | Start[PrefillStart]
Event = EngineEvent[DecodeStart] | MixedEvent
"""Sessions of gateways that order prompts and of those that order outputs have numbers apart; 0 is nobody's."""
