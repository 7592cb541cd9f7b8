"""Whether a request that could be placed should be (arXiv 2407.00079, section 7: early rejection).

A prefill whose request then misses its objective is work thrown away, so what is predicted to miss is refused before it starts. All rules
judge alike, each by the load it looks at; under load, who has less of a claim is refused earlier (limits.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conductor.core.admission.limits import DemandLimits, SizeLimits
from conductor.core.settings import ConductorSettings
from conductor.core.state import ClusterState
from conductor.core.types.decision import Alternatives, Foresight, Limit, LimitedBy, Outlook, Placement
from springtide.choices import AdmissionName
from springtide.protocol.scheduling import Reason, Rejection, Schedule

LEAST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0

_OBJECTIVES = Limit(1.0, LimitedBy.OBJECTIVES)
_REASONS = {LimitedBy.PRIORITY: Reason.PRIORITY, LimitedBy.TENANT: Reason.TENANT_SHARE, LimitedBy.SIZE: Reason.SIZE}
_BECAUSE = {
    LimitedBy.OBJECTIVES: "",
    LimitedBy.PRIORITY: "; requests of higher priority go before",
    LimitedBy.TENANT: "; other tenants have had less than their share",
    LimitedBy.SIZE: "; several smaller requests are served in the place of one that takes so much",
}


# ---- what is looked at ----


class Lookahead:
    """Looks ahead for one placed request: what it would find there, by the load that its rule looks at, and how far it may go."""

    def __init__(self, settings: ConductorSettings, state: ClusterState, foresight: Foresight) -> None:
        self._state = state
        self._foresight = foresight
        self._demand = DemandLimits(settings.tenant_weights, settings.overload_headroom)
        self._sizes = SizeLimits() if settings.overload_short_first and foresight is not Foresight.NONE else None

    def outlook(self, request: Schedule, alternatives: Alternatives, placement: Placement, output_tokens: float, now: float) -> Outlook:
        """Of a request whose output is predicted to have so many tokens. It counts as demand by this."""
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
        """The request was not refused: what it asked for is granted."""
        self._demand.tenants.admit(request.tenant, _work_ms(placement, outlook.output_tokens), now)

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
    free, slack_ms = placement.decode.slots_free, alternatives.tbt_slo_ms - idle_ms
    slots = 1.0 - free / placement.decode.slots_total if free > 0 else 1.0
    return min(max((judged_ms - idle_ms) / slack_ms if slack_ms > 0 else 1.0, slots), 1.0)


# ---- what is refused ----


@dataclass(frozen=True, slots=True)
class Admission:
    """Refuses what is predicted to miss an objective, be it for the wait for room at its decode node. Retry-After is when, by the same
    prediction, enough will have drained."""

    foresight: Foresight

    def refuse(self, alternatives: Alternatives, placement: Placement, outlook: Outlook) -> Rejection | None:
        """Why the request should not be served as placed; None to admit it. Not asked about requests that were accepted before."""
        too_late = _misses_deadline(alternatives.terms.deadline_ms, placement, outlook)
        if too_late is not None or self.foresight is Foresight.NONE:
            return too_late
        limited = _refuse(alternatives, placement, outlook, outlook.prefill_limit, outlook.decode_limit)
        # Whoever would be refused without a limit too is told so.
        return limited and (_refuse(alternatives, placement, outlook, _OBJECTIVES, _OBJECTIVES) or limited)


ADMISSIONS: Mapping[AdmissionName, Admission] = {
    "baseline": Admission(Foresight.NONE),
    "early-rejection": Admission(Foresight.ARRIVAL),
    "early-rejection-predicted": Admission(Foresight.PREFILL_END),
    "early-rejection-request": Admission(Foresight.REQUEST),
}
"""Admission rules by name, in the order of how far they look ahead (docs/add-a-scheduling-policy.md)."""


def _misses_deadline(deadline_ms: float, placement: Placement, outlook: Outlook) -> Rejection | None:
    """`deadline_ms`: from now; 0 for none."""
    if not deadline_ms:
        return None
    decode_ms = outlook.output_tokens * outlook.own_tbt_ms
    late_ms = placement.ttft_ms + decode_ms - deadline_ms
    if late_ms <= 0:
        return None
    # Only the wait for others gets shorter with time.
    helps = late_ms <= placement.wait_ms
    return Rejection(
        Reason.DEADLINE,
        f"the deadline is in {deadline_ms:.0f} ms; the first token would take {placement.ttft_ms:.0f} ms and the rest of some "
        f"{outlook.output_tokens:.0f} tokens {decode_ms:.0f} ms",
        _bounded(late_ms / 1000.0) if helps else 0.0,
    )


def _refuse(
    alternatives: Alternatives, placement: Placement, outlook: Outlook, prefill_limit: Limit, decode_limit: Limit
) -> Rejection | None:
    """The limits are of the slack: what the objective leaves beyond what the request would take with nobody else there. So an idle
    cluster refuses nobody for being limited."""
    decode = placement.decode
    slack_ms = alternatives.ttft_slo_ms - placement.own_ms
    if slack_ms <= 0:
        return Rejection(
            Reason.TTFT,
            f"the first token takes {placement.own_ms:.0f} ms with nobody else there, "
            f"more than the objective of {alternatives.ttft_slo_ms:.0f} ms",
        )
    queue_ms, room_ms = placement.prefill.queue_ms, decode.wait_ms
    for wait_ms, limit in ((queue_ms, prefill_limit), (room_ms, decode_limit)):
        most_wait_ms = limit.share * slack_ms
        if wait_ms > most_wait_ms:
            return _rejection(
                limit,
                Reason.TTFT,
                f"the first token would take {placement.ttft_ms:.0f} ms, more than the objective of {alternatives.ttft_slo_ms:.0f} ms",
                f"the wait for a first token would be {wait_ms:.0f} ms, more than {most_wait_ms:.0f} ms",
                (wait_ms - most_wait_ms) / 1000.0,
            )
    slots = decode_limit.share * (decode.slots_total - alternatives.num_blocks)
    used = decode.slots_total - decode.slots_free
    if decode_limit.by in (LimitedBy.PRIORITY, LimitedBy.TENANT) and used > slots:
        # Room that is kept for others is none.
        return _rejection(
            decode_limit,
            Reason.TTFT,
            "",
            f"the best decode node has {max(decode.slots_free, 0)} free KV slots; {decode.slots_total - slots:.0f} would be wanted",
            alternatives.drain_ms((used - slots) / max(decode.slots_total, 1), decode.tbt_ms) / 1000.0,
        )
    # A node that keeps to the objective even with everything promised to it is no reason to refuse, whatever the others do.
    tbt_ms = min(outlook.tbt_ms, decode.tbt_ms)
    idle_ms = min(outlook.idle_tbt_ms, tbt_ms)
    if idle_ms > alternatives.tbt_slo_ms:
        return Rejection(
            Reason.TBT,
            f"tokens come every {idle_ms:.0f} ms with nobody else there, slower than the objective of {alternatives.tbt_slo_ms:.0f} ms",
        )
    # Written so that a limit of 1 is the objective to the last digit.
    most_ms = alternatives.tbt_slo_ms - (1.0 - decode_limit.share) * (alternatives.tbt_slo_ms - idle_ms)
    if tbt_ms > most_ms:
        return _rejection(
            decode_limit,
            Reason.TBT,
            f"tokens would come every {tbt_ms:.0f} ms, slower than the objective of {alternatives.tbt_slo_ms:.0f} ms",
            f"tokens would come every {tbt_ms:.0f} ms, slower than {most_ms:.0f} ms",
            alternatives.drain_ms(1.0 - most_ms / tbt_ms, tbt_ms) / 1000.0,
        )
    return None


def _rejection(limit: Limit, reason: Reason, plain: str, limited: str, retry_s: float) -> Rejection:
    if limit.by is LimitedBy.OBJECTIVES:
        return Rejection(reason, plain, _bounded(retry_s))
    return Rejection(_REASONS[limit.by], limited + _BECAUSE[limit.by], _bounded(retry_s))


def _bounded(seconds: float) -> float:
    return min(max(seconds, LEAST_RETRY_S), LONGEST_RETRY_S)
