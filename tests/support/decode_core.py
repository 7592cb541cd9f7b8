"""What the tests of the decode core share: a node whose store answers at once, and a world in which everything answers in any order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from hypothesis import strategies as st

from decode_node.core import DecodeCore
from decode_node.core import events as ev
from decode_node.core.actions import Action, ComputePrompt, LoadAhead, RunStep
from decode_node.core.settings import DecodeSettings
from node_runtime import events
from node_runtime.events import SendUpdate
from springtide.cost import DecodeCost
from springtide.ids import AttemptId
from springtide.protocol import storage
from springtide.protocol.instances import Load
from springtide.protocol.outputs import AttemptFailed, FailureCode, Finish, PrefillDone, SampledToken, TokenOutput
from springtide.protocol.scheduling import PrefixSource
from springtide.protocol.starts import AbortAttempt, DecodeStart
from springtide.protocol.storage import Acquire, Acquired, Commit, Grow, Grown, Ingested, Release, Reserve, Reserved
from tests.support.any_order import POOL_FULL, OutputsInAnyOrder
from tests.support.node_core import BLOCK_TOKENS, EOS, StoreLedger, failure, make_request

MAX_BATCH = 3
NUM_SLOTS = 12
MOST_DRAFTED = st.sampled_from([0, 4, 20])
"""Of the worlds' steps."""


ActionT = TypeVar("ActionT")


def new_core(
    overlap: bool, loads_ahead: bool = False, inline_tokens: int | None = None, most_drafted: int = 0, most_foretold: int = 0
) -> DecodeCore:
    settings = DecodeSettings(
        cost=DecodeCost(1.0, 1.0, 0.01),
        block_tokens=BLOCK_TOKENS,
        max_batch=MAX_BATCH,
        eos_token_ids={EOS},
        ingest_lease_s=300.0,
        slot_wait_s=30.0,
        overlap=overlap,
        inline_tokens=inline_tokens,
        loads_ahead=loads_ahead,
        most_drafted=most_drafted,
        most_foretold=most_foretold,
    )
    return DecodeCore(settings)


def start(
    name: str,
    num_tokens: int,
    *,
    session: int = 1,
    max_tokens: int = 40,
    sent: int = 0,
    tbt_slo_ms: float = 0.0,
    inlined: bool = False,
    waits: bool = False,
    age_s: float = 0.0,
    tenant: str = "",
    expected_tokens: float = 0.0,
    idle: bool = False,
    sources: tuple[PrefixSource, ...] = (),
    ttft_budget_ms: float = 0.0,
) -> events.Start:
    """A continuation, with tokens already `sent`, is not refused by the admission check."""
    request = make_request(name, num_tokens, num_prompt_tokens=num_tokens - sent, max_tokens=max_tokens)
    request = replace(request, age_s=age_s, tenant=tenant, idle=idle)
    begin = DecodeStart(
        request,
        tbt_slo_ms,
        inlined,
        waits,
        refusable=not sent,
        expected_tokens=expected_tokens,
        ttft_budget_ms=ttft_budget_ms,
        sources=sources,
    )
    return events.Start(session, begin)


def done_of(name: str, position: int, token: int, *, ends: bool = False) -> PrefillDone:
    """The first token of a prompt that the engine has computed."""
    finish = Finish.STOP if token == EOS else Finish.LENGTH if ends else None
    tokens = () if token == EOS else (SampledToken(token),)
    return PrefillDone(TokenOutput(AttemptId(name), position, tokens, finish), cached_tokens=0)


def only(actions: list[Action], kind: type[ActionT]) -> list[ActionT]:
    return [action for action in actions if isinstance(action, kind)]


def outputs(actions: list[Action]) -> list[TokenOutput]:
    return [output for reply in only(actions, SendUpdate) for output in reply.update.outputs]


def prefilled(actions: list[Action]) -> list[PrefillDone]:
    return [done for reply in only(actions, SendUpdate) for done in reply.update.prefilled]


def failed(actions: list[Action]) -> list[AttemptFailed]:
    return [failed for reply in only(actions, SendUpdate) for failed in reply.update.failed]


def failures(actions: list[Action]) -> list[tuple[str, FailureCode]]:
    return [(one.attempt_id, one.failure.code) for one in failed(actions)]


def reserved(actions: list[Action]) -> list[str]:
    return [attempt_id for reply in only(actions, SendUpdate) for attempt_id in reply.update.reserved]


def rows_of(run: RunStep) -> list[str]:
    return [row.attempt_id for row in run.rows]


