"""The mixed core: single stories."""

from __future__ import annotations

import pytest

from decode_node.core.events import StepDone
from mixed_node.core import events as ev
from mixed_node.core.actions import Action, RunMixed
from mixed_node.core.core import MOST_WITHOUT_PASS, PROMISED_SHARE
from mixed_node.core.mixing import OBJECTIVE_SHARE, MixedCost
from node_runtime import events
from node_runtime.events import SendUpdate
from prefill_node.core.actions import GiveWay
from prefill_node.core.events import PassDone, PassGaveWay
from springtide.ids import AttemptId
from springtide.protocol.outputs import AttemptFailed, DecodeUpdate, FailureCode, Finish, PrefillDone, SampledToken
from springtide.protocol.starts import AbortAttempt
from springtide.protocol.storage import (
    Acquire,
    Acquired,
    Commit,
    FetchProgress,
    Grow,
    Grown,
    Ingested,
    OpenHandOver,
    Push,
    Release,
    Reserve,
    Reserved,
    Seal,
)
from tests.support.mixed_core import CHUNK_TOKENS, DECODE_COST, NUM_SLOTS, PREFILL_COST, names_of, new_core, others, own
from tests.support.node_core import BLOCK_TOKENS, INFO, failure


def only(actions: list[Action], kind: type) -> list:  # type: ignore[type-arg]
    return [action for action in actions if isinstance(action, kind)]


class Engine:
    """A connected core over a store that answers at once."""

    def __init__(self, *, overlap: bool = False, num_slots: int = 100, pages: int | None = None, most_drafted: int = 0) -> None:
        self.core = new_core(overlap, most_drafted)
        self.now = 0.0
        self.free = list(range(num_slots))
        self.local_blocks = 0
        """Of every prompt that is acquired."""
        self.tell(events.StoreConnected(num_slots, pages))

    def tell(self, event: ev.Event) -> list[Action]:
        """Returns what followed, the store's answers and what they caused included."""
        seen: list[Action] = []
        pending: list[ev.Event] = [event]
        while pending:
            actions = self.core.handle(pending.pop(0), self.now)
            self.core.validate()
            seen += actions
            for action in actions:
                match action:
                    case Acquire(name, _, num_blocks, most):
                        pending.append(Acquired(name, self.take(num_blocks), min(self.local_blocks, most), 0))
                    case Reserve(name, _, num_blocks):
                        pending.append(Reserved(name, self.take(num_blocks), 0))
                    case Grow(name, num_blocks):
                        pending.append(Grown(name, self.take(num_blocks)))
        return seen

    def take(self, count: int) -> tuple[int, ...]:
        return tuple(self.free.pop() for _ in range(count))

    def decoding(self, name: str, num_tokens: int = 5, *, tbt_slo_ms: float = 0.0, idle: bool = False) -> list[Action]:
        """It decodes a prompt that was handed over to it."""
        begin = own(name, num_tokens, inlined=False, tbt_slo_ms=tbt_slo_ms, idle=idle)
        return self.tell(begin) + self.tell(Ingested(AttemptId(name), 100))

    def ends(self, mixed: RunMixed, token: int = 7, elapsed_ms: float | None = None) -> list[Action]:
        """It takes what is predicted, or so long."""
        step, ran, predicted_ms = None, None, 0.0
        if mixed.step is not None:
            for row in mixed.step.rows:
                row.output_ids.append(token)
            predicted_ms += DECODE_COST.predict_ms(len(mixed.step.rows), mixed.step.context_tokens)
        if mixed.run is not None:
            predicted_ms += sum(PREFILL_COST.per_token_ms * len(row.chunk.token_ids) for row in mixed.run.rows)
        took_ms = predicted_ms if elapsed_ms is None else elapsed_ms
        self.now += took_ms / 1000
        if mixed.step is not None:
            step = StepDone(mixed.step.step_id, [(SampledToken(token),)] * len(mixed.step.rows), took_ms)
        if mixed.run is not None:
            sampled = [None if row.sampling is None else SampledToken(token) for row in mixed.run.rows]
            ran = PassDone(mixed.run.pass_id, sampled, took_ms)
        return self.tell(ev.MixedDone(step, ran))


