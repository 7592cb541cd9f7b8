"""What is guessed of a sequence, and how much of it: each by itself."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decode_node.core import drafting
from decode_node.core import events as ev
from decode_node.core.actions import Action, RunStep, StepRow
from decode_node.core.drafting import GRAM, MOST_DRAFTED, MOST_OF_PROMPT, Guessing, GuessPrice, PromptLookup
from decode_node.core.scheduling import drafts
from decode_node.server.steps import StepRunner
from engine.batch import SamplingRow
from engine.formats.files import describe
from engine.loader import load_model
from engine.runner import ModelRunner
from engine.sampling.sampler import Draw
from springtide.blocks import block_keys
from springtide.cost import DecodeCost
from springtide.ids import AttemptId
from springtide.protocol.outputs import Failure, FailureCode, Finish, SampledToken
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.storage import Release
from tests.support.decode_core import Node, only, outputs, start
from tests.support.models import make_tiny_llama
from tests.support.node_core import BLOCK_TOKENS, EOS, NAMESPACE

NO_MORE = Failure(FailureCode.INVALID, "nothing can follow")
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def followed(tokens: Sequence[int], most: int, back: int) -> list[int]:
    """What came so far back, if it goes on repeating."""
    draft: list[int] = []
    for i in range(most):
        draft.append([*tokens, *draft][len(tokens) - back + i])
    return draft


@given(prompt=TOKENS, output=TOKENS, most=st.integers(0, 9), every=st.integers(1, 70))
def test_what_followed_the_last_time_is_guessed(prompt: list[int], output: list[int], most: int, every: int) -> None:
    """However seldom it is asked: by a slow twin, which looks through all of it. As long as a text goes on where it was, so do guesses."""
    grown: list[int] = []
    lookup, kept = PromptLookup(prompt, grown, 100), 0
    for i, token in enumerate(output):
        grown.append(token)
        if i % every:
            continue
        tokens = [*prompt, *grown]
        last = tokens[-GRAM:]
        places = [place for place in range(GRAM, len(tokens)) if tokens[place - GRAM : place] == last]
        backs = [back for back in ([kept] if kept else []) if len(tokens) - back in places] or [
            len(tokens) - place for place in places[-1:]
        ]
        drafted = lookup.draft(most)
        assert drafted == (followed(tokens, most, backs[0]) if backs and most and len(tokens) > GRAM else [])
        kept = backs[0] if drafted else kept


def test_many_new_tokens_are_taken_in_as_one_by_one() -> None:
    draw = random.Random(1)
    prompt, output = [draw.randrange(50) for _ in range(3000)], [draw.randrange(50) for _ in range(500)]
    at_once, grown = PromptLookup(prompt, output, 600), list[int]()
    one_by_one = PromptLookup(prompt[:1], grown, 4000)
    for token in [*prompt[1:], *output]:
        grown.append(token)
        # Without a place that it keeps to.
        one_by_one._back = 0
        drafted = one_by_one.draft(5)
    assert at_once.draft(5) == drafted and len(drafted) == 5


def test_what_was_never_there_is_not_guessed_whatever_its_hash() -> None:
    prompt = range(1000)
    assert not any(PromptLookup(prompt, [first, first], 1).draft(4) for first in range(999))


def test_a_long_prompt_takes_bounded_memory_and_its_end_is_looked_through() -> None:
    prompt = range(10, 2_000_010)
    lookup = PromptLookup(prompt, output := [prompt[-100], prompt[-99]], 1000)
    tracemalloc.start()
    assert lookup.draft(3) == list(prompt[-98:-95])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 24 << 20
    output[:] = prompt[1000:1003]
    assert lookup.draft(3) == [] and len(prompt) > MOST_OF_PROMPT


def test_what_a_sequence_had_before_its_first_guess_is_taken_in_bit_by_bit_the_latest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(2)
    prompt, output = [draw.randrange(40) for _ in range(3000)], [draw.randrange(40) for _ in range(40)]
    at_once = PromptLookup(prompt, output, 600)
    at_once.draft(1)
    monkeypatch.setattr(drafting, "_AT_ONCE", 70)
    read = Read(prompt)
    bit_by_bit = PromptLookup(read, output, 600)
    for _ in range(len(prompt) // 70 + 2):
        before = read.tokens
        bit_by_bit.draft(1)
        assert read.tokens - before < 100
    assert bit_by_bit._places is not None and at_once._places is not None
    assert np.array_equal(bit_by_bit._places, at_once._places) and np.count_nonzero(at_once._places) > 1000


class Read(list[int]):
    """Counts the tokens that were read from it."""

    tokens = 0

    def __getitem__(self, index: Any) -> Any:
        read = super().__getitem__(index)
        self.tokens += len(read)
        return read


def test_who_is_never_right_soon_guesses_nothing_but_now_and_then() -> None:
    guessing, drafted = Guessing(), list[int]()
    for _ in range(1000):
        drafted.append(guessing.length(MOST_DRAFTED, 0.1))
        guessing.observe(drafted[-1], 0)
    assert sum(drafted[:20]) < 20 and sum(drafted[20:]) == pytest.approx(980 / drafting._STEPS_TO_PROBE, rel=0.1)
    assert max(drafted[20:]) == 1


def test_who_is_always_right_soon_guesses_as_many_as_may_be_and_no_more_when_wrong_again() -> None:
    guessing = Guessing()
    for _ in range(60):
        guessing.observe(guessing.length(MOST_DRAFTED, 0.1), 0)
    lengths = list[int]()
    for _ in range(60):
        lengths.append(guessing.length(MOST_DRAFTED, 0.1))
        guessing.observe(lengths[-1], lengths[-1])
    assert lengths[-1] == MOST_DRAFTED and sum(length == MOST_DRAFTED for length in lengths) >= 20
    wrong = list[int]()
    for _ in range(12):
        wrong.append(guessing.length(MOST_DRAFTED, 0.1))
        guessing.observe(wrong[-1], 0)
    assert wrong == sorted(wrong, reverse=True) and wrong[-1] == 0


def test_for_whom_nothing_is_found_to_guess_by_no_places_are_kept_but_one_now_and_then_until_something_is() -> None:
    guessing, kept = Guessing(), list[int]()
    for _ in range(100):
        kept.append(guessing.length(MOST_DRAFTED, 0.01))
        if kept[-1]:
            guessing.unfound()
    assert kept[0] == 6 and max(kept[4:]) == 1 and sum(kept[4:]) <= 96 / 4
    while not guessing.length(MOST_DRAFTED, 0.01):
        pass
    guessing.observe(1, 1)
    assert guessing.length(MOST_DRAFTED, 0.01) >= 6, "as many as before, or more"


def test_the_dearer_a_row_the_fewer_are_guessed_and_none_that_costs_what_a_token_does() -> None:
    lengths = [Guessing().length(MOST_DRAFTED, price) for price in (0.001, 0.01, 0.1, 0.4, 0.6, 1.0, 2.0)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == MOST_DRAFTED and lengths[-3:] == [0, 0, 0]
    never = Guessing()
    assert not any(never.length(MOST_DRAFTED, 1.0) for _ in range(200)), "not even now and then"


# ---- of a step's sequences ----


def guessed(cost: DecodeCost, batch: int, *, tbt_slo_ms: float = 0.0, most: int = MOST_DRAFTED) -> list[int]:
    node = Node(100, overlap=False)
    for i in range(batch):
        node.join(start(f"a{i}", 10, tbt_slo_ms=tbt_slo_ms if i == batch - 1 else 0.0))
    running = list(node.core._holders)
    assert len(running) == batch
    return drafts(running, cost, GuessPrice(), most, block_tokens=8)


def test_where_memory_is_waited_for_guesses_pay_and_where_it_is_not_they_do_not() -> None:
    assert guessed(DecodeCost(10.0, 0.1, 0.0), 3) == [5] * 3, "half of those that are reached are taken to be right"
    assert guessed(DecodeCost(10.0, 10.0, 0.0), 3) == [0] * 3
    assert guessed(DecodeCost(0.0, 1.0, 0.0), 1) == [0], "the time of a step is that of its rows"
    assert guessed(DecodeCost(10.0, 0.1, 0.0), 3, most=0) == [0] * 3


def test_guesses_keep_to_the_objectives_of_all_who_are_in_the_step() -> None:
    """A step of three takes 10.3 ms, .85 of the objective is 11.0 ms."""
    assert sum(guessed(DecodeCost(10.0, 0.1, 0.0), 3, tbt_slo_ms=11.0 / 0.85)) == 6
    assert sum(guessed(DecodeCost(10.0, 0.1, 0.0), 3, tbt_slo_ms=11.0)) == 0


def test_of_whom_nothing_is_found_others_have_what_the_objective_leaves() -> None:
    node = Node(100)
    node.join(start("a", 10, tbt_slo_ms=11.0 / 0.85))
    node.join(start("b", 10))
    first, second = node.core._holders
    cost, price = DecodeCost(10.2, 0.1, 0.0), GuessPrice()
    assert drafts([first, second], cost, price, 8, 8) == [5, 0]
    for _ in range(4):
        first.guessing.unfound()
    assert drafts([first, second], cost, price, 8, 8) == [0, 5]


def test_a_step_for_which_nothing_was_found_says_so() -> None:
    node = Node(100, most_drafted=8)
    (run,) = only(node.join(start("a", 10)), RunStep)
    most = list[int]()
    for _ in range(24):
        most.append(run.most_drafted)
        (run,) = only(node.step(run), RunStep)
    assert most[:4] == [1] * 4 and sum(most[4:]) == 4


def test_in_idle_capacity_nobody_guesses_beside_others() -> None:
    node = Node(100)
    node.join(start("a", 10))
    node.join(start("b", 10, idle=True))
    cost = DecodeCost(10.0, 0.1, 0.0)
    own, idle = node.core._holders
    price = GuessPrice()
    assert drafts([own, idle], cost, price, 8, 8) == [5, 0] and drafts([idle], cost, price, 8, 8) == [6]


# ---- on the model's thread ----


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    info = describe(str(make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=64)))
    spec = info.kv_spec("float32", 48)
    return ModelRunner(load_model(info, "float32"), spec, np.zeros(2 * spec.bytes_per_slot, np.uint8), 2)


def test_guesses_end_where_the_output_does_and_of_what_has_ended_nothing_is_computed(runner: ModelRunner) -> None:
    """Beyond that the context may be at its end, where its slots are not. Two steps are launched before the tokens of either are known."""

    def counting(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        return [SampledToken(20 + len(row.output_ids) % 5) for row in rows]

    prompt, output = [20, 21, 22, 23, 24] * 11, [20, 21]
    params = SamplingParams(temperature=0.0, max_tokens=10)
    lookup, steps = PromptLookup(prompt, output, 10), StepRunner(runner, counting)
    run = [
        RunStep(number, (StepRow(AttemptId("a"), 56 + number, (0, 1), SamplingRow(params, prompt, output), output, 8, lookup),))
        for number in range(2)
    ]
    first, second = (steps.run(one) for one in run)
    assert isinstance(first, ev.StepDone) and first.drafted == [7]
    assert [[token.token_id for token in sampled] for sampled in first.sampled] == [[22, 23, 24, 20, 21, 22, 23, 24]]
    assert isinstance(second, ev.StepDone) and (second.sampled, second.drafted) == ([[]], ())
    assert len(output) == 10


def test_what_no_token_can_follow_fails_when_nothing_comes_before_that(runner: ModelRunner) -> None:
    def none_after(count: int) -> Draw:
        def draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken | Failure]:
            return [SampledToken(20 + len(row.output_ids) % 2) if len(row.output_ids) < count else NO_MORE for row in rows]

        return draw

    prompt, output = [20, 21] * 5, [20]
    sampling = SamplingRow(SamplingParams(max_tokens=30), prompt, output)
    row = StepRow(AttemptId("a"), 10, (0,), sampling, output, 8, PromptLookup(prompt, output, 30))
    for expected in ([SampledToken(21), SampledToken(20)], NO_MORE):
        done = StepRunner(runner, none_after(3)).run(RunStep(0, (row,)))
        assert isinstance(done, ev.StepDone) and done.sampled == [expected]


# ---- in the core ----


def test_a_step_takes_no_more_guesses_than_there_are_slots_and_tokens_to_come() -> None:
    node = Node(100, overlap=True, most_drafted=20)
    first, second = only(node.join(start("a", 10, max_tokens=40)), RunStep)
    (row,), (behind,) = first.rows, second.rows
    held = 8 * len(row.slots)
    assert row.most_drafted >= 1 and row.start + row.most_drafted < held
    assert behind.start == row.start + 1 and behind.start + row.most_drafted + behind.most_drafted < held
    node = Node(100, most_drafted=20)
    (last,) = only(node.join(start("a", 10, max_tokens=2)), RunStep)
    assert last.rows[0].most_drafted == 0, "one token is to come, which is sampled anyway"


def accepting(node: Node, run: RunStep, tokens: list[int], drafted: int) -> list[Action]:
    """Runs a step of one sequence, of which so many tokens were guessed, and all but the last one right."""
    run.rows[0].output_ids.extend(tokens)
    return node.tell(ev.StepDone(run.step_id, [[SampledToken(token) for token in tokens]], 2.0, drafted=[drafted]))


def test_guesses_that_are_right_come_at_once_and_their_blocks_are_committed_and_no_others() -> None:
    node = Node(100, most_drafted=4)
    begin = start("a", 13)
    (run,) = only(node.join(begin), RunStep)
    while run.rows[0].most_drafted < 3:
        (run,) = only(accepting(node, run, [5] * (1 + run.rows[0].most_drafted), run.rows[0].most_drafted), RunStep)
    before, position = list(run.rows[0].output_ids), len(run.rows[0].output_ids)
    actions = accepting(node, run, [6, 7], 3)
    (output,) = outputs(actions)
    assert (output.position, [token.token_id for token in output.tokens]) == (position, [6, 7])
    (following,) = only(actions, RunStep)
    computed = 13 + len(before) + 1
    assert following.rows[0].start == computed, "where the first wrong guess was"
    assert node.store.committed["a"] == computed // BLOCK_TOKENS
    keys = block_keys(NAMESPACE, [*begin.start.request.token_ids, *before, 6], BLOCK_TOKENS)
    node.core.validate()
    assert node.core._attempts[AttemptId("a")].last_key == keys[-1]


def test_an_end_among_guesses_that_are_right_ends_the_output_there() -> None:
    node = Node(100, overlap=True, most_drafted=4)
    first, second = only(node.join(start("a", 10)), RunStep)
    drafted = first.rows[0].most_drafted
    assert drafted
    actions = accepting(node, first, [EOS, *[5] * drafted], drafted)
    (output,) = outputs(actions)
    assert output.tokens == () and output.finish is Finish.STOP and only(actions, Release) == []
    assert node.tell(ev.StepDone(second.step_id, [()], 0.1)) == [Release(AttemptId("a"))], "nothing is computed of it any more"
