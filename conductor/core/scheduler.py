"""KVCache-centric scheduling: Algorithm 1 of the Mooncake paper (arXiv 2407.00079, section 6).

Two steps. `Scheduler.estimate` says what the request may expect of every instance; `decide` picks from that alone, so a decision can be
replayed from its log line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nsmallest
from typing import TypeVar

from conductor.core.admission import ADMISSIONS
from conductor.core.decision import Alternatives, Branch, DecodeEstimate, Outcome, Placement, PrefillEstimate, Reason, Rejection
from conductor.core.events import Role, Schedule
from conductor.core.policy import POLICIES
from conductor.core.prefix_index import PrefixIndex, best_match
from conductor.core.settings import ConductorSettings
from conductor.core.state import ClusterState, Instance
from conductor.core.transfer import TransferModel
from springtide.blocks import blocks_for
from springtide.ids import NodeId

_MOST_HOLDERS = 5
_Estimate = TypeVar("_Estimate", PrefillEstimate, DecodeEstimate)


class Scheduler:
    """Estimates, from what the index, the state and the transfer model know at the moment."""

    def __init__(self, settings: ConductorSettings, index: PrefixIndex, state: ClusterState, transfers: TransferModel) -> None:
        self._settings = settings
        self._index = index
        self._state = state
        self._transfers = transfers
        self._policy = POLICIES[settings.policy]

    def estimate(self, request: Schedule, turn: int, now: float) -> Alternatives:
        settings = self._settings
        matches = self._index.match(request.block_keys)
        return Alternatives(
            attempt_id=request.attempt_id,
            policy=settings.policy,
            admission=settings.admission,
            turn=turn,
            num_blocks=blocks_for(request.num_tokens + 1, settings.block_tokens),
            accepted=request.accepted,
            avoid=tuple(sorted(request.avoid)),
            ttft_slo_ms=request.ttft_slo_ms or settings.ttft_slo_ms,
            tbt_slo_ms=request.tbt_slo_ms or settings.tbt_slo_ms,
            mean_output_tokens=self._state.mean_output_tokens,
            rejoin_s=settings.rejoin_s,
            prefills=self._prefills(request, matches, now),
            decodes=self._decodes(request, matches),
            holders=self._holders(matches),
        )

    def _holders(self, matches: Mapping[NodeId, int]) -> tuple[tuple[NodeId, int], ...]:
        best = nsmallest(_MOST_HOLDERS, matches, key=lambda node_id: (-matches[node_id], self._transfers.congestion(node_id), node_id))
        return tuple((node_id, matches[node_id]) for node_id in best)

    def ready(self, instance: Instance) -> bool:
        """Its load is known, with what it takes to predict, and so is what its store holds."""
        cost = instance.load.prefill_cost if instance.ref.role is Role.PREFILL else instance.load.decode_cost
        return instance.up and cost is not None and instance.load.slots_total > 0 and self._index.knows(instance.ref.node_id)

    def _prefills(self, request: Schedule, matches: Mapping[NodeId, int], now: float) -> tuple[PrefillEstimate, ...]:
        # The last token is always computed: its logits are what the first output token is drawn from.
        most_reused = (request.num_tokens - 1) // self._settings.block_tokens
        at_once = self._index.match_in_dram(request.block_keys) if self._index.has_ssd else matches
        best, holders = best_match(matches, most_reused)
        source = min(holders, key=self._transfers.congestion) if holders and self._policy.fetches else None
        return tuple(
            self._prefill(request, instance, *self._local(request, instance, matches, at_once, most_reused), best, source, now)
            for instance in self._state.of_role(Role.PREFILL)
            if self.ready(instance)
        )

    def _local(
        self, request: Schedule, instance: Instance, matches: Mapping[NodeId, int], at_once: Mapping[NodeId, int], most: int
    ) -> tuple[int, float]:
        """Blocks that the instance's own store will give, and how long it reads: from its SSD, where that is sooner than computing."""
        held, in_dram = (min(found.get(instance.ref.node_id, 0), most) for found in (matches, at_once))
        read_ms = (held - in_dram) * instance.load.ssd_read_us_per_block / 1000
        if read_ms and read_ms + self._compute_ms(request, instance, held) >= self._compute_ms(request, instance, in_dram):
            return in_dram, 0.0
        return held, read_ms

    def _prefill(
        self, request: Schedule, instance: Instance, local: int, read_ms: float, best: int, source: NodeId | None, now: float
    ) -> PrefillEstimate:
        """Lines 4 to 20 of Algorithm 1 for one instance. The paper always fetches there; here, what is computed sooner is computed."""
        queue_ms = instance.queue_ms(now)
        transfer_ms, compute_ms = read_ms, self._compute_ms(request, instance, local)
        fetched: NodeId | None = None
        branch: Branch = "cache-aware"
        if source not in (None, instance.ref.node_id) and best > local and best >= self._settings.kvcache_balancing_threshold * local:
            num_bytes = (best - local) * self._settings.bytes_per_block
            fetch_ms = self._transfers.predict_ms(source, instance.ref.node_id, num_bytes)
            rest_ms = self._compute_ms(request, instance, best)
            branch = "recompute"
            if fetch_ms + rest_ms < compute_ms:
                branch, fetched, transfer_ms, compute_ms = "fetch", source, read_ms + fetch_ms, rest_ms
        return PrefillEstimate(
            instance.ref.instance_id,
            local,
            fetched,
            best if fetched else 0,
            queue_ms,
            transfer_ms,
            compute_ms,
            instance.load.slots_total,
            branch,
        )

    def _compute_ms(self, request: Schedule, instance: Instance, prefix_blocks: int) -> float:
        assert instance.load.prefill_cost is not None
        cached = prefix_blocks * self._settings.block_tokens
        return self._state.prefill_ms(instance.load.prefill_cost, request.num_tokens - cached, cached)

    def _decodes(self, request: Schedule, matches: Mapping[NodeId, int]) -> tuple[DecodeEstimate, ...]:
        estimates = []
        for instance in self._state.of_role(Role.DECODE):
            if self.ready(instance):
                tbt_ms, batch = instance.tbt_ms(request.num_tokens)
                prefix = matches.get(instance.ref.node_id, 0)
                free, total = instance.slots_free(), instance.load.slots_total
                estimates.append(DecodeEstimate(instance.ref.instance_id, prefix, tbt_ms, batch, free, total))
        return tuple(estimates)


