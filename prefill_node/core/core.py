"""The prefill group's decisions: `handle(event, now)` returns what is to be done.

Ownership of slots: from Acquired to Release they are this engine's to read, and from `reused_blocks` on to write. While passes run on them
their Release is held back until the last of those has ended in all stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from typing import Protocol

from node_runtime import events
from node_runtime.calibration import CostCalibration
from node_runtime.events import SendUpdate
from node_runtime.quiet import Disturbance, IdleTurns
from node_runtime.slot_claims import SlotClaims, acquire, patience_s, within_pages
from prefill_node.core import events as ev
from prefill_node.core.actions import Action, GiveWay, Prefilled, PrefixShared, RunPass
from prefill_node.core.attempt import PrefillAttempt
from prefill_node.core.in_flight import IdleTime, PassesInFlight, PassInFlight
from prefill_node.core.layer_stream import due_pushes, pushable_blocks
from prefill_node.core.scheduling import ChunkPolicy, WithStep
from prefill_node.core.settings import PrefillSettings
from prefill_node.core.shared_prefixes import SharedPrefixes, Underway
from springtide.chunking import Chunking
from springtide.clock import ObservedTime, Tick
from springtide.cost import PrefillCost
from springtide.ids import AttemptId
from springtide.protocol import storage
from springtide.protocol.instances import NO_IDLE_LOAD, IdleLoad, Load
from springtide.protocol.outputs import (
    NO_ROOM,
    AttemptFailed,
    AttemptSign,
    Failure,
    FailureCode,
    HandedOver,
    PromptLogprobs,
    SampledToken,
    token_output,
)
from springtide.protocol.starts import AbortAttempt, ForetellTokens, PrefillStart, Request

MIN_SLOT_WAIT_S, MAX_SLOT_WAIT_S = 5.0, 60.0
"""A full pool is waited for as long as the TTFT budget lasts, within these bounds."""
MOST_ROOM_WAIT_S = 1.0
WORTH_AWAITING = 2.0
"""Times as long as a pass of nothing takes, what is spared must: who waits has a pass of its own afterwards."""


class Beside(Protocol):
    """Who decodes here, and has slots of the same store."""

    def kept_for_growth(self, tenant: str | None = None) -> int:
        """Slots that prompts have to leave (of the tenant's quota, if one is given): what those that decode are expected to grow by."""
        ...

    @property
    def waits_since(self) -> float:
        """When the request of the oldest that waits for slots there arrived at its gateway; inf: nobody does."""
        ...


class Nobody(Beside):
    """Nobody does."""

    @property
    def waits_since(self) -> float:
        return math.inf

    def kept_for_growth(self, tenant: str | None = None) -> int:
        return 0


class PrefillCore:
    """The state of a prefill group, and every decision."""

    def __init__(self, settings: PrefillSettings, beside: Beside | None = None) -> None:
        """`beside`: who decodes with the same engine; None: nobody."""
        self._settings = settings
        self._beside: Beside = beside or Nobody()
        self._policy = ChunkPolicy(settings.chunking)
        self._calibration: CostCalibration[PrefillCost] = CostCalibration(settings.chunking.cost)
        self._groups = settings.layer_groups
        self._block_tokens = settings.block_tokens
        self._attempts: dict[AttemptId, PrefillAttempt] = {}
        self._num_idle = 0
        """How many of them are in idle capacity."""
        self._claims = SlotClaims()
        self._shared = SharedPrefixes()
        self._passes = PassesInFlight(settings.num_stages)
        self._had_room = True
        """For a pass, before the event."""
        self._idle = IdleTime()
        self._disturbance = Disturbance(settings.idle_slowdown)
        self._idle_turns = IdleTurns()
        self._room_awaited_until = float("-inf")
        """Slots were taken from attempts in idle capacity: until the store tells of them, or then, no others give way."""
        self._observed = ObservedTime(events.MOST_BETWEEN_TICKS_S)
        self._out: list[Action] = []

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Late, duplicate and unknown messages change nothing."""
        self._had_room = self._passes.has_room
        match event:
            case events.Start(session, start):
                self._start(session, start, now)
            case ev.Placed():
                self._place(event, now)
            case AbortAttempt(attempt_id):
                self._abort(attempt_id)
            case ForetellTokens():
                pass
            case events.SessionEnded(session):
                for attempt in [a for a in self._attempts.values() if a.session == session]:
                    self._abort(attempt.attempt_id)
            case ev.PassLeft(pass_id):
                self._passes.leave(pass_id)
            case ev.PassDone() | ev.PassInterrupted() | ev.PassGaveWay() | ev.PassFailed():
                self._pass_ended(event, now)
            case Tick():
                self._calibration.tick(now)
                self._observed.look(now)
                self._fail_unanswered()
            case events.Quiet(wanted):
                self._idle_turns.quiet = wanted
            case events.StoreConnected(num_slots, pages):
                self._claims.store_connected(num_slots, pages)
            case events.StoreLost(reason):
                self._store_lost(reason)
            case storage.StoreLoad():
                self._claims.available = event.slots_available
                self._room_awaited_until = float("-inf")
            case _:
                self._notice(event, now)
        if self.cost is not self._calibration.cost:
            chunking = self._settings.chunking
            self._policy = ChunkPolicy(Chunking(self._calibration.cost, chunking.chunk_tokens, chunking.chunk_ms))
        self._give_way(now)
        self._go_on(now)
        self._wait_for_slots(now)
        self._break_off()
        if not self._settings.mixes and (run := self.launch(now)) is not None:
            self._out.append(run)
        self._idle.saw(not self._passes, now)
        actions, self._out = self._out, []
        return actions

    def launch(self, now: float, step: WithStep | None = None) -> RunPass | None:
        """Begins a pass, if there is room for one and something to run. `step`: as of `ChunkPolicy.choose`."""
        could_go_on = self._num_idle > 0 and any(one.idle and one.runnable for one in self._attempts.values())
        self._idle_turns.look(could_go_on or self._passes.idle_work, now)
        if not self._passes.has_room or self._claims.num_slots is None:
            return None
        wanted = self._policy.choose(self._attempts.values(), now, step, awaits=not self._settings.mixes)
        chosen = within_pages(wanted, lambda one: one[0].slots, self._claims.pages, None if step is None else step.slots)
        if not chosen or (chosen[0][0].idle and not self._idle_turns.may_begin(now)):
            return None
        for attempt, _ in chosen:
            attempt.first_pass_at = now if attempt.first_pass_at is None else attempt.first_pass_at
        pushes = due_pushes(chosen, self._groups, self._block_tokens)
        stays = not self._settings.breaks_off or step is not None or self._idle_turns.overdue(now)
        run = self._passes.launch(chosen, pushes, self._policy.pass_ms(chosen), self._had_room, stays, now)
        self._idle.saw(False, now)
        return run

    @property
    def has_idle(self) -> bool:
        """Whether attempts in idle capacity are here."""
        return self._num_idle > 0

    @property
    def idle_work(self) -> bool:
        """Whether any is under way."""
        return self._passes.idle_work

    @property
    def slowdown(self) -> float:
        """As of Disturbance."""
        return self._disturbance.slowdown

    def wants_quiet(self, now: float) -> bool:
        """Whether the machine's other engines are to rest from idle work: passes for others run, or will, and are slowed by it."""
        return self._disturbance.wanted(now) and any(not one.idle and one.phase != "handing-over" for one in self._attempts.values())

    @property
    def cost(self) -> PrefillCost:
        """The cost model, as passes lately were."""
        return self._policy.chunking.cost

    @property
    def has_work(self) -> bool:
        """Whether attempts are here whose work is not over."""
        return len(self._attempts) > 0

    def load(self, slots_total: int, slots_available: int) -> Load:
        """How the group is doing; these slots, and more, only the store knows. `queue_ms` lasts until a further prompt could begin: passes
        that have left the first stage are in nobody's way unless they wait for another; what that stage is at counts whole, as of its
        begin."""
        running = computing = tokens = 0
        queue_ms = self.cost.slowest_share * sum(run.predicted_ms for run in self._passes.waiting)
        idle, decoded_here = [], (one for one in self._shared.all_followers() if one.attempt_id not in self._attempts)
        attempts = [*self._attempts.values(), *decoded_here]
        for attempt in attempts:
            if attempt.phase == "handing-over":
                continue
            if attempt.idle:
                idle.append(attempt)
                continue
            computing += 1
            running += attempt.phase == "running"
            queue_ms += self._policy.occupied_ms(attempt.request.num_tokens, self._out_of_the_way(attempt))
            tokens += attempt.remaining_tokens
        return Load(
            running=running,
            waiting=computing - running,
            tokens=tokens,
            queue_ms=queue_ms,
            slots_total=slots_total,
            slots_available=slots_available,
            attempt_ids=frozenset(attempt.attempt_id for attempt in attempts),
            prefill_cost=self.cost,
            idle=self._idle_load(idle) if idle else NO_IDLE_LOAD,
        )

    def _idle_load(self, idle: Sequence[PrefillAttempt]) -> IdleLoad:
        """Of these, which are all that are in idle capacity."""
        return IdleLoad(
            running=len(idle),
            tokens=sum(attempt.remaining_tokens for attempt in idle),
            queue_ms=sum(self._policy.occupied_ms(one.request.num_tokens, self._out_of_the_way(one)) for one in idle),
            slots_held=sum(len(attempt.slots) for attempt in idle),
        )

    def signs(self) -> Iterator[tuple[int, AttemptSign]]:
        """Signs of how each attempt gets on, with its session."""
        for attempt_id, attempt in self._attempts.items():
            at_work = attempt.phase == "acquiring" or attempt.fetching or self._passes.runs(attempt_id)
            yield attempt.session, AttemptSign(attempt_id, attempt.computed, waiting=not at_work)

    def validate(self) -> None:
        """Asserts the invariants."""
        block = self._block_tokens
        assert self._num_idle == sum(attempt.idle for attempt in self._attempts.values())
        for attempt in self._attempts.values():
            assert (attempt.phase == "waiting") <= (attempt.attempt_id in self._claims)
            if attempt.phase == "running":
                assert attempt.attempt_id not in self._claims
                assert len(attempt.slots) == attempt.request.num_blocks
                assert attempt.local_blocks <= attempt.reused_blocks <= len(attempt.request.keys)
                assert attempt.reused_blocks * block <= attempt.computed < attempt.request.num_tokens
                assert attempt.pushed_blocks * block <= attempt.computed
                assert attempt.committed_blocks * block <= attempt.computed
                assert attempt.launched == attempt.computed + self._passes.tokens_of(attempt.attempt_id) <= attempt.request.num_tokens
            else:
                assert not self._passes.tokens_of(attempt.attempt_id)
        assert all(attempt_id in self._attempts for attempt_id in self._claims)
        assert not any(self._attempts[attempt_id].idle for attempt_id in self._claims), "nobody waits here for idle capacity"
        self._shared.validate()
        assert {key for key, one in self._attempts.items() if one.phase == "awaiting"} == self._shared.follower_ids & self._attempts.keys()
        assert self._settings.mixes or self.leads_as_it_should(set(), set())
        if self._claims.num_slots is None:
            assert not self._attempts
        for one in self._passes:
            assert not any(attempt_id in self._attempts for attempt_id in one.releases)
            assert one.run.num_tokens <= self._policy.chunking.chunk_tokens

    def leads_as_it_should(self, reserving: Set[AttemptId], awaiting: Set[AttemptId]) -> bool:
        """Whether all that compute something, and they alone, may be waited for, and who waits is waited for. `reserving`, `awaiting`: of
        the attempts that are decoded here, those whose prompts are about to be computed, and to wait."""
        computing = {key for key, one in self._attempts.items() if one.phase in ("acquiring", "running")}
        followers = {key for key, one in self._attempts.items() if one.phase == "awaiting"}
        return self._shared.leader_ids == computing | reserving and self._shared.follower_ids == followers | awaiting

    # ---- gateways ----

    def _start(self, session: int, start: PrefillStart, now: float) -> None:
        request = start.request
        attempt_id = request.attempt_id
        if attempt_id in self._attempts or attempt_id in self._passes.held_back():
            return
        if self._claims.num_slots is None:
            self._refuse(session, request, FailureCode.PEER_LOST, "the node's store is away")
            return
        if request.num_blocks > self._claims.num_slots:
            message = f"the prompt needs {request.num_blocks} blocks, the arena has {self._claims.num_slots} slots"
            self._refuse(session, request, FailureCode.INVALID, message)
            return
        attempt = self._attempts[attempt_id] = PrefillAttempt(session, start, arrived_at=now)
        self._num_idle += attempt.idle
        self._seek_slots(attempt, now)

    def _seek_slots(self, attempt: PrefillAttempt, now: float) -> None:
        request = attempt.request
        if attempt.idle and (self._claims or self._beside.waits_since < math.inf):
            self._fail(attempt, Failure(FailureCode.POOL_FULL, "there is no idle capacity here"))
        elif self._claims.goes_before(request.tenant) or self._beside.waits_since < attempt.requested_at:
            self._claims.wait(
                attempt.attempt_id,
                request.num_blocks,
                attempt.requested_at,
                _slot_deadline(attempt),
                tenant=request.tenant,
                continues=request.continues,
            )
        else:
            self._acquire(attempt, now)

    def _place(self, placed: ev.Placed, now: float) -> None:
        request, attempt_id = placed.start.request, placed.start.request.attempt_id
        if attempt_id in self._attempts or attempt_id in self._passes.held_back():
            self._refuse(placed.session, request, FailureCode.INTERNAL, f"there is an attempt {attempt_id} here already")
            return
        attempt = PrefillAttempt(placed.session, placed.start, placed.arrived_at, asked_at=placed.asked_at)
        attempt.idle_before_s = self._idle.until(now)
        self._attempts[attempt_id] = attempt
        self._num_idle += attempt.idle
        self._acquired(attempt, placed.acquired, now)

    def _refuse(self, session: int, request: Request, code: FailureCode, message: str) -> None:
        self._out.append(SendUpdate(session, AttemptFailed(request.attempt_id, Failure(code, message))))

    def _abort(self, attempt_id: AttemptId) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is not None:
            self._forget(attempt)

    # ---- prefixes that others compute ----

    def awaits_prefix(self, start: PrefillStart, arrived_at: float, shared_blocks: int) -> int:
        """As of decode_node.core.core.Prompts."""
        attempt = PrefillAttempt(0, start, arrived_at, shared_blocks=shared_blocks)
        return attempt.shared_blocks if self._awaits(attempt) else 0

    def ends(self, attempt_id: AttemptId) -> None:
        """As of decode_node.core.core.Prompts."""
        self._shared.leave(attempt_id)

    def go_on(self, now: float) -> list[Action]:
        """Has those go on that need not wait any more, after an event that was not this core's."""
        self._go_on(now)
        actions, self._out = self._out, []
        return actions

    def _awaits(self, attempt: PrefillAttempt) -> bool:
        """Whether it is to wait for another one; if not, others may wait for it from now on."""
        underway = self._shared.longest(attempt)
        if underway is not None and self._follows(attempt, underway):
            return True
        self._shared.lead(attempt)
        return False

    def _follows(self, attempt: PrefillAttempt, underway: Underway) -> bool:
        """Has it wait for the leader, if less time is waited in all like that. Else what is spared is computed twice: before, so that the
        leader waits for that, too, or after what the leader has left to compute of it."""
        leader, shared = self._attempts.get(underway.leader_id), underway.blocks * self._block_tokens
        there_blocks = max([underway.committed, attempt.shared_blocks, *(source.num_blocks for source in attempt.start.sources)])
        there, computed = there_blocks * self._block_tokens, underway.committed * self._block_tokens if leader is None else leader.computed
        spared_ms, waited_ms = self._policy.work_ms(shared, there), self._policy.work_ms(shared, computed)
        if spared_ms <= WORTH_AWAITING * self.cost.fixed_ms or waited_ms > 2 * spared_ms:
            return False
        attempt.work_ms = self._policy.work_ms(attempt.request.num_tokens, there)
        attempt.due_at = self._policy.due_at(attempt)
        attempt.phase, attempt.shared_blocks = "awaiting", underway.blocks
        self._shared.follow(attempt, underway.leader_id)
        return True

    def _go_on(self, now: float) -> None:
        for attempt_id, blocks in self._shared.take_ready():
            attempt = self._attempts.get(attempt_id)
            if attempt is None:
                self._out.append(PrefixShared(attempt_id, blocks))
                continue
            attempt.phase, attempt.shared_blocks, attempt.awaited_s = "waiting", blocks, attempt.awaited_s + now
            self._seek_slots(attempt, now)

    # ---- store ----

    def _acquire(self, attempt: PrefillAttempt, now: float) -> None:
        if self._awaits(attempt):
            self._claims.leave(attempt.attempt_id)
            attempt.awaited_s -= now
            return
        attempt.phase, attempt.asked_at, attempt.idle_before_s = "acquiring", now, self._idle.until(now)
        attempt.answer_due_at = self._observed.now + patience_s(attempt.start.sources, self._settings.answer_s)
        kept, kept_in_quota = self._beside.kept_for_growth(), self._beside.kept_for_growth(attempt.request.tenant)
        self._out.append(acquire(attempt.request, attempt.start.sources, self.recompute_us, kept, kept_in_quota))

    def recompute_us(self, num_tokens: int, blocks: int) -> int | None:
        """What each of a prompt's first `blocks` saves if it need not be computed."""
        if not blocks:
            return None
        saved_ms = self._policy.work_ms(num_tokens, 0) - self._policy.work_ms(num_tokens, blocks * self._block_tokens)
        return round(1000 * max(0.0, saved_ms) / blocks)

    def _fail_unanswered(self) -> None:
        for attempt in [one for one in self._attempts.values() if one.phase == "acquiring" and self._observed.now >= one.answer_due_at]:
            self._fail(attempt, Failure(FailureCode.PEER_LOST, "the node's store did not answer when it was asked for slots"))

    def _notice(self, notice: storage.Notice, now: float) -> None:
        if isinstance(notice, storage.StoreLoad):
            return
        attempt = self._attempts.get(notice.attempt_id)
        if attempt is None:
            return
        match notice:
            case storage.Acquired() if attempt.phase == "acquiring":
                self._acquired(attempt, notice, now)
            case storage.FetchProgress(_, layers) if attempt.fetching:
                attempt.layers_arrived = max(attempt.layers_arrived, layers)
                if attempt.layers_arrived == self._groups.layers:
                    self._fetched(attempt, now)
                self._push_prefix(attempt)
            case storage.FetchTruncated(_, valid_blocks) if attempt.phase == "running":
                self._truncated(attempt, valid_blocks, now)
            case HandedOver() if attempt.phase == "handing-over":
                if attempt.request.traced:
                    self._out.append(SendUpdate(attempt.session, notice))
                self._take_off(attempt)
            case storage.HandOverFailed(_, failure) if attempt.phase == "handing-over":
                self._out.append(SendUpdate(attempt.session, AttemptFailed(attempt.attempt_id, failure)))
                self._take_off(attempt)
            case storage.HandOverFailed(_, failure):
                self._fail(attempt, failure)
            case AttemptFailed(_, failure) if failure.code in NO_ROOM and attempt.phase == "acquiring":
                attempt.phase = "waiting"
                self._no_room(attempt, failure, now)
            case AttemptFailed(_, failure):
                self._fail(attempt, failure)

    def _no_room(self, attempt: PrefillAttempt, failure: Failure, now: float) -> None:
        request, quota_used = attempt.request, failure.code is FailureCode.QUOTA_USED
        self._shared.leave(attempt.attempt_id)
        if attempt.idle:
            self._fail(attempt, failure)
            return
        if quota_used:
            self._take_from_idle(request.num_blocks, now, request.tenant)
        self._claims.refused(
            attempt.attempt_id,
            request.num_blocks,
            attempt.requested_at,
            _slot_deadline(attempt),
            now,
            tenant=request.tenant,
            quota_used=quota_used,
            kept_blocks=self._beside.kept_for_growth(),
        )

    def _acquired(self, attempt: PrefillAttempt, notice: storage.Acquired, now: float) -> None:
        self._claims.leave(attempt.attempt_id)
        attempt.acquired_at = now
        attempt.phase = "running"
        attempt.slots = notice.slots
        attempt.local_blocks = notice.local_blocks
        attempt.reused_blocks = attempt.committed_blocks = notice.local_blocks + notice.remote_blocks
        attempt.fetching = notice.remote_blocks > 0
        self._set_computed(attempt)
        if attempt.attempt_id in self._shared.leader_ids:
            attempt.followers = self._shared.followers(attempt.attempt_id)
            self._shared.committed(attempt.attempt_id, notice.local_blocks)
        start = attempt.start
        if not start.stays:
            self._out.append(storage.OpenHandOver(attempt.attempt_id, start.decode_store_address, start.decode_store_node_id))
            self._push_prefix(attempt)

    def _set_computed(self, attempt: PrefillAttempt) -> None:
        """Computation begins after the reused prefix."""
        attempt.computed = attempt.launched = attempt.reused_blocks * self._block_tokens
        attempt.work_ms = self._policy.work_ms(attempt.request.num_tokens, attempt.computed)
        attempt.due_at = self._policy.due_at(attempt)

    def _push_prefix(self, attempt: PrefillAttempt) -> None:
        """Hands over what is readable of the reused prefix, unless the whole prompt goes in one unit at the end."""
        if attempt.phase != "running" or attempt.start.stays or self._groups.in_one_unit(attempt.request.num_blocks):
            return
        local, reused = attempt.local_blocks, attempt.reused_blocks
        if attempt.pushed_blocks < local:
            self._out += self._groups.units(attempt.attempt_id, attempt.pushed_blocks, local)
            attempt.pushed_blocks = local
        remote = self._groups.units(attempt.attempt_id, local, reused, attempt.pushed_layers, attempt.layers_arrived, whole=False)
        for push in remote:
            self._out.append(push)
            attempt.pushed_layers = push.layer_end
        if not attempt.fetching:
            attempt.pushed_blocks = max(attempt.pushed_blocks, reused)

    def _fetched(self, attempt: PrefillAttempt, now: float) -> None:
        attempt.fetched(now, self._idle.until(now))
        self._shared.committed(attempt.attempt_id, attempt.reused_blocks)

    def _truncated(self, attempt: PrefillAttempt, valid_blocks: int, now: float) -> None:
        if valid_blocks < attempt.reused_blocks:
            attempt.truncate(valid_blocks, self._block_tokens)
            self._set_computed(attempt)
            self._passes.discard(attempt.attempt_id)
        self._fetched(attempt, now)
        attempt.pushed_layers = 0
        attempt.layers_arrived = self._groups.layers
        self._push_prefix(attempt)

    def _give_way(self, now: float) -> None:
        """Attempts in idle capacity give up their slots as soon as others wait for some."""
        lacking = self.lacking
        if lacking > 0 and not self._passes.held_back() and now >= self._room_awaited_until:
            self._take_from_idle(lacking, now)

    @property
    def waits_since(self) -> float:
        """As of Beside, of prompts."""
        return self._claims.oldest_at

    @property
    def lacking(self) -> int:
        """Slots that those who wait for some lack."""
        return max(0, self._claims.wanted_blocks + self._beside.kept_for_growth() - self._claims.available) if self._claims else 0

    def give_up(self, num_slots: int, now: float) -> list[Action]:
        """Has attempts in idle capacity give up so many slots, for those that decode here."""
        if self._passes.held_back() or now < self._room_awaited_until:
            return []
        self._take_from_idle(num_slots, now)
        actions, self._out = self._out, []
        return actions

    def _take_from_idle(self, num_slots: int, now: float, tenant: str | None = None) -> None:
        """Takes so many slots from those in idle capacity (of the tenant, if one is given), or all they have; who came last goes
        first."""
        if not self._num_idle:
            return
        idle = [one for one in self._attempts.values() if one.idle and one.phase == "running" and tenant in (None, one.request.tenant)]
        while idle and num_slots > 0:
            attempt = idle.pop()
            num_slots -= len(attempt.slots)
            self._room_awaited_until = now + MOST_ROOM_WAIT_S
            self._fail(attempt, Failure(FailureCode.PREEMPTED, "it was in idle capacity, which others want now"))

    def _wait_for_slots(self, now: float) -> None:
        for attempt_id in self._claims.expired(now):
            attempt = self._attempts[attempt_id]
            waited = now - attempt.arrived_at - attempt.awaited_s
            message = f"no {attempt.request.num_blocks} slots came free within {waited:.1f} s"
            self._fail(attempt, Failure(FailureCode.POOL_FULL, message))
        while self._claims and self._claims.oldest_at <= self._beside.waits_since:
            head = self._claims.next_to_ask(now, kept_blocks=self._beside.kept_for_growth())
            if head is None:
                return
            self._acquire(self._attempts[head], now)
            if self._attempts[head].phase != "awaiting":
                return

    def _store_lost(self, reason: str) -> None:
        self._claims.store_lost()
        for attempt in self._attempts.values():
            self._out.append(SendUpdate(attempt.session, AttemptFailed(attempt.attempt_id, Failure(FailureCode.PEER_LOST, reason))))
        self._passes.store_lost()
        self._shared.clear()
        self._attempts.clear()
        self._num_idle = 0

    # ---- passes ----

    def __contains__(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._attempts

    @property
    def budget_ms(self) -> float:
        """What the tokens of a pass alone may take."""
        return self._policy.chunking.budget_ms

    def own_ms(self, run: RunPass) -> float:
        """What the tokens of the pass were predicted to take."""
        return run.predicted_ms - self.cost.fixed_ms

    @property
    def holds_idle(self) -> bool:
        """Whether attempts in idle capacity hold slots."""
        return self._num_idle > 0 and any(one.idle and one.phase == "running" for one in self._attempts.values())

    @property
    def has_prompts(self) -> bool:
        """Whether there is something to compute that is not in idle capacity."""
        return any(not one.idle and one.runnable and not one.fetching for one in self._attempts.values())

    def give_way(self) -> list[GiveWay]:
        """Others have something to compute here: what is done about passes of idle work under way."""
        return [GiveWay(pass_id) for pass_id in self._passes.give_way()] if self._passes.idle_work else []

    def _break_off(self) -> None:
        """Passes of idle work end as soon as others have something to compute here, or want quiet."""
        if self._passes.idle_work and (
            self._idle_turns.quiet or any(not one.idle and one.unlaunched_tokens for one in self._attempts.values())
        ):
            self._out += self.give_way()

    def _pass_ended(self, event: ev.PassEnded, now: float) -> None:
        ended = self._passes.end(event.pass_id)
        if ended is None:
            return
        if isinstance(event, ev.PassDone):
            self._observe(ended, event, now)
            if ended.run.idle:
                self._idle_turns.had(now)
        self._out += ended.releases.values()
        waited_ms = event.waited_ms if isinstance(event, ev.PassDone | ev.PassInterrupted) else 0.0
        for i, row in enumerate(ended.run.rows):
            attempt = self._attempts.get(row.attempt_id)
            if attempt is None or row.attempt_id in ended.releases:
                continue
            discarded = row.attempt_id in ended.discarded
            attempt.fetch_wait_ms += waited_ms
            match event:
                case ev.PassFailed(_, message) if not discarded:
                    self._fail(attempt, Failure(FailureCode.INTERNAL, message))
                case ev.PassInterrupted(_, overdue) if not discarded:
                    self._interrupted(attempt, overdue)
                case ev.PassGaveWay() if not discarded:
                    # What is launched behind it builds on what it has not computed.
                    self._passes.discard(attempt.attempt_id)
                    attempt.launched = attempt.computed
                case ev.PassDone(_, sampled, elapsed_ms, _, scores):
                    attempt.compute_ms += elapsed_ms
                    if attempt.tally is not None:
                        chunk, others = row.chunk, len(ended.run.rows) - 1
                        attempt.tally.passed(ended.began_at, now, chunk.start, len(chunk.token_ids), others, waited_ms, event.stages)
                    if not discarded:
                        if row.scoring is not None:
                            attempt.scores.append(_scores_of(scores, i))
                        self._advance(attempt, len(row.chunk.token_ids), sampled[i], now)

    def _observe(self, ended: PassInFlight, event: ev.PassDone, now: float) -> None:
        """Passes of one sequence that waited for nothing show what the model predicts: all of it when they had the stages to themselves,
        the slowest stage's share when they came right behind another one of their size. Those that began some time after it had stages
        to themselves for a while."""
        if len(ended.run.rows) > 1 or ended.run.awaits is not None or event.shared:
            return
        if ended.run.scores or (ended.behind is not None and ended.behind.scores):
            # Logits of whole chunks are beside the model.
            return
        chunk, elapsed_ms = ended.run.rows[0].chunk, event.elapsed_ms
        if ended.behind is not None:
            if ended.late or [len(row.chunk.token_ids) for row in ended.behind.rows] != [len(chunk.token_ids)]:
                return
            elapsed_ms /= self.cost.slowest_share
        self._calibration.observe(len(chunk.token_ids), chunk.start, elapsed_ms, now)
        predicted_ms = self._settings.chunking.cost.predict_ms(len(chunk.token_ids), chunk.start)
        if not ended.run.idle and predicted_ms > 0:
            self._disturbance.observe(elapsed_ms / predicted_ms, event.beside_idle, now)

    def _interrupted(self, attempt: PrefillAttempt, overdue: bool) -> None:
        if overdue:
            self._fail(attempt, Failure(FailureCode.PEER_LOST, "the prefix did not arrive from its source in time"))
            return
        # The passes behind it build on what it has not computed.
        self._passes.discard(attempt.attempt_id)
        attempt.launched = attempt.computed
        attempt.stalled = attempt.fetching

    def _advance(self, attempt: PrefillAttempt, num_tokens: int, sampled: SampledToken | Failure | None, now: float) -> None:
        attempt.computed += num_tokens
        attempt.pushed_blocks = max(attempt.pushed_blocks, pushable_blocks(attempt, attempt.computed, self._groups, self._block_tokens))
        if attempt.fetching:
            # The pass has waited for every layer of the prefix, though the store's word of it has not been handled here yet.
            attempt.layers_arrived = self._groups.layers
            self._fetched(attempt, now)
            self._push_prefix(attempt)
        self._commit(attempt)
        if attempt.remaining_tokens == 0:
            assert sampled is not None, "the pass that ends a prompt samples its next token"
            if isinstance(sampled, Failure):
                self._fail(attempt, sampled)
            else:
                self._finish(attempt, sampled, now)

    def _commit(self, attempt: PrefillAttempt) -> None:
        complete = attempt.computed // self._block_tokens
        if complete > attempt.committed_blocks:
            keys = attempt.request.keys[attempt.committed_blocks : complete]
            self._out.append(storage.Commit(attempt.attempt_id, attempt.committed_blocks, keys))
            attempt.committed_blocks = complete
            self._shared.committed(attempt.attempt_id, complete)

    def _finish(self, attempt: PrefillAttempt, sampled: SampledToken, now: float) -> None:
        request = attempt.request
        output = token_output(attempt.attempt_id, (sampled,), request.first_position, request.params, self._settings.eos_token_ids)
        done = attempt.done(output, self._block_tokens, self._groups.bytes_per_slot, now)
        if attempt.start.stays and output.finish is None:
            self._out.append(Prefilled(done))
            self._take_off(attempt)
            return
        self._out.append(SendUpdate(attempt.session, done))
        if output.finish is not None:
            # Nothing is left to decode: the gateway aborts the decode side, and the hand-over with it.
            self._forget(attempt)
            return
        self._out.append(storage.Seal(attempt.attempt_id, sampled.token_id))
        self._out.append(storage.Release(attempt.attempt_id, finish_hand_over=True))
        self._shared.leave(attempt.attempt_id)
        attempt.phase = "handing-over"

    # ---- ends ----

    def _fail(self, attempt: PrefillAttempt, why: Failure) -> None:
        self._out.append(SendUpdate(attempt.session, AttemptFailed(attempt.attempt_id, why)))
        self._forget(attempt)

    def _forget(self, attempt: PrefillAttempt) -> None:
        """Gives its slots back, now or when the passes that use them have ended. A hand-over under way is cancelled."""
        attempt_id = attempt.attempt_id
        self._take_off(attempt)
        self._claims.leave(attempt_id)
        if attempt.phase in ("waiting", "awaiting"):
            return
        if not self._passes.hold_back(attempt):
            self._out.append(storage.Release(attempt_id))

    def _take_off(self, attempt: PrefillAttempt) -> None:
        del self._attempts[attempt.attempt_id]
        self._num_idle -= attempt.idle
        self._shared.leave(attempt.attempt_id)

    def _out_of_the_way(self, attempt: PrefillAttempt) -> int:
        """Tokens that the first stage is done with or, before the slots are there, that can be read at the best source, or another one
        computes."""
        if attempt.phase == "running":
            return attempt.computed + self._passes.tokens_of(attempt.attempt_id, left=True)
        blocks = max([attempt.shared_blocks, *(source.num_blocks for source in attempt.start.sources[:1])])
        return min(blocks * self._block_tokens, attempt.request.num_tokens - 1)


def _scores_of(scores: Sequence[PromptLogprobs | None], row: int) -> PromptLogprobs:
    own = scores[row]
    assert own is not None, "a row that wants scores has some"
    return own


def _slot_deadline(attempt: PrefillAttempt) -> float:
    budget_ms = attempt.start.ttft_budget_ms
    allowed_s = min(max(budget_ms / 1000, MIN_SLOT_WAIT_S), MAX_SLOT_WAIT_S) if budget_ms > 0 else MAX_SLOT_WAIT_S
    return attempt.arrived_at + attempt.awaited_s + allowed_s
