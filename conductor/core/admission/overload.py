"""Looks ahead for admission: what a placed request would find, and how far it may go."""

from __future__ import annotations

from conductor.core.admission.demand import Demand
from conductor.core.admission.request_size import RequestSizes
from conductor.core.settings import ConductorSettings
from conductor.core.state import ClusterState
from conductor.core.types.decision import Alternatives, Placement
from conductor.core.types.outlook import Foresight, LimitedBy, Outlook
from springtide.protocol.scheduling import Schedule


class Overload:
    def __init__(self, settings: ConductorSettings, state: ClusterState, foresight: Foresight) -> None:
        self._state = state
        self._foresight = foresight
        self._demand = Demand(settings.tenant_weights, settings.overload_headroom)
        self._sizes = RequestSizes() if settings.overload_short_first and foresight is not Foresight.NONE else None

    def outlook(self, request: Schedule, alternatives: Alternatives, placement: Placement, now: float) -> Outlook:
        """The request counts as demand by this."""
        output_tokens = self._state.output_tokens(request)
        limit = self._demand.ask(request.tenant, request.terms.priority, _work_ms(placement, output_tokens), now)
        own_tbt_ms, judged_ms, idle_ms = self._look(request, placement, output_tokens, now)
        share = 1.0
        if self._sizes is not None:
            token_steps = output_tokens * (request.num_tokens + output_tokens / 2)
            share = self._sizes.ask(request.terms.priority, token_steps, _decode_load(alternatives, placement, judged_ms, idle_ms), now)
        return Outlook(
            prefill_limit=limit,
            decode_limit=limit.tightened(share, LimitedBy.SIZE),
            output_tokens=output_tokens,
            own_tbt_ms=own_tbt_ms,
            tbt_ms=judged_ms,
            idle_tbt_ms=idle_ms,
        )

    def admitted(self, request: Schedule, placement: Placement, outlook: Outlook, now: float) -> None:
        self._demand.admit(request.tenant, _work_ms(placement, outlook.output_tokens), now)

    def _look(self, request: Schedule, placement: Placement, output_tokens: float, now: float) -> tuple[float, float, float]:
        """`own_tbt_ms`, `tbt_ms` and `idle_tbt_ms` of the outlook."""
        forecast, decode_id, num_tokens = self._state.forecast, placement.decode.instance_id, request.num_tokens
        prefill_end = now + placement.ttft_ms / 1000.0
        # Everything promised to the node at once is the most it can come to.
        own_ms = placement.decode.tbt_ms
        judged_ms = idle_ms = 0.0
        match self._foresight:
            case Foresight.ARRIVAL:
                pool = forecast.outlook(forecast.pool(now, now, joining=False), decode_id, num_tokens)
                judged_ms, idle_ms = pool.mean_ms, pool.idle_mean_ms
            case Foresight.PREFILL_END:
                pool = forecast.outlook(forecast.pool(now, prefill_end, joining=True), decode_id, num_tokens)
                own_ms, judged_ms, idle_ms = min(own_ms, pool.expected_ms), pool.mean_ms, pool.idle_mean_ms
            case Foresight.REQUEST:
                node = forecast.instance(decode_id, num_tokens, now, prefill_end, prefill_end + output_tokens * own_ms / 1000.0)
                own_ms, judged_ms = min(own_ms, node.first_ms), node.worst_ms
                idle_ms = forecast.idle_tbt_ms(decode_id, num_tokens)
        return own_ms, judged_ms, idle_ms


def _work_ms(placement: Placement, output_tokens: float) -> float:
    """Instance time that the request takes: its prefill, and its part of its batch's steps."""
    return placement.prefill.prefill_ms + output_tokens * placement.decode.tbt_ms / max(placement.decode.batch, 1)


def _decode_load(alternatives: Alternatives, placement: Placement, judged_ms: float, idle_ms: float) -> float:
    """Which part of the headroom is in use, of the time between tokens or of the slots, whichever is scarcer; at most 1."""
    decode = placement.decode
    slots = 1.0 - max(decode.slots_free, 0) / max(decode.slots_total, 1)
    slack_ms = alternatives.tbt_slo_ms - idle_ms
    return min(max((judged_ms - idle_ms) / slack_ms if slack_ms > 0 else 1.0, slots), 1.0)
