"""KVCache-centric scheduling: Algorithm 1 of the Mooncake paper (arXiv 2407.00079, section 6).

Two steps. `Scheduler.estimate` says what the request may expect of every instance; `decide` picks from that alone, so a decision can be
replayed from its log line. Both work on whole columns, a row an instance: at a thousand instances it is the number of operations that
costs, hardly the number of instances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from conductor import _native
from conductor.core.admission.rules import ADMISSIONS
from conductor.core.placement.instance_columns import DecodeColumns, DecodeInstances, PrefillColumns
from conductor.core.placement.policy import POLICIES
from conductor.core.placement.transfer import PlannedFetch, TransferModel
from conductor.core.prefix_index import Matches, PrefixIndex
from conductor.core.settings import ConductorSettings
from conductor.core.state import ClusterState, Instance
from conductor.core.types.arrays import Ints
from conductor.core.types.decision import Alternatives, Decision, MoveReason, Placement
from conductor.core.types.estimates import (
    AWAIT,
    FETCH,
    Asked,
    DecodeEstimate,
    DecodeEstimates,
    InlineEstimate,
    OthersEstimates,
    PrefillEstimate,
    PrefillEstimates,
)
from springtide.blocks import blocks_for
from springtide.cost import most_with_idle_ms
from springtide.ids import InstanceId, NodeId
from springtide.protocol.instances import Role
from springtide.protocol.scheduling import MOST_LACKING_BLOCKS, Reason, Rejection, Schedule

_MOST_HOLDERS = 5
_NEAR_EMPTY = 0.02
"""Of the objective for the first token, the wait in a prefill queue behind which requests in idle capacity still go."""
_SLOTS_LEFT = 1 / 8
"""Of a decode node's slots, what requests in idle capacity leave: whoever comes need not wait until they have given theirs back."""
_IDLE_AGAIN_S = 0.1
"""When such a request may look again for what it did not find: a moment is all that there may be."""
_MOST_INLINE_NODES = 8
"""Decode nodes that could compute the prompt themselves: a decision looks at those whose first token would come soonest."""
_ASKED_FOR_UP_TO = 0.6
"""Of the time that outputs leave for prompts: where these ask for more, outputs are concentrated on fewer of the instances that do both.
These leave less to prompts then, and the others all of their time."""
_CONCENTRATED_UP_TO = 0.6
"""Of the objective for the time between tokens, what the steps of such an instance may take, ..."""
_FULL_UP_TO = 0.9
"""... and where prompts ask for more than that leaves. The rest is for what contexts grow by."""
_GATHERED_UP_TO = 1.2
"""Of the shortest step that there is, what the steps of an instance may take where outputs are gathered though there is no need to: a few
more in a batch cost them hardly anything, and an instance without any computes prompts as fast as it can. Where outputs are promised, but
none runs yet, a pass is not held to the objective, and the first of them would wait for its end: that takes a need."""
SETTLED = 0.8
"""Of the objective for the time between tokens, what the steps of a node may take to which a request moves because its own node's take
longer than that."""
ROOM_LEFT = 1 / 4
"""Of a node's slots, what one has left to which a request may move for want of room; half of that, once it is there."""
_STEPS_AHEAD = 1.5
"""That are in flight where others run: the rest of one, and the one that is launched behind it."""


