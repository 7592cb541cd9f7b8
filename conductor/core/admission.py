"""Whether a request that could be placed should be (arXiv 2407.00079, section 7: early rejection).

A prefill whose request then misses its objective is work thrown away, so what is predicted to miss is refused before it starts.
"""

from __future__ import annotations

from typing import Protocol

from conductor.core.decision import Alternatives, DecodeEstimate, Placement, Reason, Rejection

LEAST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0


class Admission(Protocol):
    def refuse(self, alternatives: Alternatives, placement: Placement) -> Rejection | None:
        """Why the request should not be served as placed; None to admit it. Not asked about requests that were accepted before."""
        ...


class Baseline:
    """Admits whatever fits at all, and lets it wait."""

    def refuse(self, alternatives: Alternatives, placement: Placement) -> Rejection | None:
        return None


class EarlyRejection:
    """Refuses what is predicted to miss an objective, or to find no slots at its decode node. Retry-After is when, by the same prediction,
    enough will have drained."""

    def refuse(self, alternatives: Alternatives, placement: Placement) -> Rejection | None:
        prefill, decode = placement.prefill, placement.decode
        if prefill.ttft_ms > alternatives.ttft_slo_ms:
            return Rejection(
                Reason.TTFT,
                f"the first token would take {prefill.ttft_ms:.0f} ms, more than the objective of {alternatives.ttft_slo_ms:.0f} ms",
                _bounded((prefill.ttft_ms - alternatives.ttft_slo_ms) / 1000.0),
            )
        if decode.slots_free < alternatives.num_blocks:
            missing = alternatives.num_blocks - decode.slots_free
            return Rejection(
                Reason.NO_SLOTS,
                f"no decode node has {alternatives.num_blocks} free KV slots; the best one has {max(decode.slots_free, 0)}",
                _bounded(_drain_s(decode, alternatives.mean_output_tokens, missing / max(decode.slots_total, 1))),
            )
        if decode.tbt_ms > alternatives.tbt_slo_ms:
            return Rejection(
                Reason.TBT,
                f"tokens would come every {decode.tbt_ms:.0f} ms, slower than the objective of {alternatives.tbt_slo_ms:.0f} ms",
                _bounded(_drain_s(decode, alternatives.mean_output_tokens, 1.0 - alternatives.tbt_slo_ms / decode.tbt_ms)),
            )
        return None


ADMISSIONS: dict[str, Admission] = {"baseline": Baseline(), "early-rejection": EarlyRejection()}


def _drain_s(decode: DecodeEstimate, mean_output_tokens: float, share: float) -> float:
    """When `share` of the decode node's load will be gone: in steady state all of it is replaced in the time of one mean output."""
    return share * mean_output_tokens * decode.tbt_ms / 1000.0


def _bounded(seconds: float) -> float:
    return min(max(seconds, LEAST_RETRY_S), LONGEST_RETRY_S)
