"""The decode node's decisions: `handle(event, now)` returns what is to be done.

Ownership of slots: from Reserved to Ingested the prefill side's store writes them, from Ingested to Release this engine does. While a step
or a load is in flight on them their Release is held back until it has ended.

Where steps compute apart from the slots, a prompt that has been handed over is loaded beside the steps of the others, and joins them when
that is done.

With overlap the next step is launched while one runs. What is known of it is everything but the tokens that it feeds: those are sampled by
then. A sequence that turns out to have ended takes part in one step more, of which nothing is used.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from statistics import median
from typing import NamedTuple, Protocol

from decode_node.core import admission_check, scheduling
from decode_node.core import events as ev
from decode_node.core.actions import Action, ComputePrompt, RunStep
from decode_node.core.attempt import DecodeAttempt, DecodePhase
from decode_node.core.drafting import Foretold, GuessPrice
from decode_node.core.in_flight import LoadsInFlight, StepInFlight, StepsInFlight
from decode_node.core.settings import DecodeSettings
from decode_node.core.slot_holders import SlotHolders
from node_runtime import events
from node_runtime.calibration import CostCalibration
from node_runtime.events import SendUpdate
from node_runtime.quiet import Disturbance, IdleTurns
from node_runtime.slot_claims import SlotClaims, acquire, patience_s
from springtide.clock import ObservedTime, Tick
from springtide.cost import DecodeCost
from springtide.ids import AttemptId
from springtide.protocol import storage
from springtide.protocol.instances import NO_IDLE_LOAD, IdleLoad, Load
from springtide.protocol.outputs import (
    NO_ROOM,
    AttemptFailed,
    AttemptSign,
    DecodeUpdate,
    Failure,
    FailureCode,
    SampledToken,
    TokenOutput,
    finish_of,
    token_output,
)
from springtide.protocol.sampling import Grammar
from springtide.protocol.scheduling import MOST_LACKING_BLOCKS
from springtide.protocol.starts import AbortAttempt, DecodeStart, ForetellTokens, PrefillStart
from springtide.protocol.timings import DecodeTimes

LEAST_INLINED, MOST_INLINED = 8, 2
"""Where prompts of any length are not computed here, the Conductor finds that at most `inline_tokens` are missing; of more than so many
times as many, but for a few tokens, blocks it counted on have gone since."""
_RECENT_STEPS = 32
_MOST_ROOM_WAIT_S = 1.0


class ForeseenStep(NamedTuple):
    """A step that has been launched: what it is predicted to take alone, and may take, by the least objective of those in it (inf: none
    has one). `idle`: it is of sequences in idle capacity alone."""

    predicted_ms: float
    objective_ms: float
    slots: Sequence[int]
    """Of all its sequences, where the device has pages for so many only."""
    idle: bool
    unguessed_ms: float = 0.0
    """What it is predicted to take less for each of the tokens that might have been guessed, and were not."""
    most_drafted: int = 0


class Prompts(Protocol):
    """Who computes prompts with the same engine, and has slots of the same store."""

    def recompute_us(self, num_tokens: int, blocks: int) -> int | None:
        """What each of a prompt's first `blocks` saves if it need not be computed; None: there are none."""
        ...

    @property
    def waits_since(self) -> float:
        """When the request of the oldest that waits for slots there arrived at its gateway; inf: nobody does."""
        ...

    @property
    def holds_idle(self) -> bool:
        """Whether attempts in idle capacity hold slots there."""
        ...

    def awaits_prefix(self, start: PrefillStart, arrived_at: float, shared_blocks: int) -> int:
        """How many blocks of this prompt, which is to be computed here, it is to wait for: another one computes them. 0: for none; then
        others may wait for those that it computes, until it `ends`. `shared_blocks`: those that it has waited for already."""
        ...

    def ends(self, attempt_id: AttemptId) -> None:
        """The attempt computes, or awaits, nothing any more."""
        ...


class NoPrompts(Prompts):
    """There are none but those that are decoded here."""

    def recompute_us(self, num_tokens: int, blocks: int) -> int | None:
        return None

    @property
    def waits_since(self) -> float:
        return math.inf

    @property
    def holds_idle(self) -> bool:
        return False

    def awaits_prefix(self, start: PrefillStart, arrived_at: float, shared_blocks: int) -> int:
        return 0

    def ends(self, attempt_id: AttemptId) -> None:
        pass