class Node:
    """A connected core over a store that answers at once, as far as it has slots."""

    def __init__(
        self,
        num_slots: int = NUM_SLOTS,
        *,
        overlap: bool = False,
        loads_ahead: bool = False,
        reused_blocks: int = 0,
        inline_tokens: int | None = None,
        most_drafted: int = 0,
        most_foretold: int = 0,
    ) -> None:
        self.reused_blocks = reused_blocks
        """Of every prompt that is inlined."""
        self.core = new_core(overlap, loads_ahead, inline_tokens, most_drafted, most_foretold)
        self.store = StoreLedger(num_slots)
        self.now = 0.0
        self.tell(events.StoreConnected(num_slots))

    def tell(self, event: ev.Event) -> list[Action]:
        """Returns what followed, the store's answers and what they caused included."""
        seen: list[Action] = []
        pending: list[ev.Event] = [event]
        while pending:
            actions = self.core.handle(pending.pop(0), self.now)
            self.core.validate()
            seen += actions
            for action in actions:
                if isinstance(action, AbortAttempt):
                    self.store.order(Release(action.attempt_id))
                elif not isinstance(action, RunStep | LoadAhead | ComputePrompt | SendUpdate):
                    self.store.order(action)
                    pending += self.answers(action)
        return seen

    def answers(self, order: storage.Order) -> list[ev.Event]:
        name = order.attempt_id
        if isinstance(order, Reserve):
            given = self.store.give(name)
            return [AttemptFailed(name, POOL_FULL) if given is None else Reserved(name, given, 0)]
        if isinstance(order, Acquire):
            given = self.store.give(name)
            if given is None:
                return [AttemptFailed(name, POOL_FULL)]
            self.store.committed[name] = reused = min(self.reused_blocks, order.max_reused_blocks)
            return [Acquired(name, given, reused, 0)]
        if isinstance(order, Grow):
            self.store.growing.remove(order)
            if not self.store.free:
                return [AttemptFailed(name, POOL_FULL)]
            slot = self.store.free.pop()
            self.store.held[name].append(slot)
            return [Grown(name, (slot,))]
        return []

    def load(self) -> Load:
        """How the node is doing, the store's slots apart."""
        return self.core.load(slots_total=0, slots_available=0)

    def prompt_computed(self, name: str, first_token: int = 100) -> list[Action]:
        """The engine has computed it."""
        if first_token == EOS:
            self.store.order(Release(AttemptId(name)))
        return self.tell(ev.PromptComputed(done_of(name, 0, first_token)))

    def join(self, begin: events.Start, first_token: int = 100) -> list[Action]:
        return self.tell(begin) + self.tell(Ingested(begin.start.request.attempt_id, first_token))

    def step(self, run: RunStep, token: int = 5) -> list[Action]:
        """Runs it, sampling the same token for each."""
        for row in run.rows:
            row.output_ids.append(token)
        return self.tell(ev.StepDone(run.step_id, [(SampledToken(token),)] * len(run.rows), 2.0))