class Scheduler:
    """Estimates, from what the index, the state and the transfer model know at the moment."""

    def __init__(self, settings: ConductorSettings, index: PrefixIndex, state: ClusterState, transfers: TransferModel) -> None:
        self._settings = settings
        self._index = index
        self._state = state
        self._transfers = transfers
        self._policy = POLICIES[settings.policy]
        self._prefill = PrefillColumns()
        self._decode = DecodeColumns()
        self._twin: Ints = np.zeros(0, np.int64)
        """[prefill instances] as of PrefillEstimates."""
        self.has_both = False
        """Whether there are instances that do both."""
        self._node_of_bit: Ints = np.zeros(0, np.int64)
        """Number, in the transfer model, of the node whose live view a bit of the index is."""
        self._index_version = -1

    def estimate(
        self, request: Schedule, output_tokens: float, turn: int, prefill_work: float, now: float, moves: MoveReason | None = None
    ) -> Alternatives:
        """Of a request whose output is predicted to have so many tokens; `turn`: decisions made before this one. `prefill_work`: instances
        that the prompts of late keep busy. `moves`: as of Alternatives."""
        self._follow_state()
        settings = self._settings
        matches = self._index.match(request.reusable_keys)
        holders = self._holders(matches)
        decodes = self._decodes(request, matches)
        prefills = self._prefills(request, matches, holders, now, fetches=self._policy.fetches or moves is not None)
        others = self._count_idle(request, prefills, decodes) if request.terms.idle else None
        return Alternatives(
            attempt_id=request.attempt_id,
            policy=settings.policy,
            admission=settings.admission,
            turn=turn,
            num_blocks=blocks_for(request.num_tokens + 1, settings.block_tokens),
            expected_blocks=blocks_for(request.num_tokens + max(1, round(output_tokens) - 1), settings.block_tokens),
            # The last token of the output is never fed back.
            most_blocks=blocks_for(request.num_tokens + max(1, request.max_new_tokens - 1), settings.block_tokens),
            accepted=request.accepted,
            terms=request.terms,
            avoid=self._avoided(request.avoid) if request.avoid else (),
            ttft_slo_ms=request.ttft_slo_ms or settings.ttft_slo_ms,
            tbt_slo_ms=request.tbt_slo_ms or settings.tbt_slo_ms,
            mean_output_tokens=self._state.mean_output_tokens,
            rejoin_s=settings.rejoin_s,
            prefills=prefills,
            decodes=decodes,
            holders=holders,
            inlines=self._inlines(request, matches, decodes) if others is None and moves is None else (),
            concentrated_up_to=self._concentrated_up_to(request, prefills, decodes, prefill_work),
            others=others,
            moves=moves,
            idle_slowdown=settings.idle_slowdown if others is not None else 0.0,
        )

    def ready(self, instance: Instance) -> bool:
        """Whether its load is known, with what it takes to predict, and so is what its store holds."""
        columns = self._prefill if instance.ref.role is Role.PREFILL else self._decode
        return columns.ready(instance) and self._index.knows(instance.ref.node_id)

    def ready_prefills(self) -> PrefillColumns:
        """The prefill instances that are ready, as they are now."""
        self._follow_state()
        return self._prefill

    def ready_decodes(self) -> DecodeColumns:
        """The decode instances that are."""
        self._follow_state()
        return self._decode

    def num_ready(self, role: Role) -> int:
        """How many instances of the role are."""
        self._follow_state()
        return len((self._prefill if role is Role.PREFILL else self._decode).instance_ids)

    @property
    def is_split(self) -> bool:
        """Whether no node has both roles, so that there is a division of the instances to speak of."""
        self._follow_state()
        return set(self._prefill.node_ids).isdisjoint(self._decode.node_ids)

    @property
    def fetch_threshold(self) -> float:
        """`kvcache_balancing_threshold` at the moment."""
        configured = self._settings.kvcache_balancing_threshold
        return self._transfers.threshold.value if configured == "auto" else configured

    def fetch(self, prefill: PrefillEstimate, source: NodeId, destination: NodeId, moves: bool) -> PlannedFetch:
        """What a placement with a source means for the link. `moves`: of a request that runs."""
        missing = prefill.source_blocks - prefill.local_blocks
        ratio = prefill.source_blocks / prefill.local_blocks if prefill.local_blocks else math.inf
        saved_ms = None if moves else prefill.saved_ms
        return PlannedFetch(source, destination, ratio, missing * self._settings.bytes_per_block, saved_ms)

    def follow(self, instance_id: InstanceId) -> None:
        """Brings the instance's row up to date, so that a request need not wait for those of all that have changed since the last one."""
        if instance_id in self._state.touched and self._index.version == self._index_version and self._refresh(instance_id):
            self._state.touched.discard(instance_id)

    def _follow_state(self) -> None:
        """Brings the columns up to date with the index and the state."""
        touched, self._state.touched = self._state.touched, set()
        if self._index.version != self._index_version or not all(map(self._refresh, touched)):
            self._index_version = self._index.version
            self._prefill.rebuild(self._state.of_role(Role.PREFILL), self._index, self._transfers)
            self._decode.rebuild(self._state.of_role(Role.DECODE), self._index, self._transfers)
            decode_rows = {node_id: row for row, node_id in enumerate(self._decode.node_ids)}
            self._twin = np.array([decode_rows.get(node_id, -1) for node_id in self._prefill.node_ids], np.int64)
            self.has_both = bool((self._twin >= 0).any())
            self._node_of_bit = np.zeros(self._index.num_bits, np.int64)
            for node_id, bit in self._index.live_nodes():
                self._node_of_bit[bit] = self._transfers.number(node_id)

    def _refresh(self, instance_id: InstanceId) -> bool:
        """False when all columns have to be made anew."""
        instance = self._state.instances.get(instance_id)
        if instance is None:
            return False
        prefills = instance.ref.role is Role.PREFILL
        columns, others = (self._prefill, self._decode) if prefills else (self._decode, self._prefill)
        # It may have changed its role.
        return instance_id not in others and columns.refresh(instance, self._index.knows(instance.ref.node_id))

    # ---- holders ----

    def _holders(self, matches: Matches) -> tuple[tuple[NodeId, int], ...]:
        chosen: list[tuple[NodeId, int]] = []
        for num_blocks, holders in matches.ends:
            chosen += [(node_id, num_blocks) for node_id in self._least_busy(matches, holders, _MOST_HOLDERS - len(chosen))]
            if len(chosen) == _MOST_HOLDERS:
                break
        return tuple(chosen)

    def _least_busy(self, matches: Matches, holders: int, count: int) -> list[NodeId]:
        """So many of the holders, those first that fewer transfers leave now."""
        if holders.bit_count() == 1:
            return [matches.node_of_bit[holders.bit_length() - 1]]
        mask = holders.to_bytes((holders.bit_length() + 7) // 8, "little")
        return [matches.node_of_bit[bit] for bit in _native.least_busy(mask, self._node_of_bit, self._transfers.links.view, count)]

    # ---- estimates ----

    def _prefills(
        self, request: Schedule, matches: Matches, holders: tuple[tuple[NodeId, int], ...], now: float, *, fetches: bool
    ) -> PrefillEstimates:
        settings, columns, transfers = self._settings, self._prefill, self._transfers
        # The last token is always computed: its logits are what the first output token is drawn from.
        most_reused = (request.num_tokens - 1) // settings.block_tokens
        best, having_it = matches.longest(most_reused) if fetches else (0, 0)
        source_id = None
        if best:
            # Cut at what can be reused, more than the longest match's holders may have it.
            source_id = holders[0][0] if best == holders[0][1] else self._least_busy(matches, having_it, 1)[0]
        source = transfers.number(source_id) if source_id is not None else -1
        asked = Asked(
            now=now,
            num_tokens=request.num_tokens,
            block_tokens=settings.block_tokens,
            chunk_tokens=settings.chunk_tokens,
            chunk_ms=settings.chunk_ms or 0.0,
            most_reused=most_reused,
            best=best,
            source=source,
            threshold=self.fetch_threshold,
            bytes_per_block=settings.bytes_per_block,
            assumed_bytes_per_s=settings.transfer_bytes_per_s,
        )
        held = matches.blocks_by_bit()
        in_dram = self._index.match_in_dram(request.reusable_keys).blocks_by_bit() if self._index.has_ssd else None
        rates, factors = transfers.rates_from(source), self._state.queue_bias.table if self._policy.foresees_wait else None

        def estimate(held: Ints, in_dram: Ints | None) -> PrefillEstimates:
            estimates = PrefillEstimates.unfilled(columns.instance_ids, source_id, best, self._twin)
            _native.estimate_prefills(columns.instances.view, held, in_dram, transfers.links.view, rates, factors, asked, estimates)
            return estimates

        estimates = estimate(held, in_dram)
        self._count_coming(request, held, in_dram, now, estimate, estimates)
        return estimates

    def _count_coming(
        self,
        request: Schedule,
        held: Ints,
        in_dram: Ints | None,
        now: float,
        estimate: Callable[[Ints, Ints | None], PrefillEstimates],
        estimates: PrefillEstimates,
    ) -> None:
        """Where the prompt's beginning is being computed, it need not be again, but is to be waited for: where that is sooner, `estimates`,
        which are of what is `held`, become those of it."""
        coming = self._state.coming.match(request.reusable_keys) if self._policy.foresees_wait else {}
        rows, blocks, wait_ms = [], [], []
        for instance_id, one in coming.items():
            row = self._prefill.row_of(instance_id)
            if row is not None and one.blocks > estimates.local_blocks[row]:
                rows.append(row)
                blocks.append(one.blocks)
                wait_ms.append(max(0.0, 1000.0 * (one.at - now)))
        if not rows:
            return
        bits, held = self._prefill.instances.bit[rows], held.copy()
        held[bits] = blocks
        if in_dram is not None:
            in_dram = in_dram.copy()
            in_dram[bits] = blocks
        later = estimate(held, in_dram)
        later.queue_ms[rows] = np.maximum(later.queue_ms[rows], wait_ms)
        later.ttft_ms[rows] = later.queue_ms[rows] + later.transfer_ms[rows] + later.prefill_ms[rows]
        sooner = np.array(rows, np.int64)[(later.ttft_ms[rows] < estimates.ttft_ms[rows]) & (later.branch[rows] != FETCH)]
        later.branch[sooner] = AWAIT
        estimates.replace(sooner, later)

    def _decodes(self, request: Schedule, matches: Matches) -> DecodeEstimates:
        columns = self._decode
        estimates = DecodeEstimates.unfilled(columns.instance_ids)
        _native.estimate_decodes(columns.instances.view, matches.blocks_by_bit(), request.num_tokens, estimates)
        return estimates

    def _count_idle(self, request: Schedule, prefills: PrefillEstimates, decodes: DecodeEstimates) -> OthersEstimates:
        """Adds what is in idle capacity to the estimates of a request that is to join it; returns what they were without."""
        instances, idle = self._decode.instances, self._decode.idle
        most = np.where(instances.max_batch > 0, instances.max_batch, np.iinfo(np.int64).max)
        others = OthersEstimates(prefills.queue_ms.copy(), self._decode.step_ms())
        prefills.queue_ms += self._prefill.idle.queue_ms
        prefills.ttft_ms += self._prefill.idle.queue_ms
        decodes.batch += idle.attempts
        decodes.slots_free -= idle.slots
        context = instances.context_tokens + idle.context_tokens + request.num_tokens
        decodes.tbt_ms[:] = (
            instances.fixed_ms + instances.per_sequence_ms * np.minimum(decodes.batch, most) + instances.per_context_token_ms * context
        )
        return others

    def _avoided(self, names: Collection[InstanceId]) -> tuple[InstanceId, ...]:
        """These, and what else their engines are called."""
        nodes = {self._state.instances[name].ref.node_id for name in names if name in self._state.instances}
        others = (one.ref.instance_id for one in self._state.instances.values() if one.ref.node_id in nodes)
        return tuple(sorted({*names, *others}))

    def _concentrated_up_to(self, request: Schedule, prefills: PrefillEstimates, decodes: DecodeEstimates, prefill_work: float) -> float:
        """As of Alternatives, by what the steps of instances that do both leave of their time: were outputs everywhere, and as it is."""
        if not self.has_both:
            return 0.0
        both = prefills.twin[prefills.twin >= 0]
        of_others = len(prefills) - len(both)
        left = np.maximum(1.0 - decodes.tbt_ms[both] / (request.tbt_slo_ms or self._settings.tbt_slo_ms), 0.0)
        if prefill_work <= _ASKED_FOR_UP_TO * (of_others + float(left.sum())):
            return 0.0
        now = np.where(decodes.batch[both] > 1, left, 1.0)
        return _CONCENTRATED_UP_TO if prefill_work <= _ASKED_FOR_UP_TO * (of_others + float(now.sum())) else _FULL_UP_TO

    def _inlines(self, request: Schedule, matches: Matches, decodes: DecodeEstimates) -> Sequence[InlineEstimate]:
        settings, instances = self._settings, self._decode.instances
        if request.whole_prompt or not settings.inline_tokens or not self._policy.fetches or not len(decodes):
            return ()
        if self._index.has_ssd:
            matches = self._index.match_in_dram(request.reusable_keys)
        in_dram = matches.blocks_by_bit()[instances.bit]
        return _inline_estimates(decodes, instances, in_dram, request.num_tokens, settings.block_tokens, settings.inline_tokens)


def _inline_estimates(
    decodes: DecodeEstimates, instances: DecodeInstances, in_dram: Ints, num_tokens: int, block_tokens: int, most_tokens: int
) -> Sequence[InlineEstimate]:
    """Estimates of the decode nodes that lack at most `most_tokens` of the prompt and have a place in their batch, the soonest first.
    `instances` are those that `decodes` was made from, `in_dram` [instances] the blocks of the prompt that each has.

    Such a node computes the prompt in one of its steps. It spares the way over a prefill group: its queue, and the hand-over of what the
    decode node has already. A token of a prompt takes no longer than a sequence more of the same context would, one of which
    `decodes.tbt_ms` has already. A node computes one prompt at a time, in the order in which they came: all of them are waited for.
    """
    reused = np.minimum(in_dram, (num_tokens - 1) // block_tokens)
    new_tokens = num_tokens - reused * block_tokens
    rows = ((new_tokens <= most_tokens) & decodes.place_in_batch()).nonzero()[0]
    if not len(rows):
        return ()
    tbt_ms = decodes.tbt_ms[rows]
    token_ms = instances.per_sequence_ms + instances.per_context_token_ms * num_tokens
    step_ms = tbt_ms + token_ms[rows] * (new_tokens[rows] - 1)
    wait_ms = np.where(decodes.batch[rows] > 1, _STEPS_AHEAD * tbt_ms, 0.0) + instances.inlining_ms[rows]
    soonest = np.argsort(wait_ms + step_ms, kind="stable")[:_MOST_INLINE_NODES].tolist()
    return tuple(
        InlineEstimate(
            row := int(rows[i]), decodes.instance_ids[row], int(reused[row]), int(new_tokens[row]), float(wait_ms[i]), float(step_ms[i])
        )
        for i in soonest
    )


def decide(alternatives: Alternatives) -> Decision:
    """Where the request runs, or why it does not."""
    decision = place(alternatives)
    return admit(alternatives, decision) if isinstance(decision, Placement) else decision


def place(alternatives: Alternatives) -> Decision:
    """Where the request would run, or why it cannot. Lines 21 to 24 of Algorithm 1."""
    prefills, decodes = alternatives.prefills, alternatives.decodes
    if alternatives.moves is not None:
        return _place_move(alternatives, alternatives.moves)
    if not len(prefills):
        return Rejection(Reason.NO_PREFILL, "no prefill instance is ready", alternatives.rejoin_s)
    if not len(decodes):
        return Rejection(Reason.NO_DECODE, "no decode node is ready", alternatives.rejoin_s)
    fit_prefill, fit_decode = (
        _rows_from(prefills.slots_total, alternatives.num_blocks),
        _rows_from(decodes.slots_total, alternatives.most_blocks),
    )
    if not len(fit_prefill) or not len(fit_decode):
        return _too_large(alternatives)
    policy = POLICIES[alternatives.policy]
    if alternatives.others is not None:
        return _place_idle(alternatives, alternatives.others, fit_prefill, fit_decode)
    prefill = policy.prefill(alternatives, _avoid(fit_prefill, prefills, alternatives))
    decode = _decode(alternatives, _avoid(fit_decode, decodes, alternatives), int(prefills.twin[prefill]))
    if decode.wait_ms and policy.stays:
        prefill = _waits_there(alternatives, prefill, decode, fit_prefill)
    inline = _inline(alternatives, max(prefills.ttft_ms[prefill], decode.wait_ms))
    if inline is not None:
        return Placement(inline.as_prefill(int(decodes.slots_total[inline.row])), decodes.row(inline.row))
    return Placement(prefills.row(prefill), decode)


def _place_move(alternatives: Alternatives, reason: MoveReason) -> Decision:
    """Where a request that runs goes on: at another node that has room for it and, unless it has to leave in any case, is better off by far
    than the one where it is. Its prefix comes from where it is, and the few blocks that are not there by then the node computes itself."""
    decodes = alternatives.decodes
    lacking = alternatives.num_blocks - np.maximum(decodes.prefix_blocks, alternatives.prefills.source_blocks)
    if not (lacking <= MOST_LACKING_BLOCKS).any():
        return Rejection(Reason.NO_DECODE, f"its prefix is not known to be anywhere (it was to move: {reason})", alternatives.rejoin_s)
    better = decodes.place_in_batch() & (decodes.slots_free >= alternatives.expected_blocks) & (lacking <= MOST_LACKING_BLOCKS)
    if reason is MoveReason.SLOW:
        better &= decodes.tbt_ms <= SETTLED * alternatives.tbt_slo_ms
    elif reason is MoveReason.ROOM:
        better &= decodes.slots_free - alternatives.expected_blocks >= ROOM_LEFT / 2 * decodes.slots_total
    better &= decodes.slots_total >= alternatives.most_blocks
    rows = [row for row in better.nonzero()[0].tolist() if decodes.instance_ids[row] not in alternatives.avoid]
    if not rows:
        return Rejection(Reason.NO_DECODE, f"no other decode node has room for it (it was to move: {reason})", alternatives.rejoin_s)
    decode = decodes.row(POLICIES[alternatives.policy].decode(alternatives, np.array(rows, np.int64)))
    return Placement(_continuing(alternatives, decode), decode)


def _continuing(alternatives: Alternatives, decode: DecodeEstimate) -> PrefillEstimate:
    """The node in the place of the prefill side, where a request goes on whose prefix others have."""
    prefills = alternatives.prefills
    fetches = prefills.source_blocks > decode.prefix_blocks
    return PrefillEstimate(
        instance_id=decode.instance_id,
        local_blocks=decode.prefix_blocks,
        source_id=prefills.source_id if fetches else None,
        source_blocks=prefills.source_blocks if fetches else 0,
        queue_ms=0.0,
        transfer_ms=0.0,
        prefill_ms=decode.tbt_ms,
        saved_ms=0.0,
        slots_total=decode.slots_total,
        branch="fetch" if fetches else "cache-aware",
    )


def _place_idle(alternatives: Alternatives, others: OthersEstimates, fit_prefill: Ints, fit_decode: Ints) -> Decision:
    """Where a request in idle capacity would run, of the instances where it fits: behind queues that are near empty, in places and slots
    that nobody wants, within what the steps of others may be lengthened by. Where there is nothing else at all, it may have everything."""
    prefills, decodes, policy = alternatives.prefills, alternatives.decodes, POLICIES[alternatives.policy]
    near_empty_ms = _NEAR_EMPTY * alternatives.ttft_slo_ms
    free_prefill = fit_prefill[(prefills.queue_ms[fit_prefill] <= near_empty_ms) | (prefills.queue_ms[fit_prefill] <= 0)]
    alone = decodes.batch == 1
    left = decodes.slots_free - alternatives.expected_blocks
    roomy = decodes.place_in_batch() & ((left >= _SLOTS_LEFT * decodes.slots_total) | (alone & (left >= 0)))
    objective_ms, slowdown = alternatives.tbt_slo_ms, alternatives.idle_slowdown
    most_ms = np.array([most_with_idle_ms(others_ms, objective_ms, slowdown) for others_ms in others.step_ms.tolist()])
    free = roomy & ((decodes.tbt_ms <= most_ms) | alone)
    free_decode = fit_decode[free[fit_decode]]
    if not len(free_prefill) or not len(free_decode):
        where = "prefill instance" if not len(free_prefill) else "decode node"
        return Rejection(Reason.NOT_IDLE, f"no {where} has idle capacity just now", _IDLE_AGAIN_S)
    prefill = policy.prefill(alternatives, _avoid(free_prefill, prefills, alternatives))
    decode_rows, twin = _avoid(free_decode, decodes, alternatives), int(prefills.twin[prefill])
    decode = twin if policy.stays and twin in decode_rows else policy.decode(alternatives, decode_rows)
    return Placement(prefills.row(prefill), decodes.row(decode))


def _too_large(alternatives: Alternatives) -> Rejection:
    prefill, decode = (int(estimates.slots_total.max()) for estimates in (alternatives.prefills, alternatives.decodes))
    if prefill < alternatives.num_blocks:
        message = f"the prompt needs {alternatives.num_blocks} KV slots; the largest prefill node has {prefill} (kv.arena_size)"
    else:
        message = (
            f"the prompt and the longest output that was asked for need {alternatives.most_blocks} KV slots; "
            f"the largest decode node has {decode} (kv.arena_size)"
        )
    return Rejection(Reason.TOO_LARGE, message)


def _decode(alternatives: Alternatives, rows: Ints, twin: int) -> DecodeEstimate:
    """By the policy among those that have a place in their batch, and slots for the prompt and what is expected to follow; where none has,
    the one that will soonest. `twin`: the row of the engine that prefills; -1: it decodes nothing."""
    decodes = alternatives.decodes
    found = np.empty(len(rows), np.int64)
    roomy = found[: _native.roomy_rows(rows, decodes.batch, decodes.max_batch, decodes.slots_free, alternatives.expected_blocks, found)]
    if len(roomy):
        own = _of_both(alternatives, roomy, twin) if POLICIES[alternatives.policy].stays else None
        return decodes.row(POLICIES[alternatives.policy].decode(alternatives, roomy) if own is None else own)
    slots_free, batch, max_batch = decodes.slots_free[rows], decodes.batch[rows], decodes.max_batch[rows]
    lacking = np.maximum(alternatives.expected_blocks - slots_free, 0) / np.maximum(decodes.slots_total[rows], 1)
    beyond = np.where(max_batch > 0, np.maximum(batch - max_batch, 0) / np.maximum(max_batch, 1), 0.0)
    share = np.maximum(lacking, beyond)
    waits_ms = [alternatives.drain_ms(float(part), float(tbt_ms)) for part, tbt_ms in zip(share, decodes.tbt_ms[rows], strict=True)]
    soonest = int(np.argmin(waits_ms))
    return decodes[int(rows[soonest])]._replace(wait_ms=waits_ms[soonest])


def _waits_there(alternatives: Alternatives, prefill: int, decode: DecodeEstimate, fit_prefill: Ints) -> int:
    """The prefill side of a request that waits for room: the decode side's own, where it has one. It would hold room at one engine while it
    waits for that of another, and two such could wait for each other."""
    own = (alternatives.prefills.twin == alternatives.decodes.instance_ids.index(decode.instance_id)).nonzero()[0]
    return int(own[0]) if len(own) and own[0] in fit_prefill else prefill


def _do_both(rows: Ints, alternatives: Alternatives) -> bool:
    """Whether all of these decode instances prefill, too. Where none does, nothing is looked up."""
    twins = alternatives.prefills.twin
    twins = twins[twins >= 0]
    if len(twins) < len(rows):
        return False
    prefills = np.zeros(len(alternatives.decodes), np.bool_)
    prefills[twins] = True
    return bool(prefills[rows].all())


def _of_both(alternatives: Alternatives, roomy: Ints, twin: int) -> int | None:
    """The row for an output where instances do both; None: it is left to the policy. Outputs go to the instance that has most of them yet,
    as long as its steps are hardly longer than any other's, or, where outputs are concentrated, keep to their part of the objective. A
    prompt that stays is handed over to nobody, and whatever continues it finds all of it in one place."""
    decodes, objective_ms = alternatives.decodes, alternatives.tbt_slo_ms
    if _do_both(roomy, alternatives):
        tbt_ms = decodes.tbt_ms[roomy]
        if alternatives.concentrated_up_to:
            most_ms, decoding = alternatives.concentrated_up_to * objective_ms, decodes.batch[roomy] > 1
        else:
            most_ms, decoding = min(_FULL_UP_TO * objective_ms, _GATHERED_UP_TO * float(tbt_ms.min())), decodes.running[roomy] > 0
        fuller = roomy[(tbt_ms <= most_ms) & decoding]
        if len(fuller):
            return _native.best_row(fuller, ">>", decodes.batch, decodes.prefix_blocks)
    stays = twin in roomy and decodes.tbt_ms[twin] <= objective_ms
    return twin if stays else None


def _inline(alternatives: Alternatives, ttft_ms: float) -> InlineEstimate | None:
    """The decode node that has the first token soonest, sooner than in `ttft_ms`, without a step longer than the objective."""
    decodes, need, most = alternatives.decodes, alternatives.expected_blocks, alternatives.most_blocks
    for inline in alternatives.inlines:
        roomy = decodes.slots_free[inline.row] >= need and decodes.slots_total[inline.row] >= most
        within = inline.step_ms <= alternatives.tbt_slo_ms and inline.ttft_ms < ttft_ms
        if roomy and within and inline.instance_id not in alternatives.avoid:
            return inline
    return None


def admit(alternatives: Alternatives, placement: Placement) -> Decision:
    """Whether it should run there (lines 25 to 27), by the outlook that it has there. Raises ValueError without one."""
    if alternatives.accepted or alternatives.terms.idle:
        return placement
    if alternatives.outlook is None:
        raise ValueError(f"{alternatives.attempt_id} has no outlook to be judged by")
    return ADMISSIONS[alternatives.admission].refuse(alternatives, placement, alternatives.outlook) or placement


def _rows_from(column: Ints, least: int) -> Ints:
    """The rows whose value is at least `least`."""
    found = np.empty(len(column), np.int64)
    return found[: _native.rows_from(column, least, found)]


def _avoid(rows: Ints, estimates: PrefillEstimates | DecodeEstimates, alternatives: Alternatives) -> Ints:
    """Without the instances that just failed this request, unless there is no other."""
    if not alternatives.avoid:
        return rows
    others = [row for row in rows.tolist() if estimates.instance_ids[row] not in alternatives.avoid]
    return np.array(others, np.int64) if others else rows