class DecodeCore:
    """The state of a decode node, and every decision."""

    def __init__(self, settings: DecodeSettings, prompts: Prompts | None = None) -> None:
        """`prompts`: who computes prompts with the same engine; None: nobody but for this core."""
        self._settings = settings
        self._prompts: Prompts = prompts or NoPrompts()
        self._calibration: CostCalibration[DecodeCost] = CostCalibration(settings.cost)
        self._attempts: dict[AttemptId, DecodeAttempt] = {}
        self._holders = SlotHolders(settings.max_batch, settings.block_tokens)
        self._claims = SlotClaims()
        self._steps = StepsInFlight()
        self._loads = LoadsInFlight()
        self._room_awaited_until = float("-inf")
        """Slots were taken from an attempt that a peer may still be writing, or from one in idle capacity: until they are here, or then,
        nobody else gives way."""
        self._guess_price = GuessPrice()
        self._disturbance = Disturbance(settings.idle_slowdown)
        self._idle_turns = IdleTurns()
        self._recent_ms: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._observed = ObservedTime(events.MOST_BETWEEN_TICKS_S)
        self._orders: list[Action] = []
        self._replies: list[SendUpdate[DecodeUpdate]] = []

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """A step is launched before the last one's tokens are sent. Late, duplicate and unknown messages change nothing."""
        match event:
            case events.Start(session, start):
                self._start(session, start, now)
            case AbortAttempt(attempt_id):
                if attempt_id in self._attempts:
                    self._forget(self._attempts[attempt_id])
            case ForetellTokens():
                self._foretell(event)
            case events.SessionEnded(session):
                for attempt in [a for a in self._attempts.values() if a.session == session]:
                    self._forget(attempt)
            case ev.StepDone() | ev.StepFailed():
                self._step_ended(event, now)
            case ev.Loaded(attempt_id):
                self._loaded(attempt_id)
            case ev.PromptComputed() | ev.PromptFailed():
                self._on_prompt(event, now)
            case ev.PrefixShared():
                self._go_on(event, now)
            case Tick():
                self._calibration.tick(now)
                self._observed.look(now)
                self._fail_unanswered()
                self._expire(now)
                self._retry_growth()
            case events.Quiet(wanted):
                self._idle_turns.quiet = wanted
            case events.StoreConnected(num_slots, pages):
                self._claims.store_connected(num_slots, pages)
            case events.StoreLost(reason):
                self._store_lost(reason)
            case storage.StoreLoad():
                self._claims.available = event.slots_available
                if event.slots_available:
                    self._room_awaited_until = float("-inf")
                    self._retry_growth()
            case _:
                self._notice(event, now)
        self._give_way(now)
        self._make_room(now)
        self._ask_for_waiting(now)
        self._load_ahead()
        while not self._settings.mixes and (run := self.launch(now)) is not None:
            self._orders.append(run)
        actions = [*self._orders, *self._replies]
        self._orders, self._replies = [], []
        return actions

    def launch(self, now: float, others_wait: bool = False) -> RunStep | None:
        """Begins a step, if there is room for one and something to run. `others_wait`: there are prompts here, not in idle capacity. They
        are computed with the step, and have all that it leaves of the objectives: nothing is guessed then. What is foretold is computed all
        the same: the sooner a sequence has moved, the sooner one of its two attempts ends."""
        settings, turns = self._settings, self._idle_turns
        turns.look(any(attempt.phase == "running" for attempt in self._holders.idle), now)
        if self._claims.num_slots is None or len(self._steps) >= (2 if settings.overlap else 1):
            return None
        pages, slowdown = self._claims.pages, settings.idle_slowdown
        batch = scheduling.choose(self._holders, self.cost, settings.max_batch, settings.block_tokens, pages, slowdown)
        # Who comes now is not to wait for more than one step of those that have time. They come last in a batch.
        if not batch or (batch[0].idle and (self._steps or others_wait or not turns.may_begin(now))):
            return None
        most = 0 if others_wait or self._guess_price.compares else settings.most_drafted
        return self._steps.launch(batch, scheduling.drafts(batch, self.cost, self._guess_price, most, settings.block_tokens), now)

    def foreseen(self) -> ForeseenStep:
        """What is known beforehand of the step that was launched last."""
        step = self._steps.last
        return self._foresee(step.attempts, step.objective_ms, step.run.most_drafted)

    def foreseen_next(self) -> ForeseenStep | None:
        """The same of a step of all that run, as far as it has places; None: none runs."""
        running = [attempt for attempt in self._holders if attempt.phase == "running"][: self._settings.max_batch]
        return self._foresee(running, min(attempt.objective_ms for attempt in running)) if running else None

    @property
    def promised_objective_ms(self) -> float:
        """The least objective for the time between tokens of those outputs, not in idle capacity, whose prompts are on their way here; inf:
        there are none."""
        promised = (one.objective_ms for one in self._holders if one.phase == "ingesting" and not one.idle)
        return min(promised, default=math.inf)

    def _foresee(self, attempts: Sequence[DecodeAttempt], objective_ms: float, most_drafted: int = 0) -> ForeseenStep:
        without_ms = self.cost.predict_ms(len(attempts), sum(attempt.context_tokens for attempt in attempts))
        guess_ms = self._guess_price.row_ms(self.cost, without_ms)
        slots = [slot for attempt in attempts for slot in attempt.slots] if self._claims.pages is not None else ()
        predicted_ms = without_ms + most_drafted * guess_ms
        return ForeseenStep(predicted_ms, objective_ms, slots, attempts[0].idle, guess_ms, most_drafted)

    @property
    def has_runnable(self) -> bool:
        """Whether a sequence that is not in idle capacity waits for a step."""
        block_tokens = self._settings.block_tokens
        return any(
            one.phase == "running" and not one.idle and not one.ahead and one.continues and not one.lacks_slot(block_tokens)
            for one in self._holders
        )

    def kept_for_growth(self, tenant: str | None = None) -> int:
        """Slots that prompts which are decoded elsewhere leave to those that decode here (of the tenant's quota, if one is given)."""
        return self._holders.kept_for_growth(None, tenant)

    @property
    def waits_since(self) -> float:
        """When the request of the oldest that waits for slots here arrived at its gateway; inf: nobody does, or none has a place."""
        return self._claims.oldest_at if self._claims and self._holders.has_place else math.inf

    @property
    def lacking(self) -> int:
        """Slots that those who run, or wait for some with a place in the batch, lack."""
        lacking = self._holders.num_starving
        if self._claims and self._holders.has_place:
            lacking += max(0, self._claims.wanted_blocks + self._holders.kept_for_growth() - self._claims.available)
        return lacking

    def give_up(self, num_slots: int, now: float) -> list[Action]:
        """Has attempts in idle capacity give up so many slots, for prompts."""
        if self._held_back() or now < self._room_awaited_until:
            return []
        self._take_from_idle(num_slots, now)
        actions: list[Action] = [*self._orders, *self._replies]
        self._orders, self._replies = [], []
        return actions

    def inlined(self, *phases: DecodePhase) -> Set[AttemptId]:
        """The attempts in these phases whose prompts are computed here."""
        return {attempt.attempt_id for attempt in self._attempts.values() if attempt.inlined and attempt.phase in phases}

    def session_of(self, attempt_id: AttemptId) -> int | None:
        """Of the gateway that has ordered it; None: it is not here."""
        attempt = self._attempts.get(attempt_id)
        return None if attempt is None else attempt.session

    @property
    def has_idle(self) -> bool:
        """Whether attempts in idle capacity are here."""
        return self._holders.has_idle

    @property
    def idle_work(self) -> bool:
        """Whether any is under way, apart from what others' steps have in them."""
        return self._steps.idle_work

    @property
    def slowdown(self) -> float:
        """As of Disturbance."""
        return self._disturbance.slowdown

    def wants_quiet(self, now: float) -> bool:
        """Whether the machine's other engines are to rest from idle work: steps of others run here, and are slowed by it."""
        return self._disturbance.wanted(now) and any(attempt.has_begun and not attempt.idle for attempt in self._holders)

    @property
    def cost(self) -> DecodeCost:
        """The cost model, as steps lately were."""
        return self._calibration.cost

    @property
    def has_work(self) -> bool:
        """Whether attempts are here."""
        return len(self._attempts) > 0

    @property
    def has_waiting(self) -> bool:
        """Whether some of them have not begun, those in idle capacity apart."""
        return any(not attempt.has_begun and not attempt.idle for attempt in self._attempts.values())

    def load(self, slots_total: int, slots_available: int) -> Load:
        """How the node is doing; these slots, and more, only the store knows. Of a device that has room for fewer, those are told that it
        can compute with: of more sequences some would wait until others end."""
        if (pages := self._claims.pages) is not None:
            begun = (attempt.slots for attempt in self._holders if attempt.has_begun)
            left = max(0, pages - len(set(itertools.chain.from_iterable(begun))))
            slots_total, slots_available = min(slots_total, pages), min(slots_available, left)
        running = tokens = 0
        promised, block_tokens = self._claims.wanted_blocks, self._settings.block_tokens
        idle = self._holders.idle
        for attempt in self._holders:
            if attempt.idle:
                break
            promised += attempt.growth_blocks(block_tokens)
            if attempt.has_begun:
                running += 1
                tokens += attempt.context_tokens
            elif attempt.phase == "reserving" and attempt.attempt_id not in self._claims:
                promised += attempt.request.num_blocks
        for attempt in self._attempts.values():
            if attempt.phase == "awaiting" and not attempt.idle:
                promised += attempt.request.num_blocks - attempt.shared_blocks + attempt.growth_blocks(block_tokens)
        return Load(
            running=running,
            waiting=sum(not attempt.idle for attempt in self._attempts.values()) - running,
            tokens=tokens,
            step_ms=median(self._recent_ms) if self._recent_ms else 0.0,
            slots_total=slots_total,
            slots_available=slots_available,
            slots_promised=promised,
            max_batch=self._settings.max_batch,
            attempt_ids=frozenset(self._attempts),
            decode_cost=self.cost,
            idle=self._idle_load(idle) if idle else NO_IDLE_LOAD,
        )

    def _idle_load(self, idle: Sequence[DecodeAttempt]) -> IdleLoad:
        """Of these, which are all that are in idle capacity."""
        return IdleLoad(
            running=len(idle),
            tokens=sum(attempt.context_tokens for attempt in idle),
            slots_held=sum(len(attempt.slots) for attempt in idle),
            slots_promised=sum(
                attempt.growth_blocks(self._settings.block_tokens) + (attempt.request.num_blocks if attempt.phase == "reserving" else 0)
                for attempt in idle
            ),
        )

    def signs(self) -> Iterator[tuple[int, AttemptSign]]:
        """Signs of how each attempt gets on, with its session; of prompts that are computed here, who computes them has some."""
        for attempt in self._attempts.values():
            if attempt.phase == "prefilling":
                continue
            computed = attempt.context_tokens if attempt.has_begun else 0
            at_work = attempt.phase in ("reserving", "loading") or attempt.ahead > 0
            yield attempt.session, AttemptSign(attempt.attempt_id, computed, waiting=not at_work)

    def validate(self) -> None:
        """Asserts the invariants."""
        block = self._settings.block_tokens
        for attempt in self._attempts.values():
            assert (attempt.phase == "waiting") <= (attempt.attempt_id in self._claims)
            assert (attempt.phase not in ("waiting", "awaiting")) == (attempt in self._holders)
            if attempt.phase not in ("waiting", "awaiting", "reserving"):
                assert attempt.attempt_id not in self._claims
                assert attempt.request.num_blocks <= len(attempt.slots) <= max(attempt.most_blocks, attempt.request.num_blocks)
            if attempt.has_begun:
                assert attempt.committed_blocks * block <= attempt.context_tokens - 1
                assert 1 <= len(attempt.output_ids) < attempt.request.params.max_tokens
                assert len(attempt.output_ids) + attempt.ahead <= attempt.request.params.max_tokens
                assert attempt.most_planned_tokens - 1 <= len(attempt.slots) * block
            if attempt.phase == "loading":
                assert self._settings.loads_ahead and not attempt.inlined and not attempt.ahead
            else:
                assert attempt.attempt_id not in self._loads.attempt_ids
            if attempt.phase == "prefilling":
                assert attempt.inlined and not attempt.ahead and attempt.attempt_id not in self._claims
            assert attempt.ahead == sum(attempt in step.attempts for step in self._steps)
            rows = (row for step in self._steps for row in step.run.rows if row.attempt_id == attempt.attempt_id)
            assert attempt.drafted_ahead == sum(row.most_drafted for row in rows)
        assert all(attempt_id in self._attempts for attempt_id in self._claims)
        assert all(self._attempts.get(attempt.attempt_id) is attempt for attempt in self._holders)
        assert not any(self._attempts[attempt_id].idle for attempt_id in self._claims), "nobody waits here for idle capacity"
        self._holders.validate()
        if self._claims.num_slots is None:
            assert not self._attempts
        assert len(self._steps) <= (2 if self._settings.overlap else 1)
        assert all(0 < len(step.run.rows) <= self._settings.max_batch for step in self._steps)
        assert not any(attempt_id in self._attempts for attempt_id in self._held_back())
        assert all(attempt_id in self._attempts or attempt_id in self._loads.held_back() for attempt_id in self._loads.attempt_ids)

    # ---- gateways ----

    def grammar_of(self, attempt_id: AttemptId) -> Grammar:
        """What the attempt's output is held to; to nothing where there is no such attempt."""
        attempt = self._attempts.get(attempt_id)
        return Grammar() if attempt is None else attempt.request.params.grammar

    def _start(self, session: int, start: DecodeStart, now: float) -> None:
        request = start.request
        attempt_id = request.attempt_id
        if attempt_id in self._attempts or attempt_id in self._held_back():
            return
        attempt = DecodeAttempt.of(session, start, now, self._settings.block_tokens)
        if self._claims.num_slots is None:
            self._reply_failure(attempt, FailureCode.PEER_LOST, "the node's store is away")
        elif attempt.most_blocks > self._claims.num_slots:
            message = f"the sequence may come to need {attempt.most_blocks} blocks, the arena has {self._claims.num_slots} slots"
            self._reply_failure(attempt, FailureCode.INVALID, message)
        elif (
            not attempt.idle
            and start.refusable
            and (why := admission_check.refusal(self.cost, self._holders, attempt, self._settings.max_batch))
        ):
            self._reply_failure(attempt, FailureCode.OVERLOADED, why)
        else:
            self._admit(attempt, now)

    def _admit(self, attempt: DecodeAttempt, now: float) -> None:
        """Takes it in, to reserve its slots at once or to wait for them; or refuses it."""
        request, attempt_id = attempt.request, attempt.attempt_id
        if attempt.idle:
            self._start_idle(attempt, now)
        elif (
            self._claims.goes_before(request.tenant)
            or not self._holders.has_place
            or request.tenant in self._holders.starving_tenants
            or self._prompts.waits_since < attempt.requested_at
        ):
            if attempt.waits or self._room_comes(now):
                self._attempts[attempt_id] = attempt
                self._claims.wait(
                    attempt_id,
                    request.num_blocks,
                    attempt.requested_at,
                    self._slot_deadline(attempt),
                    tenant=request.tenant,
                    growth_blocks=attempt.growth_blocks(self._settings.block_tokens),
                    continues=request.continues,
                )
            else:
                self._reply_failure(attempt, FailureCode.POOL_FULL, "others wait for room here")
        else:
            self._attempts[attempt_id] = attempt
            self._reserve(attempt, now)

    def _start_idle(self, attempt: DecodeAttempt, now: float) -> None:
        """Takes it in where nobody else wants the place or the slots. It does not wait here: its gateway looks for idle capacity anew."""
        waited_for = len(self._claims) or self._holders.refused or self._prompts.waits_since < math.inf
        if waited_for or len(self._holders) >= self._settings.max_batch:
            self._reply_failure(attempt, FailureCode.POOL_FULL, "there is no idle capacity here")
            return
        self._attempts[attempt.attempt_id] = attempt
        self._reserve(attempt, now)

    # ---- store ----

    def _reserve(self, attempt: DecodeAttempt, now: float) -> None:
        if attempt.inlined and (blocks := self._prompts.awaits_prefix(attempt.prompt, attempt.arrived_at, attempt.shared_blocks)):
            self._claims.leave(attempt.attempt_id)
            attempt.phase, attempt.shared_blocks, attempt.awaited_s = "awaiting", blocks, attempt.awaited_s - now
            return
        leave_available = self._holders.kept_for_growth(attempt)
        leave_in_quota = self._holders.kept_for_growth(attempt, attempt.request.tenant)
        attempt.phase = "reserving"
        attempt.asked_at = now
        attempt.answer_due_at = self._observed.now + patience_s(attempt.start.sources, self._settings.answer_s)
        self._enter(attempt, now)
        request = attempt.request
        self._orders.append(
            acquire(request, attempt.start.sources, self._prompts.recompute_us, leave_available, leave_in_quota)
            if attempt.inlined
            else storage.Reserve(request.attempt_id, request.keys, request.num_blocks, request.tenant, leave_available, leave_in_quota)
        )

    def _go_on(self, shared: ev.PrefixShared, now: float) -> None:
        """What it waited for is here, or will not come: it begins as if it had come now."""
        attempt = self._attempts.get(shared.attempt_id)
        if attempt is not None and attempt.phase == "awaiting":
            del self._attempts[shared.attempt_id]
            attempt.phase, attempt.shared_blocks, attempt.awaited_s = "waiting", shared.blocks, attempt.awaited_s + now
            self._admit(attempt, now)

    def _enter(self, attempt: DecodeAttempt, now: float) -> None:
        """It takes its place, for which the youngest in idle capacity makes room."""
        self._holders.enter(attempt)
        if len(self._holders) > self._settings.max_batch:
            self._preempt(self._holders.youngest, now)

    def _notice(self, notice: storage.Notice, now: float) -> None:
        if isinstance(notice, storage.StoreLoad):
            return
        attempt = self._attempts.get(notice.attempt_id)
        if attempt is None or attempt.phase == "prefilling":
            return
        match notice:
            case storage.Reserved(_, slots) if attempt.phase == "reserving":
                self._claims.leave(attempt.attempt_id)
                attempt.phase, attempt.slots = "ingesting", slots
                if attempt.tally is not None:
                    attempt.tally.slots_at = now
                attempt.lease_until = now + self._settings.ingest_lease_s
                if attempt.waits:
                    self._replies.append(SendUpdate(attempt.session, DecodeUpdate(reserved=(attempt.attempt_id,))))
                self._grow_ahead(attempt)
            case storage.Acquired() if attempt.phase == "reserving":
                self._claims.leave(attempt.attempt_id)
                if attempt.tally is not None:
                    attempt.tally.slots_at = now
                self._acquired(attempt, notice)
            case storage.Ingested(_, first_token) if attempt.phase == "ingesting":
                if attempt.tally is not None:
                    attempt.tally.prompt_at = now
                self._ingested(attempt, first_token, now)
            case storage.Grown(_, slots) if attempt.growth == "asked":
                attempt.slots += slots
                attempt.growth, attempt.starved_since = "none", None
                self._grow_ahead(attempt)
            case AttemptFailed(_, failure) if failure.code in NO_ROOM and attempt.phase == "reserving":
                attempt.phase = "waiting"
                self._holders.leave(attempt)
                self._no_room(attempt, failure, now)
            case AttemptFailed(_, failure) if failure.code in NO_ROOM and attempt.growth == "asked":
                self._holders.refuse_growth(attempt, quota_used=failure.code is FailureCode.QUOTA_USED)
                if attempt.quota_used and not attempt.idle:
                    self._take_from_idle(1, now, attempt.request.tenant)
            case AttemptFailed(_, failure):
                self._fail(attempt, failure.code, failure.message)

    def _no_room(self, attempt: DecodeAttempt, failure: Failure, now: float) -> None:
        request = attempt.request
        self._prompts.ends(attempt.attempt_id)
        if failure.code is FailureCode.QUOTA_USED and not attempt.idle:
            self._take_from_idle(request.num_blocks, now, request.tenant)
        if attempt.idle or not (attempt.waits or self._room_comes(now)):
            self._fail(attempt, failure.code, failure.message)
            return
        self._claims.refused(
            attempt.attempt_id,
            request.num_blocks,
            attempt.requested_at,
            self._slot_deadline(attempt),
            now,
            tenant=request.tenant,
            growth_blocks=attempt.growth_blocks(self._settings.block_tokens),
            quota_used=failure.code is FailureCode.QUOTA_USED,
            kept_blocks=self._holders.kept_for_growth(attempt),
        )

    def _slot_deadline(self, attempt: DecodeAttempt) -> float:
        return attempt.arrived_at + attempt.awaited_s + self._settings.slot_wait_s

    def _acquired(self, attempt: DecodeAttempt, acquired: storage.Acquired) -> None:
        attempt.slots, most = acquired.slots, self._settings.inline_tokens
        held_blocks = acquired.local_blocks + acquired.remote_blocks
        missing = attempt.request.num_tokens - held_blocks * self._settings.block_tokens
        if most is not None and missing > MOST_INLINED * max(most, LEAST_INLINED) + self._come_since(attempt):
            # The gateway has it scheduled away from the node that failed it: where its prefix is, or at a prefill group.
            self._fail(attempt, FailureCode.INTERNAL, f"{missing} tokens of the prompt are not here, of {most} that are computed here")
            return
        attempt.phase = "prefilling"
        self._orders.append(ComputePrompt(attempt.prompt, acquired, attempt.arrived_at, attempt.asked_at))

    def _come_since(self, attempt: DecodeAttempt) -> int:
        """Tokens of a sequence that moves here while it runs, which may have come since its prefix was committed elsewhere."""
        return MOST_LACKING_BLOCKS * self._settings.block_tokens if attempt.request.continues else 0

    def _ingested(self, attempt: DecodeAttempt, first_token: int, now: float) -> None:
        request = attempt.request
        if finish_of(first_token, request.first_position + 1, request.params, self._settings.eos_token_ids):
            # The prefill side has told the gateway so: nothing is left to say.
            self._forget(attempt)
            return
        attempt.ready_since = now
        attempt.begin(first_token, self._settings.block_tokens, loads=self._settings.loads_ahead)
        self._grow_ahead(attempt)

    def _on_prompt(self, event: ev.PromptComputed | ev.PromptFailed, now: float) -> None:
        attempt_id = event.done.output.attempt_id if isinstance(event, ev.PromptComputed) else event.attempt_id
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.phase != "prefilling":
            if isinstance(event, ev.PromptComputed) and event.done.output.finish is None:
                # It was given up at the very moment in which it was computed: who computed it has its slots no more.
                self._orders.append(storage.Release(attempt_id))
            return
        match event:
            case ev.PromptComputed(done):
                told = replace(done, most_foretold=self._settings.most_foretold)
                self._replies.append(SendUpdate(attempt.session, DecodeUpdate(prefilled=(told,))))
                if done.output.finish is not None:
                    self._take_off(attempt)
                    return
                if attempt.tally is not None:
                    attempt.tally.prompt_at = now
                attempt.begin(done.output.tokens[0].token_id, self._settings.block_tokens)
                self._grow_ahead(attempt)
            case ev.PromptFailed(_, failure):
                self._reply_failure(attempt, failure.code, failure.message)
                self._take_off(attempt)

    def _foretell(self, told: ForetellTokens) -> None:
        attempt = self._attempts.get(told.attempt_id)
        if attempt is not None and self._settings.most_foretold:
            attempt.foretold = attempt.foretold or Foretold(self._settings.most_foretold)
            attempt.foretold.add(told.position, told.token_ids)
            if attempt.has_begun:
                self._grow_ahead(attempt)

    def _store_lost(self, reason: str) -> None:
        self._claims.store_lost()
        for attempt in self._attempts.values():
            self._reply_failure(attempt, FailureCode.PEER_LOST, reason)
        self._attempts.clear()
        self._holders.clear()
        self._steps.store_lost()
        self._loads.store_lost()

    # ---- slots ----

    def _ask_for_waiting(self, now: float) -> None:
        while self._claims and self._holders.has_place and self._claims.oldest_at <= self._prompts.waits_since:
            alone = all(attempt.idle for attempt in self._holders)
            kept_blocks, held_back = self._holders.kept_for_growth(), self._holders.starving_tenants
            head = self._claims.next_to_ask(now, kept_blocks=kept_blocks, alone=alone, held_back=held_back)
            if head is None:
                return
            self._reserve(self._attempts[head], now)
            if self._attempts[head].phase != "awaiting":
                return

    def _grow_ahead(self, attempt: DecodeAttempt) -> None:
        """Asks for the next slot while there is still room in the last one, so that no step waits for it."""
        if attempt.growth == "none" and attempt.wants_slot(self._settings.block_tokens):
            attempt.growth = "asked"
            attempt.answer_due_at = self._observed.now + self._settings.answer_s
            self._orders.append(storage.Grow(attempt.attempt_id, 1))

    def _retry_growth(self) -> None:
        for attempt in self._holders.ask_again():
            self._grow_ahead(attempt)

    def _give_way(self, now: float) -> None:
        """Those in idle capacity give up slots as soon as others want them, not only when those lack them to go on."""
        if not self._holders.has_idle:
            return
        lacking = self.lacking
        if lacking and not self._held_back() and now >= self._room_awaited_until:
            self._take_from_idle(lacking, now)

    def _take_from_idle(self, num_slots: int, now: float, tenant: str | None = None) -> None:
        """Takes so many slots from those in idle capacity (of the tenant, if one is given), or all they have: the youngest go first."""
        for attempt in reversed([one for one in self._holders.idle if tenant in (None, one.request.tenant)]):
            if num_slots <= 0:
                return
            num_slots -= len(attempt.slots)
            self._preempt(attempt, now)

    def _preempt(self, attempt: DecodeAttempt, now: float) -> None:
        """Takes everything from an attempt in idle capacity."""
        assert attempt.idle
        self._room_awaited_until = now + _MOST_ROOM_WAIT_S
        self._fail(attempt, FailureCode.PREEMPTED, "it was in idle capacity, which others want now")

    def _room_comes(self, now: float) -> bool:
        """Whether there is, or soon will be, more room than the store knows: those in idle capacity have it, or had until now."""
        return bool(self._held_back()) or now < self._room_awaited_until or any(one.slots for one in self._holders.idle)

    def _make_room(self, now: float) -> None:
        """When a sequence sits out steps because the pool, or its tenant's part of it, is truly full, the youngest that holds slots gives
        them up, whatever it is at: the gateway schedules it again with what it has generated, and it keeps its age. The oldest is never
        preempted, so work always ends."""
        starved = self._holders.starved
        if not starved or self._held_back() or now < self._room_awaited_until or self._prompts.holds_idle:
            return
        for attempt in starved:
            tenant = attempt.request.tenant if attempt.quota_used else None
            holders = [one for one in self._holders if tenant in (None, one.request.tenant)]
            if len(holders) > 1:
                youngest = holders[-1]
                if youngest.phase in ("reserving", "ingesting", "prefilling"):
                    self._room_awaited_until = now + _MOST_ROOM_WAIT_S
                self._fail(youngest, FailureCode.PREEMPTED, "its slots were needed by an older request")
                return
            # Alone: leases, pins, or slots that a peer may still write hold the rest for a while.
            if attempt.starved_since is None:
                attempt.starved_since = now

    def _expire(self, now: float) -> None:
        for attempt_id in self._claims.expired(now):
            attempt = self._attempts[attempt_id]
            message = f"no {attempt.request.num_blocks} slots came free within {self._settings.slot_wait_s:g} s"
            self._fail(attempt, FailureCode.POOL_FULL, message)
        for attempt in list(self._holders):
            if attempt.phase == "ingesting" and now >= attempt.lease_until:
                # A prefill side that hangs is found out by its silence: this one has too much to do.
                message = f"the prompt was not handed over within {self._settings.ingest_lease_s:g} s"
                self._fail(attempt, FailureCode.POOL_FULL, message)
            elif attempt.starved_since is not None and now >= attempt.starved_since + self._settings.slot_wait_s:
                # There may be room elsewhere by now.
                self._fail(attempt, FailureCode.POOL_FULL, f"no slot came free within {self._settings.slot_wait_s:g} s")

    def _fail_unanswered(self) -> None:
        asking = [attempt for attempt in self._holders if attempt.phase == "reserving" or attempt.growth == "asked"]
        for attempt in asking:
            if self._observed.now >= attempt.answer_due_at:
                self._fail(attempt, FailureCode.PEER_LOST, "the node's store did not answer when it was asked for slots")

    def _held_back(self) -> Sequence[AttemptId]:
        """The attempts that have ended, but whose slots are in use."""
        return [*self._steps.held_back(), *self._loads.held_back()]

    # ---- loads ----

    def _load_ahead(self) -> None:
        if not self._settings.loads_ahead:
            return
        for attempt in scheduling.to_load(self._holders, self._loads.attempt_ids, self._claims.pages):
            self._orders.append(self._loads.launch(attempt))

    def _loaded(self, attempt_id: AttemptId) -> None:
        if attempt_id not in self._loads.attempt_ids:
            return
        release = self._loads.end(attempt_id)
        if release is None:
            self._attempts[attempt_id].phase = "running"
        else:
            self._orders.append(release)
            self._retry_growth()

    # ---- steps ----

    def _step_ended(self, event: ev.StepDone | ev.StepFailed, now: float) -> None:
        ended = self._steps.end(event.step_id)
        if ended is None:
            return
        self._orders += ended.releases.values()
        if ended.releases:
            self._retry_growth()
        if ended.attempts[-1].idle:
            self._idle_turns.had(now)
        told: defaultdict[int, tuple[list[TokenOutput], list[DecodeTimes]]] = defaultdict(lambda: ([], []))
        for i, attempt in enumerate(ended.attempts):
            if self._attempts.get(attempt.attempt_id) is not attempt:
                continue
            if isinstance(event, ev.StepFailed):
                self._fail(attempt, FailureCode.INTERNAL, event.message)
                continue
            sampled = event.sampled[i]
            if isinstance(sampled, Failure):
                self._fail(attempt, sampled.code, sampled.message)
                continue
            if ended.run.rows[i].lookup is not None:
                if event.drafted and event.drafted[i]:
                    attempt.guessing.observe(event.drafted[i], len(sampled) - 1)
                else:
                    attempt.guessing.unfound()
            output = self._append(attempt, sampled)
            told[attempt.session][0].append(output)
            if (tally := attempt.tally) is not None:
                first = not tally.steps
                tally.stepped(event.elapsed_ms, 1 if event.drafted else len(sampled))
                if first or output.finish is not None:
                    told[attempt.session][1].append(attempt.times(tally, now))
        self._replies += [
            SendUpdate(session, DecodeUpdate(tuple(outputs), times=tuple(times))) for session, (outputs, times) in told.items()
        ]
        if isinstance(event, ev.StepDone):
            self._recent_ms.append(event.between_tokens_ms)
        if isinstance(event, ev.StepDone) and not event.shared:
            self._observe(ended, event, now)

    def _observe(self, ended: StepInFlight, done: ev.StepDone, now: float) -> None:
        """The step took so long, with nothing but its sequences in it. With guesses, that tells what these take, and nothing else."""
        counts = [1 if isinstance(tokens, Failure) else len(tokens) for tokens in done.sampled]
        batch = sum(count > 0 for count in counts)
        if not batch:
            return
        context, drafted = ended.run.context_tokens, sum(done.drafted)
        if drafted:
            self._guess_price.observe(drafted, done.elapsed_ms - self.cost.predict_ms(batch, context))
            return
        self._guess_price.unguessed()
        context += batch * (max(counts) - 1) // 2
        self._calibration.observe(batch, context, done.elapsed_ms, now)
        predicted_ms = self._settings.cost.predict_ms(batch, context)
        if not ended.idle and predicted_ms > 0:
            self._disturbance.observe(done.elapsed_ms / predicted_ms, done.beside_idle, now)

    def _append(self, attempt: DecodeAttempt, sampled: Sequence[SampledToken]) -> TokenOutput:
        """The step has computed the KV of the attempt's last token and sampled the next, and maybe so on."""
        request, position = attempt.request, len(attempt.output_ids)
        attempt.output_ids += [token.token_id for token in sampled]
        first_block = attempt.committed_blocks
        keys = attempt.complete_blocks(self._settings.block_tokens)
        if keys:
            self._orders.append(storage.Commit(attempt.attempt_id, first_block, keys))
        output = token_output(attempt.attempt_id, sampled, position, request.params, self._settings.eos_token_ids)
        if output.finish is not None:
            self._forget(attempt)
        else:
            self._grow_ahead(attempt)
        return output

    # ---- ends ----

    def _fail(self, attempt: DecodeAttempt, code: FailureCode, message: str) -> None:
        self._reply_failure(attempt, code, message)
        self._forget(attempt)

    def _reply_failure(self, attempt: DecodeAttempt, code: FailureCode, message: str) -> None:
        failed = AttemptFailed(attempt.attempt_id, Failure(code, message))
        self._replies.append(SendUpdate(attempt.session, DecodeUpdate(failed=(failed,))))

    def _forget(self, attempt: DecodeAttempt) -> None:
        """Gives its slots back, now or when the steps or the load that use them have ended; whoever lacks a slot asks again."""
        attempt_id = attempt.attempt_id
        self._take_off(attempt)
        if attempt.phase in ("waiting", "awaiting"):
            return
        if attempt.phase == "prefilling":
            self._orders.append(AbortAttempt(attempt_id))
            self._retry_growth()
            return
        if not self._steps.hold_back(attempt) and not self._loads.hold_back(attempt):
            self._orders.append(storage.Release(attempt_id))
            self._retry_growth()

    def _take_off(self, attempt: DecodeAttempt) -> None:
        del self._attempts[attempt.attempt_id]
        self._holders.leave(attempt)
        self._claims.leave(attempt.attempt_id)
        self._prompts.ends(attempt.attempt_id)
