"""The way into the core and out of it again: events in, records of what comes out."""

from __future__ import annotations

import asyncio
import json
import logging

from conductor import metrics
from conductor.core.conductor import ConductorCore
from conductor.core.history import History
from conductor.core.recording import Recorder
from conductor.core.types.events import (
    Action,
    Decided,
    Event,
    Forgot,
    HungChanged,
    MoveAttempts,
    PrefillFinished,
    RequestSnapshot,
    Scored,
    StoreDown,
)
from conductor.server.turns import Turns
from springtide.clock import Clock
from springtide.ids import AttemptId, GatewayId
from springtide.protocol.attempts import Progress
from springtide.protocol.scheduling import GatewayOrders, Schedule

logger = logging.getLogger(__name__)
predictions = logging.getLogger("conductor.predictions")
"""One line an attempt that ended well, at debug level: of each quantity, what was predicted and what came."""


_MOST_MOVES_KEPT = 64
"""For a gateway that does not ask for them: the latest."""


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
        self._moves: dict[GatewayId, list[AttemptId]] = {}
        """That gateways are still to be told of."""
        self._orders_changed = asyncio.Event()

    @property
    def orders_changed(self) -> asyncio.Event:
        """Set when there next is something that a gateway is to be told."""
        return self._orders_changed

    def gateway_orders(self, gateway_id: GatewayId) -> GatewayOrders:
        """What it is to be told now; of each move once."""
        return GatewayOrders(self.core.hung, tuple(self._moves.pop(gateway_id, ())))

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
                    if not event.successor_of:
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
                    self._tell_gateways()
                case MoveAttempts(gateway_id, attempt_ids):
                    logger.info("had better go on elsewhere: %s", ", ".join(attempt_ids))
                    moves = self._moves.setdefault(gateway_id, [])
                    moves += attempt_ids
                    del moves[:-_MOST_MOVES_KEPT]
                    self._tell_gateways()
                case Forgot(attempt_ids):
                    logger.warning("their gateway is silent: %d attempts forgotten: %s", len(attempt_ids), ", ".join(attempt_ids))
        return actions

    def _tell_gateways(self) -> None:
        self._orders_changed.set()
        self._orders_changed = asyncio.Event()
