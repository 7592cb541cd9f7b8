"""Looks ahead for admission: what a placed request would find, and how far it may go."""

from __future__ import annotations

from conductor.core.decision import Alternatives, Placement
from conductor.core.demand import Demand, Limit
from conductor.core.events import Schedule
from conductor.core.outlook import Foresight, Outlook
from conductor.core.settings import ConductorSettings
from conductor.core.state import ClusterState


class Overload:
    def __init__(self, settings: ConductorSettings, state: ClusterState, foresight: Foresight) -> None:
        self._state = state
        self._foresight = foresight
        self._demand = Demand(settings.tenant_weights, settings.overload_headroom)

    def outlook(self, request: Schedule, alternatives: Alternatives, placement: Placement, now: float) -> Outlook:
        """The request counts as demand by this."""
        output_tokens = self._state.lengths.predict(request.tenant, request.max_new_tokens or float("inf"))
        limit = self._demand.ask(request.tenant, request.priority, _work_ms(placement, output_tokens), now)
        return self._looked(request, placement, limit, output_tokens, now)

    def admitted(self, request: Schedule, placement: Placement, outlook: Outlook, now: float) -> None:
        self._demand.admit(request.tenant, _work_ms(placement, outlook.output_tokens), now)

    def _looked(self, request: Schedule, placement: Placement, limit: Limit, output_tokens: float, now: float) -> Outlook:
        forecast, decode_id, num_tokens = self._state.forecast, placement.decode.instance_id, request.num_tokens
        prefill_end = now + placement.prefill.ttft_ms / 1000.0
        # Everything promised to the node at once is the most it can come to.
        own_ms = placement.decode.tbt_ms
        judged_ms = idle_ms = 0.0
        match self._foresight:
            case Foresight.ARRIVAL:
                judged_ms = forecast.mean_tbt_ms(forecast.pool(now, now, joining=False), decode_id, num_tokens)
                idle_ms = forecast.mean_idle_tbt_ms(decode_id, num_tokens)
            case Foresight.PREFILL_END:
                batches = forecast.pool(now, prefill_end, joining=True)
                own_ms = min(own_ms, forecast.expected_tbt_ms(batches, decode_id, num_tokens))
                judged_ms = forecast.mean_tbt_ms(batches, decode_id, num_tokens)
                idle_ms = forecast.mean_idle_tbt_ms(decode_id, num_tokens)
            case Foresight.REQUEST:
                node = forecast.instance(decode_id, num_tokens, now, prefill_end, prefill_end + output_tokens * own_ms / 1000.0)
                own_ms, judged_ms = min(own_ms, node.first_ms), node.worst_ms
                idle_ms = forecast.idle_tbt_ms(decode_id, num_tokens)
        return Outlook(limit, output_tokens, own_ms, judged_ms, idle_ms, request.deadline_ms)


def _work_ms(placement: Placement, output_tokens: float) -> float:
    """Instance time that the request takes: its prefill, and its part of its batch's steps."""
    return placement.prefill.prefill_ms + output_tokens * placement.decode.tbt_ms / max(placement.decode.batch, 1)