def launched(actions: list[Action]) -> RunMixed:
    (mixed,) = only(actions, RunMixed)
    assert isinstance(mixed, RunMixed)
    return mixed


def tokens_of(mixed: RunMixed) -> dict[str, int]:
    """Of prompts, by attempt."""
    return {} if mixed.run is None else {row.attempt_id: len(row.chunk.token_ids) for row in mixed.run.rows}


def test_a_prompt_that_is_decoded_here_keeps_its_slots_and_is_handed_over_to_nobody() -> None:
    engine = Engine()
    begin = own("a", 2 * CHUNK_TOKENS + 3)
    actions = engine.tell(begin)
    assert [order.num_blocks for order in only(actions, Acquire)] == [5]
    mixed = launched(actions)
    assert mixed.step is None and tokens_of(mixed) == {"a": CHUNK_TOKENS}
    while mixed.run is not None:
        actions += (more := engine.ends(mixed))
        mixed = launched(more)
    (done,) = [done for sent in only(actions, SendUpdate) if isinstance(sent.update, DecodeUpdate) for done in sent.update.prefilled]
    assert isinstance(done, PrefillDone) and done.output.tokens == (SampledToken(7),) and done.compute_ms > 0
    assert [(commit.first_block, len(commit.keys)) for commit in only(actions, Commit)] == [(0, 2), (2, 2)]
    for kind in (Reserve, OpenHandOver, Push, Seal, Release):
        assert only(actions, kind) == []
    assert mixed.step is not None
    (row,) = mixed.step.rows
    assert (row.attempt_id, row.start, row.output_ids) == ("a", begin.start.request.num_tokens, [7])


def test_a_prompt_that_another_node_decodes_is_handed_over_and_answered_in_its_own_session() -> None:
    engine = Engine()
    actions = engine.tell(others("a", 10, session=4))
    assert len(only(actions, OpenHandOver)) == 1
    actions = engine.ends(launched(actions))
    assert [(sent.session, type(sent.update)) for sent in only(actions, SendUpdate)] == [(4, PrefillDone)]
    assert only(actions, Seal) == [Seal(AttemptId("a"), 7)] and only(actions, Release) == [Release(AttemptId("a"), finish_hand_over=True)]


def test_a_chunk_is_computed_with_the_step_of_those_that_run() -> None:
    engine = Engine()
    mixed = launched(engine.decoding("old"))
    assert only(engine.tell(own("new", 40)), RunMixed) == []
    mixed = launched(engine.ends(mixed))
    assert names_of(mixed) == ["old", "new"] and tokens_of(mixed) == {"new": CHUNK_TOKENS}


def test_it_is_no_longer_than_the_objectives_of_those_that_run_allow() -> None:
    """A step of one sequence takes some 2 ms, a token of a prompt .1 ms."""
    engine = Engine()
    mixed = launched(engine.decoding("old", tbt_slo_ms=3.5))
    engine.tell(own("new", 60))
    mixed = launched(engine.ends(mixed))
    assert mixed.step is not None
    step_ms = DECODE_COST.predict_ms(1, mixed.step.context_tokens)
    assert tokens_of(mixed)["new"] == int((OBJECTIVE_SHARE * 3.5 - step_ms) / PREFILL_COST.per_token_ms + 1e-6)


