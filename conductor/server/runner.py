"""The way into the core and out of it again: events in, records of what comes out."""

from __future__ import annotations

import asyncio
import json
import logging

from conductor import metrics
from conductor.core.conductor import ConductorCore
from conductor.core.history import History
from conductor.core.recording import Recorder
from conductor.core.types.events import Action, Decided, Event, Forgot, HungChanged, PrefillFinished, RequestSnapshot, Scored, StoreDown
from conductor.server.turns import Turns
from springtide.clock import Clock
from springtide.protocol.attempts import Progress
from springtide.protocol.scheduling import Schedule

logger = logging.getLogger(__name__)
predictions = logging.getLogger("conductor.predictions")
"""One line an attempt that ended well, at debug level: of each quantity, what was predicted and what came."""


class CoreRunner:
    """The one place where events enter the core and its actions are done. Used from the event loop only."""

    def __init__(self, core: ConductorCore, clock: Clock, recorder: Recorder | None = None) -> None:
        self.core = core
        self.clock = clock
        self.history = History(core.settings.ttft_slo_ms, clock.now())
        """What people are shown of what has been."""
        self.turns = Turns()
        """For what looks at much of the core, or tells it much, and can wait."""
        self._recorder = recorder
        self._hung_changes = asyncio.Event()

    @property
    def hung_changes(self) -> asyncio.Event:
        """Set when the core next says that other instances hang than before."""
        return self._hung_changes

    def feed(self, event: Event) -> list[Action]:
        """Hands the event to the core, keeps its records, and returns the actions, of which the caller does those that are its own."""
        now = self.clock.now()
        if self._recorder is not None:
            self._recorder.event(event, now)
        advanced = self.core.state.attempts.get(event.attempt_id) if isinstance(event, Progress) else None
        actions = self.core.handle(event, now)
        if isinstance(event, Progress):
            self.history.advanced(event, advanced, now)
        if isinstance(event, StoreDown):
            metrics.forget_node(event.node_id)
        for action in actions:
            match action:
                case Decided():
                    assert isinstance(event, Schedule)
                    self.history.decided(event, action, now)
                case RequestSnapshot(node_id):
                    metrics.SNAPSHOTS_REQUESTED.labels(node_id).inc()
                case PrefillFinished():
                    metrics.observe_prefill(action)
                case Scored():
                    metrics.observe_scores(action)
                    if predictions.isEnabledFor(logging.DEBUG):
                        ids = {"request_id": action.request_id, "attempt_id": action.attempt_id}
                        pairs = {score.quantity.value: (score.predicted, score.actual) for score in action.scores}
                        predictions.debug("%s", json.dumps(pairs), extra=ids)
                case HungChanged(instances):
                    metrics.HUNG.set(len(instances))
                    names = ", ".join(instance.instance_id for instance in instances)
                    logger.warning("work goes on elsewhere that is at instances which hang: %s", names or "at none any more")
                    self._hung_changes.set()
                    self._hung_changes = asyncio.Event()
                case Forgot(attempt_ids):
                    logger.warning("their gateway is silent: %d attempts forgotten: %s", len(attempt_ids), ", ".join(attempt_ids))
        return actions
