"""The decisions of an engine that prefills and decodes: the cores of both kinds of node over one model and one store.

Each of the two decides what it decides alone. This one says when: a step of all sequences that run, and with it a chunk of those prompts
that have the least relative slack, as long as the objectives for the time between tokens allow. A prompt that is decoded here goes from the
one core to the other with its slots; nothing is handed over.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from decode_node.core import DecodeCore
from decode_node.core import events as decoding
from decode_node.core.actions import Action as DecodeAction
from decode_node.core.actions import ComputePrompt, RunStep
from decode_node.core.core import ForeseenStep
from decode_node.core.settings import DecodeSettings
from mixed_node.core import events as ev
from mixed_node.core.actions import Action, RunMixed
from mixed_node.core.mixing import MixedCost
from node_runtime import events
from node_runtime.events import SendUpdate
from prefill_node.core import PrefillCore
from prefill_node.core import events as prefilling
from prefill_node.core.actions import Action as PrefillAction
from prefill_node.core.actions import Prefilled, PrefixShared, RunPass
from prefill_node.core.core import Beside
from prefill_node.core.scheduling import WithStep
from prefill_node.core.settings import PrefillSettings
from springtide.clock import Tick
from springtide.protocol import storage
from springtide.protocol.instances import Load
from springtide.protocol.outputs import AttemptFailed, AttemptSign, PrefillDone, PrefillUpdate
from springtide.protocol.starts import AbortAttempt, DecodeStart, ForetellTokens, PrefillStart
from springtide.values import value_class


class _Outputs(Beside):
    """The decode core, as the prefill core sees it, which is made first."""

    def __init__(self, mixed: MixedCore) -> None:
        self._mixed = mixed

    def kept_for_growth(self, tenant: str | None = None) -> int:
        return self._mixed.decode.kept_for_growth(tenant)

    @property
    def waits_since(self) -> float:
        return self._mixed.decode.waits_since


PROMISED_SHARE = 0.5
"""Of the objective for the time between tokens, what a pass without a step may take while outputs are on their way here: one that arrives
at its beginning has the rest for its first step."""
OWN = 0
"""The session of prompts that are decoded here."""
MOST_WITHOUT_PASS = 8
"""After so many steps beside which there were no pages for any prompt, one is computed alone."""
MOST_STRETCHED = 50.0
"""Prompts take so many times as long as alone at most, as far as is told: more would be said of a moment."""


@value_class(frozen=True, slots=True)
class _InFlight:
    step: ForeseenStep | None
    pass_ms: float
    """Of a pass with it, what its tokens are predicted to take; 0: there is none."""


class MixedCore:
    """The state of the engine, and every decision."""

    def __init__(self, prefill: PrefillSettings, decode: DecodeSettings) -> None:
        beside = _Outputs(self)
        self.prefill = PrefillCore(replace(prefill, mixes=True), beside)
        self.decode = DecodeCore(replace(decode, mixes=True), self.prefill)
        self.cost = MixedCost()
        self._most_in_flight = 2 if decode.overlap else 1
        self._in_flight: deque[_InFlight] = deque()
        self._without_pass = 0
        """Steps in a row for which prompts had no pages."""
        self._out: list[Action] = []

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Late, duplicate and unknown messages change nothing."""
        match event:
            case events.Start():
                self._start(event.session, event.start, now)
            case ev.MixedDone(step, ran):
                self._ended(step, ran, now)
            case decoding.Loaded() | ForetellTokens():
                self._decode(event, now)
            case AbortAttempt(attempt_id):
                # Of a prompt that is decoded here, the decode core gives it up.
                if self.decode.session_of(attempt_id) is not None:
                    self._decode(event, now)
                else:
                    self._prefill(event, now)
            case events.SessionEnded() | Tick() | events.Quiet() | events.StoreConnected() | events.StoreLost() | storage.StoreLoad():
                # The decode core first: of a store that is lost it asks for nothing then, when it hears of prompts that are, too.
                self._decode(event, now)
                self._prefill(event, now)
            case _:
                self._notice(event, now)
        self._give_way(now)
        while actions := self.prefill.go_on(now):
            for action in actions:
                self._of_prefill(action, now)
        self._launch(now)
        out, self._out = self._out, []
        return out

    @property
    def has_idle(self) -> bool:
        """Whether attempts in idle capacity are here."""
        return self.prefill.has_idle or self.decode.has_idle

    @property
    def idle_work(self) -> bool:
        """Whether any is under way, apart from what others' steps have in them."""
        return self.prefill.idle_work or self.decode.idle_work

    def wants_quiet(self, now: float) -> bool:
        """Whether the machine's other engines are to rest from idle work."""
        return self.prefill.wants_quiet(now) or self.decode.wants_quiet(now)

    @property
    def has_work(self) -> bool:
        """Whether attempts are here whose work is not over."""
        return self.prefill.has_work or self.decode.has_work

    def prefill_load(self, slots_total: int, slots_available: int) -> Load:
        """How the engine is doing with prompts: those that it decodes itself are among them. What they are predicted to take has the steps
        in it with which they are computed."""
        load, stretch = self.prefill.load(slots_total, slots_available), self._stretch()
        assert load.prefill_cost is not None
        return replace(load, queue_ms=load.queue_ms * stretch, prefill_cost=load.prefill_cost.scaled(stretch), slowed_by=stretch - 1)

    def load(self, slots_total: int, slots_available: int) -> Load:
        """How the engine is doing with outputs. The chunks that steps lately had count in what these took, not in what outputs cost: the
        more there are, the less is left to prompts."""
        return self.decode.load(slots_total, slots_available)

    def signs(self) -> Iterator[tuple[int, AttemptSign]]:
        """Signs of how each attempt gets on, with its session."""
        yield from self.decode.signs()
        for session, sign in self.prefill.signs():
            if session != OWN:
                yield session, sign
            elif (session_of := self.decode.session_of(sign.attempt_id)) is not None:
                yield session_of, sign

    def validate(self) -> None:
        """Asserts the invariants."""
        self.prefill.validate()
        self.decode.validate()
        assert len(self._in_flight) <= self._most_in_flight
        own = {sign.attempt_id for session, sign in self.prefill.signs() if session == OWN}
        assert own == self.decode.inlined("prefilling"), "a prompt that is decoded here is known to one core alone"
        assert self.prefill.leads_as_it_should(self.decode.inlined("reserving"), self.decode.inlined("awaiting"))

    # ---- one core to the other ----

    def _start(self, session: int, start: PrefillStart | DecodeStart, now: float) -> None:
        if isinstance(start, PrefillStart):
            self._prefill(events.Start(session, start), now)
        else:
            self._decode(events.Start(session, start), now)

    def _prefill(self, event: prefilling.Event, now: float) -> None:
        for action in self.prefill.handle(event, now):
            self._of_prefill(action, now)

    def _of_prefill(self, action: PrefillAction, now: float) -> None:
        match action:
            case Prefilled(done):
                self._decode(decoding.PromptComputed(done), now)
            case PrefixShared(attempt_id, blocks):
                self._decode(decoding.PrefixShared(attempt_id, blocks), now)
            case SendUpdate(session, update) if session == OWN:
                self._own_update(update, now)
            case RunPass():
                raise AssertionError("passes are launched when they are asked for")
            case _:
                self._out.append(action)

    def _own_update(self, update: PrefillUpdate, now: float) -> None:
        match update:
            case AttemptFailed(attempt_id, failure):
                self._decode(decoding.PromptFailed(attempt_id, failure), now)
            case PrefillDone():
                self._decode(decoding.PromptComputed(update), now)

    def _decode(self, event: decoding.Event, now: float) -> None:
        for action in self.decode.handle(event, now):
            self._of_decode(action, now)

    def _of_decode(self, action: DecodeAction, now: float) -> None:
        match action:
            case ComputePrompt(start, acquired, arrived_at, asked_at):
                self._prefill(prefilling.Placed(OWN, start, acquired, arrived_at, asked_at), now)
            case AbortAttempt():
                self._prefill(action, now)
            case RunStep():
                raise AssertionError("steps are launched when they are asked for")
            case _:
                self._out.append(action)

    def _notice(self, notice: storage.Notice, now: float) -> None:
        assert not isinstance(notice, storage.StoreLoad)
        if notice.attempt_id in self.prefill:
            self._prefill(notice, now)
        else:
            self._decode(notice, now)

    def _give_way(self, now: float) -> None:
        """Attempts in idle capacity of the one core give up slots that those of the other lack, which gives way to its own by itself."""
        if self.prefill.holds_idle and (lacking := self.decode.lacking):
            for prompts in self.prefill.give_up(lacking, now):
                self._of_prefill(prompts, now)
        if self.decode.has_idle and (lacking := self.prefill.lacking):
            for outputs in self.decode.give_up(lacking, now):
                self._of_decode(outputs, now)

    # ---- steps ----

    def _launch(self, now: float) -> None:
        """Nothing is launched behind a pass, be it with a step, and no pass alone behind a step: whoever comes then waits for the end of
        one chunk, not of two, and so does an output that begins with the pass for its second token."""
        while len(self._in_flight) < self._most_in_flight and not any(one.pass_ms for one in self._in_flight):
            alone = self._without_pass >= MOST_WITHOUT_PASS and not self._in_flight
            step = None if alone else self.decode.launch(now, others_wait=self.prefill.has_prompts)
            if step is None and self._in_flight:
                return
            foreseen = None if step is None else self.decode.foreseen()
            run = self.prefill.launch(now, self._before_outputs() if foreseen is None else self.cost.with_step(foreseen))
            self._without_pass = self._without_pass + 1 if run is None and step is not None and self.prefill.has_prompts else 0
            if step is None and run is None:
                return
            self._in_flight.append(_InFlight(foreseen, 0.0 if run is None else self.prefill.own_ms(run)))
            self._out.append(RunMixed(step, run))
        if self.decode.has_runnable:
            self._out += self.prefill.give_way()

    def _before_outputs(self) -> WithStep | None:
        """What a pass without a step has to heed: outputs are on their way here that may arrive in its middle. Half of it is for prompts at
        least, however little the objective leaves beside what a pass takes by itself."""
        objective_ms = self.decode.promised_objective_ms
        if objective_ms == math.inf or not self.prefill.has_prompts:
            return None
        fixed_ms = self.prefill.cost.fixed_ms
        return WithStep(max(PROMISED_SHARE * objective_ms - fixed_ms, fixed_ms))

    def _ended(self, step: decoding.StepDone | decoding.StepFailed | None, ran: prefilling.PassEnded | None, now: float) -> None:
        ended = self._in_flight.popleft()
        shared = step is not None and ran is not None
        if isinstance(step, decoding.StepDone) and ended.step is not None:
            if shared:
                unguessed = ended.step.most_drafted - sum(step.drafted)
                self.cost.observe(ended.step.predicted_ms - unguessed * ended.step.unguessed_ms, ended.pass_ms, step.elapsed_ms)
            self._decode(replace(step, shared=shared), now)
        elif step is not None:
            self._decode(step, now)
        if isinstance(ran, prefilling.PassDone):
            self._prefill(replace(ran, shared=shared), now)
        elif ran is not None:
            self._prefill(ran, now)

    def _stretch(self) -> float:
        """How many times as long as alone prompts take, as long as what runs goes on running: of each step they have what its sequences
        leave."""
        step = self.decode.foreseen_next()
        if step is None or step.idle:
            return 1.0
        spare_ms, taken_ms = min(self.cost.with_step(step).spare_ms, self.prefill.budget_ms), step.predicted_ms + self.cost.extra_ms
        return min(max(1.0 + taken_ms / spare_ms, 1.0), MOST_STRETCHED) if spare_ms > 0 else MOST_STRETCHED