def test_a_prompt_comes_to_its_end_whatever_the_objective() -> None:
    engine = Engine()
    mixed = launched(engine.decoding("old", tbt_slo_ms=0.001))
    engine.tell(own("new", 40))
    chunks = []
    for _ in range(5):
        mixed = launched(engine.ends(mixed))
        chunks.append(tokens_of(mixed).get("new"))
    assert chunks == [CHUNK_TOKENS // 8] * 5


def test_a_chunk_is_shorter_where_both_take_longer_together_than_was_predicted() -> None:
    engine = Engine()
    mixed = launched(engine.decoding("old", tbt_slo_ms=3.5))
    engine.tell(own("new", 300))
    mixed = launched(engine.ends(mixed))
    first = tokens_of(mixed)["new"]
    for _ in range(6):
        mixed = launched(engine.ends(mixed, elapsed_ms=3.7))
    assert tokens_of(mixed)["new"] < first and engine.core.cost.extra_ms > 0.3


def test_one_step_in_many_that_takes_long_does_not_shorten_the_chunks() -> None:
    cost = MixedCost()
    for turn in range(64):
        cost.observe(2.0, 1.0, 500.0 if turn % 20 == 19 else 3.1)
    assert cost.extra_ms == pytest.approx(0.1)
    for _ in range(4):
        cost.observe(2.0, 1.0, 4.0)
    assert cost.extra_ms == pytest.approx(1.0)


def test_of_several_prompts_the_one_with_the_least_relative_slack_comes_first() -> None:
    engine = Engine()
    mixed = launched(engine.decoding("old", tbt_slo_ms=3.2))
    engine.tell(own("long", 400))
    engine.now += 0.001
    engine.tell(own("short", 10))
    mixed = launched(engine.ends(mixed))
    assert "short" in tokens_of(mixed)


def test_nobody_s_step_waits_for_a_prefix_that_still_arrives() -> None:
    engine = Engine()
    mixed = launched(engine.decoding("old"))
    engine.core.handle(own("new", 40, source_blocks=3), engine.now)
    engine.tell(Acquired(AttemptId("new"), engine.take(5), 0, 3))
    engine.tell(FetchProgress(AttemptId("new"), 1))
    mixed = launched(engine.ends(mixed))
    assert mixed.run is None
    engine.tell(FetchProgress(AttemptId("new"), INFO.layers))
    mixed = launched(engine.ends(mixed))
    assert mixed.run is not None and mixed.run.rows[0].chunk.start == 3 * BLOCK_TOKENS


def test_with_overlap_a_step_is_launched_behind_one_that_runs_and_a_pass_alone_is_not() -> None:
    engine = Engine(overlap=True)
    first, second = only(engine.decoding("old"), RunMixed)
    assert first.step is not None and second.step is not None
    engine = Engine(overlap=True)
    assert len(only(engine.tell(own("a", 60)), RunMixed)) == 1
    assert len(only(engine.tell(own("b", 60)), RunMixed)) == 0


def test_prompts_leave_what_those_that_decode_here_are_expected_to_grow_by() -> None:
    engine = Engine()
    engine.tell(own("old", 5, inlined=False, expected_tokens=40.0))
    (order,) = only(engine.tell(others("new", 20)), Acquire)
    assert order.leave_available == 4
    (order,) = only(engine.tell(own("own", 20, expected_tokens=10.0)), Acquire)
    assert order.leave_available == 4 + 1


def test_a_step_and_its_chunks_have_the_pages_of_the_device_together() -> None:
    engine = Engine(pages=6)
    mixed = launched(engine.decoding("a", 15))
    engine.decoding("b", 15)
    engine.tell(own("new", 40))
    seen = []
    for _ in range(MOST_WITHOUT_PASS + 2):
        mixed = launched(engine.ends(mixed))
        seen.append((mixed.step is not None, mixed.run is not None))
    assert (False, True) in seen, "it is computed alone in the end"
    assert (True, True) not in seen, "there are pages for the sequences or for the prompt"


def test_nothing_is_launched_behind_a_pass_and_idle_ones_give_way() -> None:
    """An idle prompt, then an idle sequence, then somebody who is not idle."""
    engine = Engine(overlap=True)
    first = launched(engine.tell(own("prompt", 60, idle=True)))
    engine.tell(own("output", 5, inlined=False, idle=True))
    assert only(engine.tell(Ingested(AttemptId("output"), 100)), RunMixed) == []
    assert first.run is not None
    actions = engine.tell(others("online", 10))
    assert only(actions, GiveWay) == [GiveWay(first.run.pass_id)]
    mixed = launched(engine.tell(ev.MixedDone(None, PassGaveWay(first.run.pass_id))))
    assert mixed.step is None and tokens_of(mixed) == {"online": 10}
    engine.core.validate()


def test_an_output_that_begins_has_its_second_token_with_the_next_step() -> None:
    """With overlap, too: no step without it is launched ahead of that."""
    engine = Engine(overlap=True)
    first, second = only(engine.decoding("old", tbt_slo_ms=9.0), RunMixed)
    assert only(engine.tell(own("new", 6)), RunMixed) == []
    mixed = launched(engine.ends(first))
    assert tokens_of(mixed) == {"new": 6}
    assert only(engine.ends(second), RunMixed) == []
    assert {row.attempt_id for row in only(engine.ends(mixed), RunMixed)[0].step.rows} == {"old", "new"}


def test_who_has_waited_for_his_first_step_has_so_much_less_time_for_it() -> None:
    """A prompt is handed over in the middle of a step."""
    tokens = []
    for waited_ms in (0.0, 0.5):
        engine = Engine()
        mixed = launched(engine.decoding("old", tbt_slo_ms=5.0))
        engine.tell(own("prompt", 60))
        engine.tell(own("new", 5, inlined=False, tbt_slo_ms=5.0))
        engine.tell(Ingested(AttemptId("new"), 100))
        mixed = launched(engine.ends(mixed, elapsed_ms=waited_ms))
        assert mixed.step is not None and len(mixed.step.rows) == 2
        tokens.append(tokens_of(mixed)["prompt"])
    assert tokens[0] - tokens[1] == pytest.approx(OBJECTIVE_SHARE * 0.5 / PREFILL_COST.per_token_ms, abs=1)


def test_a_pass_alone_is_short_while_outputs_are_on_their_way() -> None:
    """But not so short that it computes less than it costs by itself."""
    tokens = []
    for objective_ms in (0.0, 4.4, 0.5):
        engine = Engine()
        if objective_ms:
            engine.tell(own("output", 5, inlined=False, tbt_slo_ms=objective_ms))
        tokens.append(tokens_of(launched(engine.tell(own("prompt", 60))))["prompt"])
    assert tokens[1] == int((PROMISED_SHARE * 4.4 - PREFILL_COST.fixed_ms) / PREFILL_COST.per_token_ms) < tokens[0] == CHUNK_TOKENS
    assert tokens[2] == int(PREFILL_COST.fixed_ms / PREFILL_COST.per_token_ms) < tokens[1]


def test_idle_outputs_give_their_slots_to_a_prompt_for_another_node_and_idle_prompts_to_an_output() -> None:
    engine = Engine(num_slots=14)
    engine.decoding("idle", 60, idle=True)
    engine.core.handle(others("online", 60), engine.now)
    actions = engine.tell(AttemptFailed(AttemptId("online"), failure(FailureCode.POOL_FULL)))
    assert [one.attempt_id for sent in only(actions, SendUpdate) for one in sent.update.failed] == ["idle"]
    engine = Engine(num_slots=14)
    engine.tell(others("idle", 70, idle=True))
    engine.core.handle(own("online", 60, inlined=False, waits=True), engine.now)
    actions = engine.tell(AttemptFailed(AttemptId("online"), failure(FailureCode.POOL_FULL)))
    assert [sent.update.attempt_id for sent in only(actions, SendUpdate)] == ["idle"]


def test_who_came_later_does_not_take_the_slots_that_another_kind_of_work_waits_for() -> None:
    engine = Engine(num_slots=10)
    engine.core.handle(others("old", 60), engine.now)
    engine.core.handle(AttemptFailed(AttemptId("old"), failure(FailureCode.POOL_FULL)), engine.now)
    engine.now += 0.1
    assert only(engine.core.handle(own("new", 10), engine.now), Acquire) == []
    assert only(engine.core.handle(own("older", 10, age_s=5.0), engine.now), Acquire) != []


def test_one_that_its_first_token_ends_is_over_with_it() -> None:
    engine = Engine()
    actions = engine.ends(launched(engine.tell(own("a", 10, max_tokens=1))))
    (sent,) = only(actions, SendUpdate)
    assert sent.update.prefilled[0].output.finish is Finish.LENGTH
    assert only(actions, Release) == [Release(AttemptId("a"))] and not engine.core.has_work


def test_an_abort_gives_back_the_slots_of_a_prompt_when_no_pass_uses_them() -> None:
    engine = Engine()
    mixed = launched(engine.tell(own("a", 60)))
    assert only(engine.tell(AbortAttempt(AttemptId("a"))), Release) == []
    assert only(engine.ends(mixed), Release) == [Release(AttemptId("a"))] and not engine.core.has_work


def test_prompts_are_predicted_to_take_longer_while_sequences_run() -> None:
    engine = Engine()
    alone = engine.core.prefill_load(NUM_SLOTS, NUM_SLOTS)
    assert alone.prefill_cost == PREFILL_COST
    engine.decoding("old", tbt_slo_ms=3.5)
    beside = engine.core.prefill_load(NUM_SLOTS, NUM_SLOTS)
    assert beside.prefill_cost is not None
    spare_ms = OBJECTIVE_SHARE * 3.5 - DECODE_COST.predict_ms(1, 6)
    assert beside.prefill_cost.per_token_ms == pytest.approx(PREFILL_COST.per_token_ms * (1 + DECODE_COST.predict_ms(1, 6) / spare_ms))


def test_nothing_is_guessed_in_a_step_with_which_a_prompt_is_computed() -> None:
    """Its chunk has all that the step leaves of the objective, as is told of it."""
    engine = Engine(most_drafted=8)
    alone = launched(engine.decoding("old", tbt_slo_ms=6.0))
    assert alone.step is not None and alone.step.most_drafted > 0
    engine.tell(others("new", 60))
    load = engine.core.prefill_load(NUM_SLOTS, NUM_SLOTS)
    mixed, chunks = launched(engine.ends(alone)), 0
    while mixed.run is not None:
        assert mixed.step is not None and mixed.step.most_drafted == 0
        chunks, mixed = chunks + 1, launched(engine.ends(mixed))
    assert chunks > 1 and load.slowed_by > 0
    assert mixed.step is not None and mixed.step.most_drafted > 0


def test_what_steps_took_has_their_chunks_in_it_and_what_outputs_cost_has_not() -> None:
    engine = Engine()
    mixed = launched(engine.decoding("old"))
    engine.tell(own("new", 200))
    for _ in range(4):
        mixed = launched(engine.ends(mixed))
    load = engine.core.load(NUM_SLOTS, NUM_SLOTS)
    assert load.decode_cost == DECODE_COST and load.step_ms > DECODE_COST.predict_ms(1, 10) + 0.5


def test_prompts_that_begin_alike_are_computed_once_wherever_they_are_decoded() -> None:
    """The first is decoded here, the second elsewhere, and the third here."""
    engine = Engine()
    mixed = launched(engine.tell(own("first", 60, text=1)))
    assert only(engine.tell(others("second", 45, text=1)), Acquire) == only(engine.tell(own("third", 47, text=1)), Acquire) == []
    assert {sign.attempt_id: sign.waiting for _, sign in engine.core.signs()} == {"first": False, "second": True, "third": True}
    prompts, outputs = engine.core.prefill_load(100, 100), engine.core.load(100, 100)
    assert prompts.attempt_ids == {"first", "second", "third"} and prompts.tokens == 60 + 5 + 7, "who waits counts with its rest"
    assert outputs.slots_promised >= 1, "what the third will want beyond what it waits for"
    engine.local_blocks = 5
    asked: list[Acquire] = []
    while not asked:
        actions = engine.ends(mixed)
        asked, mixed = only(actions, Acquire), launched(actions)
    assert [order.attempt_id for order in asked] == ["second", "third"]
    assert engine.core.load(100, 100).attempt_ids == {"first", "third"}


def test_a_prompt_that_waits_for_one_which_is_given_up_is_computed() -> None:
    engine = Engine()
    engine.tell(own("first", 60, text=1))
    assert only(engine.tell(own("second", 45, text=1)), Acquire) == []
    assert [order.attempt_id for order in only(engine.tell(AbortAttempt(AttemptId("first"))), Acquire)] == ["second"]
    assert only(engine.tell(own("third", 45, text=1)), Acquire) == []
    assert only(engine.tell(AbortAttempt(AttemptId("third"))), Release) == [], "it had nothing"
