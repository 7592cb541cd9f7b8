"""The Conductor as a pure machine: one event in, the actions to do out."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from conductor.core.admission.rules import ADMISSIONS, Lookahead
from conductor.core.forecast.output_lengths import RunningOutputs
from conductor.core.moves import MovePlanner
from conductor.core.placement.scheduler import Scheduler, admit, place
from conductor.core.placement.transfer import TransferModel
from conductor.core.pool_balance import PoolBalance, PoolDemand, PoolLoads, PoolUse, pool_loads, pool_use
from conductor.core.prefix_index import PrefixIndex
from conductor.core.replication.planner import ReplicationPlanner
from conductor.core.scoring import Scorekeeper
from conductor.core.settings import ConductorSettings
from conductor.core.state import ClusterState, PlacedAttempt
from conductor.core.types.decision import Alternatives, Decision, Foresight, Outlook, Placement
from conductor.core.types.events import (
    Action,
    Decided,
    Event,
    Forgot,
    HungChanged,
    InstanceDown,
    InstanceUp,
    LoadReported,
    MovesAsked,
    Placed,
    PrefillFinished,
    Renewed,
    ReplicationEnded,
    RequestSnapshot,
    Scored,
    StoreDown,
    StoreStillHere,
    StoreWatched,
    SwitchFailed,
    TickPart,
)
from springtide.blocks import blocks_for
from springtide.clock import Tick
from springtide.ids import AttemptId, GatewayId, NodeId, RequestId
from springtide.protocol.attempts import LiveAttempt, Phase, Prediction, Progress, Renew
from springtide.protocol.instances import InstanceRef, Role
from springtide.protocol.scheduling import Assignment, PrefixSource, Reason, Rejection, Schedule
from springtide.protocol.storage import BlocksRemoved, BlocksStored, SnapshotPart
from springtide.slices import saying

_MOST_SOURCES = 3
"""The chosen one and those that take its place when it fails or is slow."""
_COUNTED_REQUESTS = 1 << 16
"""The latest, which may still be scheduled anew."""
_HEARD_LATELY_S = 1.2
"""Two reports."""
_SWEPT_A_TICK, _SWEPT_AT_ONCE = 50_000, 500
"""Table entries cleaned by a tick, and by each of its parts, some .2 ms."""


@dataclass(slots=True)
class Totals:
    """What was decided since this Conductor started."""

    scheduled: int = 0
    rejected: Counter[Reason] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    _counted: OrderedDict[RequestId, None] = field(default_factory=OrderedDict)

    def count_prompt(self, request_id: RequestId | None, num_tokens: int, cached_tokens: int) -> None:
        """Counts a prompt, once for each request: a later attempt finds in the pool what an earlier one has put there. None: which one is
        not known."""
        if request_id in self._counted:
            return
        if request_id is not None:
            self._counted[request_id] = None
            if len(self._counted) > _COUNTED_REQUESTS:
                self._counted.popitem(last=False)
        self.prompt_tokens += num_tokens
        self.cached_tokens += cached_tokens

    @property
    def decided(self) -> int:
        return self.scheduled + self.rejected.total()


class ConductorCore:
    """All that the Conductor knows and decides."""

    def __init__(self, settings: ConductorSettings) -> None:
        self.settings = settings
        self.index = PrefixIndex()
        self.state = ClusterState(settings.block_tokens, settings.chunk_tokens, settings.chunk_ms)
        self.transfers = TransferModel()
        self.totals = Totals()
        self.scores = Scorekeeper(self.state.queue_bias)
        self.lookahead = Lookahead(settings, self.state, ADMISSIONS[settings.admission].foresight)
        self.scheduler = Scheduler(settings, self.index, self.state, self.transfers)
        self.replication = ReplicationPlanner(settings, self.index, self.state, self.transfers, self.scheduler.ready_prefills)
        self.moves = MovePlanner(self.state, settings.tbt_slo_ms)
        self.demand = PoolDemand(self.state, settings.tbt_slo_ms)
        self.balance = PoolBalance(settings.pool_balance) if settings.pool_balance is not None else None
        self._store_addresses: dict[NodeId, str] = {}
        self._snapshots_asked: set[NodeId] = set()
        self._hung: tuple[InstanceRef, ...] = ()
        """As gateways were told last."""
        self._tick_parts: Iterator[list[Action]] | None = None
        """Those to come of a tick that is taken in parts."""
        self._tick_at = 0.0
        """When the tick's part is done."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes the event in and returns what is to be done. `now`: seconds on a monotonic clock, never decreasing."""
        match event:
            case Schedule():
                return [self._schedule(event, now)]
            case Progress():
                known = self.state.attempts.get(event.attempt_id)
                actions = self._advance(event, known, now)
                if known is not None:
                    self.scheduler.follow(known.prefill_id)
                    self.scheduler.follow(known.decode_id)
                return actions
            case Placed(gateway_id, attempt):
                self._learn(attempt, gateway_id, now)
            case Renew(gateway_id, attempts):
                self._renew(Renewed(gateway_id, (), attempts), now)
            case Renewed():
                self._renew(event, now)
            case LoadReported(instance_id, incarnation, load):
                self.state.report(instance_id, incarnation, load, now)
                self.scheduler.follow(instance_id)
            case BlocksStored(node_id, incarnation, sequence, keys, tier):
                return self._in_order(node_id, self.index.stored(node_id, incarnation, sequence, keys, tier))
            case BlocksRemoved(node_id, incarnation, sequence, keys, tier):
                return self._in_order(node_id, self.index.removed(node_id, incarnation, sequence, keys, tier))
            case SnapshotPart(node_id, incarnation, sequence, keys, tier, complete):
                self.index.snapshot(node_id, incarnation, sequence, keys, tier, complete)
                if complete:
                    self._snapshots_asked.discard(node_id)
            case StoreStillHere(node_id, sequence):
                return self._in_order(node_id, self.index.still_at(node_id, sequence))
            case StoreWatched(node_id, address):
                self._store_addresses[node_id] = address
            case StoreDown(node_id):
                self.index.forget(node_id)
                self.transfers.forget(node_id)
                self._store_addresses.pop(node_id, None)
                self._snapshots_asked.discard(node_id)
            case InstanceUp(ref, incarnation):
                self.state.instance_up(ref, incarnation, now)
                return self._tell_hung(now)
            case InstanceDown(instance_id, incarnation, hung, leaving):
                self.state.instance_down(instance_id, incarnation, hung, leaving, now)
                gone = self.state.instances.get(instance_id)
                return [*self._tell_hung(now), *(self.moves.leaving(gone, now) if gone is not None else ())]
            case ReplicationEnded():
                self.replication.ended(event, now)
            case SwitchFailed(instance_id):
                if self.balance is not None:
                    self.balance.failed(instance_id, now)
            case MovesAsked(instance_id, most):
                return [*self.moves.asked(instance_id, most, now)]
            case Tick():
                self._tick_parts, self._tick_at = None, now
                return [action for actions in self._tick() for action in actions]
            case TickPart():
                return self._tick_part(now)
        return []

    @property
    def ready(self) -> bool:
        """Whether at least one prefill instance and one decode node can take requests."""
        return all(self.scheduler.num_ready(role) for role in Role)

    def pool_loads(self, now: float) -> Generator[None, None, PoolLoads]:
        """Returns, in parts, how loaded both pools are, 1 being as much as the cluster's objectives allow."""
        return pool_loads(self.state, self.settings.ttft_slo_ms, self.settings.tbt_slo_ms, now)

    def pool_use(self, role: Role) -> Generator[None, None, PoolUse]:
        """Returns, in parts, what the pool has to do, and how much of its slots that takes."""
        return pool_use(self.state, role)

    def validate(self) -> None:
        """Asserts the invariants of all parts. For tests; it looks at everything."""
        self.index.validate()
        self.state.validate()
        self.replication.validate()
        self.transfers.validate({key for key, attempt in self.state.attempts.items() if attempt.phase is Phase.PREFILL})

    # ---- attempts ----

    def _schedule(self, request: Schedule, now: float) -> Decided:
        # A gateway that asks again did not get the first answer: that placement counts no more.
        self.state.remove(request.attempt_id)
        self.transfers.end(request.attempt_id)
        output_tokens = self.state.output_tokens(request)
        prefill_work = self.demand.recent_work(now).prefill if self.scheduler.has_both else 0.0
        moves = self.moves.reason(request.successor_of) if request.successor_of else None
        alternatives = self.scheduler.estimate(request, output_tokens, self.totals.decided, prefill_work, now, moves)
        decision = self._for_those_away(request, alternatives, place(alternatives))
        idle = request.terms.idle
        predicted_ttft_ms = decision.ttft_ms if isinstance(decision, Placement) and not idle else None
        if moves is not None:
            if isinstance(decision, Placement):
                self.moves.succeeds(request.attempt_id, request.successor_of, now)
            else:
                self.moves.refused(request.successor_of, now)
        elif not idle:
            self.replication.ask(request, alternatives, now)
            self.demand.ask(request, alternatives, decision, output_tokens, now)
        if isinstance(decision, Placement) and not request.accepted and not idle:
            alternatives.outlook = outlook = self.lookahead.outlook(request, alternatives, decision, output_tokens, now)
            decision = admit(alternatives, decision)
            if isinstance(decision, Placement):
                self.lookahead.admitted(request, decision, outlook, now)
        if moves is None:
            self._count(decision)
        assignment = None
        if isinstance(decision, Placement):
            ttft_ms = decision.ttft_ms
            sources = self._sources(decision, alternatives)
            prediction = self._prediction(decision, ttft_ms, alternatives.outlook, output_tokens, now)
            assignment = Assignment(
                attempt_id=request.attempt_id,
                prefill=self.state.instances[decision.prefill.instance_id].ref,
                decode=self.state.instances[decision.decode.instance_id].ref,
                local_blocks=decision.prefill.local_blocks,
                sources=sources,
                predicted_ttft_ms=ttft_ms,
                predicted_tbt_ms=decision.decode.tbt_ms,
                ttft_slo_ms=alternatives.ttft_slo_ms,
                tbt_slo_ms=alternatives.tbt_slo_ms,
                prediction=prediction,
                waits=decision.waits,
                refusable=not request.accepted and not idle and ADMISSIONS[self.settings.admission].foresight is not Foresight.NONE,
            )
            self.state.place(
                PlacedAttempt(
                    attempt_id=request.attempt_id,
                    request_id=request.request_id,
                    gateway_id=request.gateway_id,
                    prefill_id=decision.prefill.instance_id,
                    decode_id=decision.decode.instance_id,
                    phase=Phase.PREFILL,
                    num_tokens=request.num_tokens,
                    num_blocks=alternatives.expected_blocks,
                    output_tokens=max(1, round(output_tokens)),
                    prefill_ms=decision.prefill.prefill_ms,
                    joins_at=now + ttft_ms / 1000.0,
                    renewed_at=now,
                    tenant=request.tenant,
                    most_tokens=request.max_new_tokens or math.inf,
                    prediction=prediction,
                    idle=idle,
                    earlier_tokens=request.output_tokens,
                ),
                request.reusable_keys,
            )
            if sources:
                self.transfers.begin(
                    request.attempt_id,
                    self.scheduler.fetch(decision.prefill, sources[0].node_id, assignment.prefill.node_id, moves is not None),
                )
        return Decided(request.attempt_id, decision, alternatives, assignment, predicted_ttft_ms)

    def _for_those_away(self, request: Schedule, alternatives: Alternatives, decision: Decision) -> Decision:
        """What is too large for the nodes that are ready may fit one that is away for a moment; what was accepted once did fit."""
        if not isinstance(decision, Rejection) or decision.reason is not Reason.TOO_LARGE:
            return decision
        need = {Role.PREFILL: alternatives.num_blocks, Role.DECODE: alternatives.most_blocks}
        largest = {Role.PREFILL: alternatives.prefills.slots_total.max(), Role.DECODE: alternatives.decodes.slots_total.max()}
        short = [role for role in Role if largest[role] < need[role]]
        away = [instance for instance in self.state.instances.values() if not self.scheduler.ready(instance)]
        roomy = {instance.ref.role for instance in away if instance.most_slots >= need[instance.ref.role]}
        if not request.accepted and not roomy.issuperset(short):
            return decision
        reason = Reason.NO_PREFILL if Role.PREFILL in short else Reason.NO_DECODE
        return Rejection(reason, f"{decision.message}; a larger one is away", alternatives.rejoin_s)

    def _prediction(self, placement: Placement, ttft_ms: float, outlook: Outlook | None, output_tokens: float, now: float) -> Prediction:
        prefill = placement.prefill
        # What it will have waited for at the decode node, or for another prompt, says nothing of the queue.
        queues = not (placement.inlined or placement.waits or prefill.branch == "await")
        return Prediction(
            ttft_ms=ttft_ms,
            queue_ms=prefill.queue_ms,
            transfer_ms=prefill.transfer_ms,
            prefill_ms=prefill.prefill_ms,
            tbt_ms=outlook.own_tbt_ms if outlook is not None else placement.decode.tbt_ms,
            output_tokens=output_tokens,
            ahead_ms=self.state.instances[prefill.instance_id].queue_ms(now) if queues else 0.0,
        )

    def _sources(self, placement: Placement, alternatives: Alternatives) -> tuple[PrefixSource, ...]:
        """The one that was chosen, then others that hold more than the prefill node itself; of those that are up."""
        prefill = placement.prefill
        if prefill.source_id is None:
            return ()
        own_id = self.state.instances[prefill.instance_id].ref.node_id
        chosen = [(prefill.source_id, prefill.source_blocks)]
        chosen += [
            (node_id, min(blocks, prefill.source_blocks))
            for node_id, blocks in alternatives.holders
            if node_id not in (own_id, prefill.source_id) and blocks > prefill.local_blocks
        ]
        up = [(node_id, self._store_addresses[node_id], blocks) for node_id, blocks in chosen if node_id in self._store_addresses]
        return tuple(PrefixSource(*source) for source in up[:_MOST_SOURCES])

    def _count(self, decision: Decision) -> None:
        if isinstance(decision, Rejection):
            if decision.reason is Reason.NOT_IDLE:
                return  # It waits.
            self.totals.rejected[decision.reason] += 1
        else:
            self.totals.scheduled += 1

    def _advance(self, event: Progress, attempt: PlacedAttempt | None, now: float) -> list[Action]:
        """`attempt`: the one that has advanced, if it is known."""
        if attempt is None:
            if event.phase.over:  # A renewal that is on the way may still list it.
                self.state.finish(event.attempt_id, 0, now)
            return []
        attempt.renewed_at = now
        if event.phase.over:
            output_tokens = event.output_tokens if event.phase is Phase.FINISHED else 0
            scores = () if attempt.idle else self.scores.finished(attempt, output_tokens, now)
            self.transfers.end(event.attempt_id)
            self.state.finish(event.attempt_id, output_tokens, now)
            moves = self.moves.ended(event.attempt_id, now)
            return [*moves, *([Scored(event.attempt_id, attempt.request_id, scores)] if scores else [])]
        if event.phase is not Phase.DECODE or attempt.phase is Phase.DECODE:
            return []
        self.transfers.end(event.attempt_id, event.remote_tokens * self.settings.bytes_per_token, event.fetch_ms)
        self.state.prefill_over(attempt, now)
        if attempt.earlier_tokens:
            return []  # Neither is it another prompt, nor does what it waited for say anything of others.
        self.totals.count_prompt(attempt.request_id, attempt.num_tokens, event.cached_tokens)
        if attempt.idle:
            return []  # What it waited for says nothing of others.
        self.scores.first_token(attempt, event)
        predicted_ms = attempt.prediction.ttft_ms if attempt.prediction is not None else 0.0
        return [PrefillFinished(event.attempt_id, predicted_ms, event.ttft_ms, attempt.num_tokens, event.cached_tokens)]

    def is_news(self, attempt_id: AttemptId, phase: Phase) -> bool:
        """Whether a renewal says more of a live attempt than that it lives, when it says that it is in this phase."""
        known = self.state.attempts.get(attempt_id)
        return known is None or (phase is Phase.DECODE and known.phase is Phase.PREFILL)

    def _renew(self, event: Renewed, now: float) -> None:
        self.state.renewed(event.gateway_id, now)
        for live in event.attempts:
            self._learn(live, event.gateway_id, now)
        for attempt_id in event.unchanged:
            if (known := self.state.attempts.get(attempt_id)) is not None:
                known.renewed_at = now
        listed = {live.attempt_id for live in event.attempts}.union(event.unchanged)
        for attempt in list(self.state.of_gateway(event.gateway_id)):
            if attempt.attempt_id in listed:
                attempt.unlisted = False
            elif attempt.unlisted:
                self.transfers.end(attempt.attempt_id)
                self.state.finish(attempt.attempt_id, 0, now)
            else:
                attempt.unlisted = True

    def _learn(self, live: LiveAttempt, gateway_id: GatewayId, now: float) -> None:
        known = self.state.attempts.get(live.attempt_id)
        if known is None:
            if not live.phase.over and not self.state.is_over(live.attempt_id):
                self.state.place(self._relearnt(live, gateway_id, now))
                if live.successor_of:
                    self.moves.succeeds(live.attempt_id, live.successor_of, now)
            return
        known.renewed_at = now
        if live.phase is Phase.DECODE and known.phase is Phase.PREFILL:
            self.transfers.end(live.attempt_id)
            self.state.prefill_over(known, now)

    def _relearnt(self, live: LiveAttempt, gateway_id: GatewayId, now: float) -> PlacedAttempt:
        """An attempt that another Conductor, or this one before its restart, placed."""
        if live.prediction is not None:
            prefill_ms, ttft_ms = live.prediction.prefill_ms, live.prediction.ttft_ms
        else:
            prefill = self.state.instances.get(live.prefill_id)
            cost = prefill.load.prefill_cost if prefill is not None else None
            new_tokens = live.num_tokens - live.cached_tokens
            ttft_ms = prefill_ms = self.state.prefill_ms(cost, new_tokens, live.cached_tokens) if cost is not None else 0.0
        output_tokens = self._expected_tokens(live)
        return PlacedAttempt(
            attempt_id=live.attempt_id,
            request_id=None,
            gateway_id=gateway_id,
            prefill_id=live.prefill_id,
            decode_id=live.decode_id,
            phase=live.phase,
            num_tokens=live.num_tokens,
            num_blocks=blocks_for(live.num_tokens + output_tokens, self.settings.block_tokens),
            output_tokens=output_tokens,
            prefill_ms=prefill_ms,
            joins_at=now + ttft_ms / 1000.0,
            renewed_at=now,
            tenant=live.tenant,
            most_tokens=live.max_new_tokens or math.inf,
            prediction=live.prediction,
            idle=live.idle,
            earlier_tokens=live.output_tokens,
        )

    def _expected_tokens(self, live: LiveAttempt) -> int:
        """Of its output."""
        if live.prediction is not None:
            return max(1, round(live.prediction.output_tokens))
        return max(1, round(self.state.lengths.predict(live.tenant, live.max_new_tokens or math.inf, live.output_tokens)))

    # ---- instances that hang ----

    @property
    def hung(self) -> tuple[InstanceRef, ...]:
        """The instances whose work is to go on elsewhere."""
        return self._hung

    def _tell_hung(self, now: float) -> list[Action]:
        """Where no other instance of the role is ready, work is left where it is: to wait there, for one that may only have been held up,
        is better than to fail and to wait."""
        suspects = [instance for instance in self.state.instances.values() if instance.hung]
        if not suspects and not self._hung:
            return []
        # One that has been silent itself for a while is no replacement: where all are, this Conductor is cut off from them, not they from
        # their gateways.
        heard = [one for one in self.state.instances.values() if now - one.changed_at <= _HEARD_LATELY_S and self.scheduler.ready(one)]
        replaced = {instance.ref.role for instance in heard}
        hung = tuple(instance.ref for instance in suspects if instance.ref.role in replaced)
        if hung == self._hung:
            return []
        self._hung = hung
        return [HungChanged(hung)]

    # ---- stores and time ----

    def _in_order(self, node_id: NodeId, in_order: bool) -> list[Action]:
        if in_order or node_id in self._snapshots_asked:
            return []
        self._snapshots_asked.add(node_id)
        return [RequestSnapshot(node_id)]

    @property
    def ticks(self) -> bool:
        """Whether a tick that is taken in parts has not come to its end."""
        return self._tick_parts is not None

    def _tick_part(self, now: float) -> list[Action]:
        self._tick_at = now
        if self._tick_parts is None:
            self._tick_parts = self._tick()
        actions = next(self._tick_parts, None)
        if actions is None:
            self._tick_parts = None
        return actions or []

    def _tick(self) -> Iterator[list[Action]]:
        """What is to be done, in parts of some .2 ms at a thousand instances, each at its own time. What is compared with one another is as
        of one moment."""
        nothing: list[Action] = []
        running = RunningOutputs()
        for tokens in self.state.forecast.running_tokens(self._tick_at):
            running.add(tokens)
            yield nothing
        self.state.lengths.watch(running)
        yield nothing
        silent = self.state.expire(self._tick_at, self.settings.lease_s)
        for attempt_id in silent:
            self.transfers.end(attempt_id)
        yield [Forgot(tuple(silent))] if silent else []
        for _ in range(_SWEPT_A_TICK // _SWEPT_AT_ONCE):
            if not self.index.sweep(_SWEPT_AT_ONCE):
                break
            yield nothing
        yield self._tell_hung(self._tick_at)
        for orders in self.replication.orders(self._store_addresses, lambda: self._tick_at):
            yield [*orders]
        for moves in self.moves.orders(self.scheduler.ready_decodes(), self._tick_at):
            yield [*moves]
        if self.balance is not None:
            loads = yield from saying(nothing, self.pool_loads(self._tick_at))
            yield nothing
            now = self._tick_at
            of_one_role = Counter(instance.ref.node_id for instance in self.state.instances.values())
            ready = [
                instance
                for instance in self.state.instances.values()
                if of_one_role[instance.ref.node_id] == 1 and self.scheduler.ready(instance)
            ]
            move = self.balance.decide(ready, loads, self.demand.work(now), now)
            yield [move] if move is not None else []