def decide(alternatives: Alternatives) -> Outcome:
    """Where the request runs, or why it does not. Lines 21 to 27 of Algorithm 1."""
    if not alternatives.prefills:
        return Rejection(Reason.NO_PREFILL, "no prefill instance is ready", alternatives.rejoin_s)
    if not alternatives.decodes:
        return Rejection(Reason.NO_DECODE, "no decode node is ready", alternatives.rejoin_s)
    need = alternatives.num_blocks
    prefills = [estimate for estimate in alternatives.prefills if estimate.slots_total >= need]
    decodes = [estimate for estimate in alternatives.decodes if estimate.slots_total >= need]
    if not prefills or not decodes:
        role, present = ("decode", alternatives.decodes) if prefills else ("prefill", alternatives.prefills)
        largest = max(estimate.slots_total for estimate in present)
        return Rejection(Reason.TOO_LARGE, f"the prompt needs {need} KV slots; the largest {role} node has {largest}")
    policy = POLICIES[alternatives.policy]
    roomy = [estimate for estimate in decodes if estimate.slots_free >= need]
    placement = Placement(
        policy.prefill(_avoid(prefills, alternatives), alternatives.turn),
        policy.decode(_avoid(roomy, alternatives), alternatives.turn) if roomy else max(decodes, key=lambda e: e.slots_free),
    )
    if alternatives.accepted:
        return placement
    return ADMISSIONS[alternatives.admission].refuse(alternatives, placement) or placement


def _avoid(estimates: Sequence[_Estimate], alternatives: Alternatives) -> Sequence[_Estimate]:
    """Without the instances that just failed this request, unless there is no other."""
    return [estimate for estimate in estimates if estimate.instance_id not in alternatives.avoid] or estimates