class World(OutputsInAnyOrder):
    """A store, an engine, gateways and prefill nodes around a core, answering in the order that hypothesis draws. The engine computes what
    is launched while the core has yet to hear of what ended before, and what it computes lies in the slots. With `pages` it loads prompts
    ahead of their steps, into so many."""

    num_sessions = 2

    def __init__(self, data: st.DataObject, *, overlap: bool, pages: int | None = None) -> None:
        most_drafted, most_foretold = data.draw(MOST_DRAFTED), data.draw(MOST_DRAFTED)
        core = new_core(overlap, loads_ahead=pages is not None, most_drafted=most_drafted, most_foretold=most_foretold)
        super().__init__(data, core, NUM_SLOTS)
        self.pages = pages
        self.launched: deque[RunStep] = deque()
        self.ended_steps: deque[ev.StepDone | ev.StepFailed] = deque()
        self.lost_runs: list[RunStep] = []
        """Of a store that is gone: what they write, nobody sees."""
        self.prompts: dict[str, Sequence[int]] = {}
        """Those that the engine computes, with their slots."""
        self.loading: dict[str, Sequence[int]] = {}
        self.loaded: set[str] = set()
        self.reserved: Counter[str] = Counter()
        self.store_up()

    def store_up(self) -> None:
        self.tell(events.StoreConnected(min(NUM_SLOTS, self.pages or NUM_SLOTS), self.pages))

    def perform(self, action: Action) -> None:
        match action:
            case RunStep():
                assert self.pages is None or all(self.begun[name].start.inlined or name in self.loaded for name in rows_of(action))
                self.launched.append(action)
            case ComputePrompt(order, acquired):
                assert order.stays and self.begun[order.request.attempt_id].start.inlined
                assert self.store.may_use(order.request.attempt_id, acquired.slots)
                self.prompts[order.request.attempt_id] = acquired.slots
            case AbortAttempt(name):
                self.prompts.pop(name, None)
                self.store.order(Release(name))
            case LoadAhead(name, slots):
                assert name not in self.loading and name not in self.loaded
                assert self.store.may_use(name, slots) and len(slots) == self.begun[name].start.request.num_blocks
                self.loading[name] = slots
            case SendUpdate(session, update):
                for output in (*(of.output for of in update.prefilled), *update.outputs):
                    self.receive(session, output)
                for one in update.failed:
                    self.end(session, one.attempt_id)
                for name in update.reserved:
                    assert self.begun[name].start.waits and name in self.store.held and not self.reserved[name]
                    self.reserved[name] += 1
            case _:
                if isinstance(action, Release):
                    assert not any(action.attempt_id in rows_of(run) for run in self.launched if run not in self.lost_runs)
                    assert action.attempt_id not in self.loading
                    self.ingesting = [name for name in self.ingesting if name != action.attempt_id]
                if isinstance(action, Commit):
                    self.check_committed(action)
                self.store.order(action)

    def possible(self) -> list[str]:
        choices = ["answer"] * bool(self.store.unanswered) + ["grow"] * bool(self.store.growing) + ["load"] * bool(self.loading)
        choices += ["compute_prompt"] * bool(self.prompts)
        return choices + ["run_step"] * bool(self.launched) + ["end_step"] * bool(self.ended_steps) + ["ingest"] * bool(self.ingesting)

    def start(self) -> None:
        name = f"a{len(self.begun)}"
        session = self.data.draw(st.integers(1, 2), label="session")
        num_tokens = self.data.draw(st.integers(2, 50), label="num_tokens")
        sent = self.data.draw(st.integers(0, 1), label="sent")
        max_tokens = self.data.draw(st.sampled_from([sent + 1, sent + 3, 30]), label="max_tokens")
        idle = self.data.draw(st.integers(0, 2), label="idle") == 0
        inlined = not idle and self.data.draw(st.booleans(), label="inlined")
        waits = not idle and not inlined and self.data.draw(st.booleans(), label="waits")
        age_s = self.data.draw(st.sampled_from([0.0, 0.0, 60.0]), label="age_s")
        self.positions[name] = sent if inlined else sent + 1
        self.begun[name] = start(
            name, num_tokens, session=session, sent=sent, max_tokens=max_tokens, inlined=inlined, waits=waits, age_s=age_s, idle=idle
        )
        self.tell(self.begun[name])

    def lose_store(self) -> None:
        self.store.lost()
        self.ingesting.clear()
        self.prompts.clear()
        self.memory.clear()
        self.lost_runs = list(self.launched)
        self.tell(events.StoreLost("lost"))
        self.store_up()

    def answer(self) -> None:
        name = self.pick(self.store.unanswered)
        order = self.store.unanswered[name]
        given = self.store.give(name)
        if given is None:
            self.tell(AttemptFailed(AttemptId(name), POOL_FULL))
        elif isinstance(order, Acquire):
            reused = self.store.committed[name] = self.data.draw(st.integers(0, order.max_reused_blocks), label="reused")
            self.tell(Acquired(AttemptId(name), given, reused, 0))
        else:
            self.ingesting.append(name)
            self.tell(Reserved(name, given, 0))

    def compute_prompt(self) -> None:
        name = self.pick(self.prompts)
        slots, request = self.prompts.pop(name), self.begun[name].start.request
        if self.data.draw(st.integers(0, 9), label="prompt fails") == 9:
            self.store.order(Release(AttemptId(name)))
            self.tell(ev.PromptFailed(AttemptId(name), failure(FailureCode.INTERNAL)))
            return
        self.write_prompt(name, slots, request.num_tokens)
        self.store.order(Commit(AttemptId(name), 0, request.keys))
        token = self.data.draw(st.sampled_from([EOS, 7, 7]), label="first token")
        self.sampled[name].append([token])
        done = done_of(name, request.first_position, token, ends=request.params.max_tokens == request.first_position + 1)
        if done.output.finish is not None:
            self.store.order(Release(AttemptId(name)))
        self.tell(ev.PromptComputed(done))

    def load(self) -> None:
        """The last that the engine tells of it; now and then twice."""
        name = self.pick(self.loading)
        del self.loading[name]
        self.loaded.add(name)
        for _ in range(self.data.draw(st.integers(1, 2), label="tells")):
            self.tell(ev.Loaded(name))

    def run_step(self) -> None:
        """The engine does; the core does not hear of it yet."""
        run = self.launched.popleft()
        assert len(set(rows_of(run))) == len(run.rows)
        if self.data.draw(st.integers(0, 19), label="step fails") == 19:
            self.ended_steps.append(ev.StepFailed(run.step_id, "by the test"))
            return
        sampled, drafted = zip(*(self.compute(row, run in self.lost_runs) for row in run.rows), strict=True)
        self.ended_steps.append(ev.StepDone(run.step_id, sampled, 1.0, drafted=drafted))

    def end_step(self) -> None:
        self.tell(self.ended_steps.popleft())
