"""The prefill core: single stories, and random orders of events."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node_runtime import events
from node_runtime.events import SendUpdate
from node_runtime.slot_claims import HEAD_PATIENCE_S
from prefill_node.core import PrefillCore
from prefill_node.core import events as ev
from prefill_node.core.actions import Action, GiveWay, RunPass
from prefill_node.core.in_flight import most_passes
from prefill_node.core.layer_stream import LayerGroups
from prefill_node.core.settings import PrefillSettings
from springtide.chunking import Chunking
from springtide.clock import Tick
from springtide.cost import PrefillCost
from springtide.ids import NodeId
from springtide.protocol import storage
from springtide.protocol.instances import Load
from springtide.protocol.outputs import AttemptFailed, FailureCode, Finish, HandedOver, PrefillDone, PromptLogprobs, SampledToken
from springtide.protocol.scheduling import PrefixSource
from springtide.protocol.starts import AbortAttempt, PrefillStart
from springtide.protocol.storage import Acquire, Acquired, Commit, FetchProgress, FetchTruncated, OpenHandOver, Push, Release, Seal
from tests.support.any_order import AnyOrder
from tests.support.node_core import BLOCK_TOKENS, EOS, INFO, failure, make_request

CHUNK_TOKENS = 16
NUM_SLOTS = 24


def new_core(unit_bytes: int = 150, stages: int = 1) -> PrefillCore:
    """Blocks of 8 tokens, 4 layers, slabs of 100 bytes."""
    chunking = Chunking(PrefillCost(1.0, 0.1, 0.0, 1 / stages), CHUNK_TOKENS)
    groups = LayerGroups(INFO.layers, 100, unit_bytes)
    return PrefillCore(PrefillSettings(chunking, groups, BLOCK_TOKENS, {EOS}, stages, breaks_off=stages == 1))


def start(
    name: str,
    num_tokens: int,
    *,
    session: int = 1,
    source_blocks: int = 0,
    max_tokens: int = 8,
    budget_ms: float = 0.0,
    idle: bool = False,
    text: int | None = None,
) -> events.Start:
    request = replace(make_request(name, num_tokens, max_tokens=max_tokens, text=text), idle=idle)
    source = PrefixSource(NodeId("prefill-1"), "source:1", source_blocks)
    return events.Start(session, PrefillStart(request, "decode:1", NodeId("decode-0"), budget_ms, (source,) if source_blocks else ()))


class Node:
    """A core that is connected, with one call per event."""

    def __init__(self, core: PrefillCore | None = None) -> None:
        self.core = core or new_core()
        self.now = 0.0
        self.tell(events.StoreConnected(NUM_SLOTS))

    def tell(self, event: ev.Event) -> list[Action]:
        actions = self.core.handle(event, self.now)
        self.core.validate()
        return actions

    def load(self) -> Load:
        """How the group is doing, the store's slots apart."""
        return self.core.load(slots_total=0, slots_available=0)

    def run_passes(self, actions: list[Action], token: int = 7) -> list[Action]:
        """Answers every pass, also those that follow, until there is none; returns all actions."""
        seen = list(actions)
        while run := next((action for action in actions if isinstance(action, RunPass)), None):
            sampled = [SampledToken(token) if row.sampling else None for row in run.rows]
            actions = self.tell(ev.PassDone(run.pass_id, sampled, 5.0))
            seen += actions
        return seen


def only(actions: list[Action], kind: type) -> list:  # type: ignore[type-arg]
    return [action for action in actions if isinstance(action, kind)]


def slots(n: int) -> tuple[int, ...]:
    return tuple(range(n))


def test_a_prompt_is_acquired_computed_committed_pushed_sealed_and_released() -> None:
    node = Node()
    begin = start("a", 37)
    assert node.tell(begin) == [Acquire("a", begin.start.request.keys, 5, 4, recompute_us_per_block=1300)]
    actions = node.run_passes(node.tell(Acquired("a", slots(5), 0, 0)))
    assert [len(row.chunk.token_ids) for run in only(actions, RunPass) for row in run.rows] == [16, 16, 5]
    assert [run.pushes for run in only(actions, RunPass)] == [
        tuple(Push("a", layer, layer + 1, begin, end) for layer in range(4)) for begin, end in ((0, 2), (2, 4))
    ] + [(Push("a", 0, 2, 4, 5), Push("a", 2, 4, 4, 5))]
    assert [(commit.first_block, len(commit.keys)) for commit in only(actions, Commit)] == [(0, 2), (2, 2)]
    done = only(actions, SendUpdate)[0].update
    assert done.output.tokens == (SampledToken(7),) and done.output.position == 0 and done.cached_tokens == 0 and done.compute_ms == 15.0
    assert actions[-2:] == [Seal("a", 7), Release("a", finish_hand_over=True)]
    assert node.tell(HandedOver("a", 1)) == [] and not node.core.has_work


def scores_of(tokens: int) -> PromptLogprobs:
    return PromptLogprobs(bytes(4 * tokens), bytes(4 * tokens))


def test_a_prompt_whose_tokens_are_scored_is_computed_as_a_whole_and_committed() -> None:
    node = Node()
    begin = start("a", 37, source_blocks=4)
    request = replace(begin.start.request, params=replace(begin.start.request.params, prompt_logprobs=0))
    begin = replace(begin, start=replace(begin.start, request=request))
    assert node.tell(begin) == [Acquire("a", request.keys, 5, 0)]
    actions = seen = node.tell(Acquired("a", slots(5), 0, 0))
    while run := next((action for action in actions if isinstance(action, RunPass)), None):
        (row,) = run.rows
        assert row.chunk.wants_all and row.scoring is not None
        assert list(row.scoring.next_ids) == list(request.token_ids[row.chunk.start + 1 :][: len(row.chunk.token_ids)])
        sampled = [SampledToken(7) if row.sampling else None]
        actions = node.tell(ev.PassDone(run.pass_id, sampled, 5000.0, scores=[scores_of(len(row.scoring.next_ids))]))
        seen = seen + actions
    done = only(seen, SendUpdate)[0].update
    assert done.prompt_logprobs == scores_of(36) and done.cached_tokens == 0
    assert [(commit.first_block, len(commit.keys)) for commit in only(seen, Commit)] == [(0, 2), (2, 2)]
    assert node.core.cost == new_core().cost, "passes that make more logits than others say nothing of these"


def test_the_cached_prefix_is_pushed_at_once_and_reported() -> None:
    node = Node()
    node.tell(start("a", 33))
    actions = node.tell(Acquired("a", slots(5), 3, 0))
    assert actions[:1] == [OpenHandOver("a", "decode:1", "decode-0")]
    assert only(actions, Push) == [Push("a", layer, layer + 1, 0, 3) for layer in range(4)]
    run = only(actions, RunPass)[0]
    assert run.rows[0].chunk.start == 24 and len(run.rows[0].chunk.token_ids) == 9
    done = only(node.run_passes(actions), SendUpdate)[0].update
    assert (done.cached_tokens, done.remote_tokens, done.fetch_ms) == (24, 0, 0.0)


def ticks(node: Node, seconds: float) -> list[Action]:
    """What is done while time goes by as it does for an engine that is not held up."""
    actions = node.tell(Tick())
    for _ in range(round(4 * seconds)):
        node.now += 0.25
        actions += node.tell(Tick())
    return actions


@pytest.mark.parametrize(("source_blocks", "answer_s"), [(0, 2.5), (3, 5.0)])
def test_a_store_that_does_not_answer_is_taken_for_hung(source_blocks: int, answer_s: float) -> None:
    node = Node()
    node.tell(start("a", 37, source_blocks=source_blocks))
    assert ticks(node, answer_s - 0.25) == []
    (failed, release) = ticks(node, 0.25)
    assert isinstance(failed, SendUpdate) and failed.update.failure.code == FailureCode.PEER_LOST
    assert release == Release("a")
    assert node.tell(Acquired("a", slots(5), 0, 0)) == [], "it is too late"


def test_an_engine_that_was_held_up_itself_does_not_blame_its_store() -> None:
    node = Node()
    node.tell(start("a", 37))
    node.tell(Tick())
    node.now += 60
    assert node.tell(Tick()) == []
    assert only(node.tell(Acquired("a", slots(5), 0, 0)), RunPass)


def test_signs_tell_how_far_a_prompt_is_and_whether_it_waits() -> None:
    node = Node()
    node.tell(start("a", 37))
    (run,) = only(node.tell(Acquired("a", slots(5), 0, 0)), RunPass)
    node.tell(start("b", 37, session=2))
    node.tell(Acquired("b", slots(5), 1, 0))

    def signs() -> list[tuple[int, str, int, bool]]:
        return [(session, sign.attempt_id, sign.computed_tokens, sign.waiting) for session, sign in node.core.signs()]

    assert signs() == [(1, "a", 0, False), (2, "b", 8, True)]
    node.run_passes([run])
    assert signs() == [(1, "a", 37, True), (2, "b", 37, True)], "they are being handed over"


def test_what_is_predicted_follows_what_passes_take() -> None:
    node = Node()
    for i in range(8):
        node.tell(start(f"a{i}", 16))
        run = only(node.tell(Acquired(f"a{i}", slots(2), 0, 0)), RunPass)[0]
        node.tell(ev.PassDone(run.pass_id, [SampledToken(7)], 0.5 * new_core().cost.predict_ms(16)))
    assert node.core.cost.predict_ms(1000) == pytest.approx(0.5 * new_core().cost.predict_ms(1000))


def test_a_short_prompt_goes_in_one_unit_at_the_end() -> None:
    node = Node(new_core(unit_bytes=4000))
    node.tell(start("a", 37))
    actions = node.run_passes(node.tell(Acquired("a", slots(5), 2, 0)))
    assert only(actions, Push) == []
    assert [run.pushes for run in only(actions, RunPass)] == [(), (Push("a", 0, 4, 0, 5),)]


def test_a_prefix_that_arrives_is_waited_for_layer_by_layer_and_pushed_on() -> None:
    node = Node()
    node.tell(start("a", 33, source_blocks=4))
    assert only(node.tell(Acquired("a", slots(5), 1, 3)), RunPass) == []
    actions = node.tell(FetchProgress("a", 2))
    assert only(actions, Push) == [Push("a", 0, 1, 1, 4), Push("a", 1, 2, 1, 4)]
    run = only(actions, RunPass)[0]
    assert run.awaits == "a" and run.rows[0].chunk.start == 32
    node.now = 0.25
    assert only(node.tell(FetchProgress("a", 4)), Push) == [Push("a", 2, 3, 1, 4), Push("a", 3, 4, 1, 4)]
    done = only(node.run_passes([run]), SendUpdate)[0].update
    assert (done.cached_tokens, done.remote_tokens, done.fetch_ms) == (32, 24, 250.0)


def test_a_fetch_is_waited_for_in_its_pass_and_while_nothing_else_is_computed() -> None:
    node = Node()
    node.tell(start("a", 33, source_blocks=4))
    node.tell(Acquired("a", slots(5), 0, 4))
    node.tell(start("other", 9))
    node.now = 0.1
    run = only(node.tell(Acquired("other", slots(2), 0, 0)), RunPass)[0]
    node.now = 0.3
    node.tell(ev.PassDone(run.pass_id, [SampledToken(7)], 200.0))
    node.now = 0.35
    run = only(node.tell(FetchProgress("a", 2)), RunPass)[0]
    node.now = 0.45
    node.tell(FetchProgress("a", 4))
    (reply,) = only(node.tell(ev.PassDone(run.pass_id, [SampledToken(7)], 105.0, waited_ms=80.0)), SendUpdate)
    done = reply.update
    assert (done.fetch_ms, done.fetch_wait_ms) == (pytest.approx(450.0), pytest.approx(100.0 + 50.0 + 80.0))


def test_what_a_fetch_of_which_nothing_comes_is_waited_for_is_reported() -> None:
    node = Node()
    node.tell(start("a", 33, source_blocks=4))
    node.tell(Acquired("a", slots(5), 0, 4))
    node.now = 0.1
    run = only(node.tell(FetchProgress("a", 1)), RunPass)[0]
    node.now = 0.2
    node.tell(FetchTruncated("a", 0))
    done = only(node.run_passes(node.tell(ev.PassInterrupted(run.pass_id, overdue=False, waited_ms=95.0))), SendUpdate)[0].update
    assert (done.cached_tokens, done.fetch_ms, done.fetch_wait_ms) == (0, 0.0, pytest.approx(195.0))


def test_a_truncated_fetch_is_recomputed_from_the_valid_prefix() -> None:
    node = Node()
    node.tell(start("a", 33, source_blocks=4))
    node.tell(Acquired("a", slots(5), 1, 3))
    first = only(node.tell(FetchProgress("a", 2)), RunPass)[0]
    assert only(node.tell(ev.PassInterrupted(first.pass_id, overdue=False)), RunPass) == []
    actions = node.run_passes(node.tell(FetchTruncated("a", 2)))
    assert [row.chunk.start for run in only(actions, RunPass) for row in run.rows] == [16, 32]
    assert [(commit.first_block, len(commit.keys)) for commit in only(actions, Commit)] == [(2, 2)]
    pushed = {
        (layer, block)
        for push in only(actions, Push) + [p for run in only(actions, RunPass) for p in run.pushes]
        for layer in range(push.layer_begin, push.layer_end)
        for block in range(push.block_begin, push.block_end)
    }
    assert {(layer, block) for layer in range(4) for block in range(1, 5)} <= pushed
    done = only(actions, SendUpdate)[0].update
    assert (done.cached_tokens, done.remote_tokens) == (16, 8)


def test_a_pass_that_ran_on_a_prefix_found_truncated_counts_for_nothing() -> None:
    node = Node()
    node.tell(start("a", 33, source_blocks=4))
    node.tell(Acquired("a", slots(5), 1, 3))
    run = only(node.tell(FetchProgress("a", 2)), RunPass)[0]
    node.tell(FetchTruncated("a", 1))
    actions = node.tell(ev.PassDone(run.pass_id, [SampledToken(9)], 1.0))
    assert only(actions, SendUpdate) == [] and only(actions, RunPass)[0].rows[0].chunk.start == 8


def test_a_full_pool_is_asked_again_when_slots_come_free_and_given_up_at_the_budget() -> None:
    node = Node()
    node.tell(start("a", 33, budget_ms=10_000))
    full = AttemptFailed("a", failure(FailureCode.POOL_FULL))
    assert node.tell(full) == []
    assert node.tell(storage.StoreLoad(0, 2)) == []
    assert only(node.tell(storage.StoreLoad(0, 5)), Acquire) != []
    node.tell(full)
    node.tell(storage.StoreLoad(0, 0))
    node.now = 10.0 + HEAD_PATIENCE_S
    (reply,) = node.tell(Tick())
    assert isinstance(reply, SendUpdate) and reply.update.failure.code == FailureCode.POOL_FULL


def test_newcomers_do_not_overtake_what_waits_for_slots() -> None:
    node = Node()
    node.tell(start("large", 150))
    node.tell(AttemptFailed("large", failure(FailureCode.POOL_FULL)))
    node.tell(storage.StoreLoad(0, 1))
    assert node.tell(start("small", 8)) == []
    assert [acquire.attempt_id for acquire in only(node.tell(storage.StoreLoad(0, 20)), Acquire)] == ["large"]
    assert [acquire.attempt_id for acquire in only(node.tell(Acquired("large", slots(19), 0, 0)), Acquire)] == ["small"]


def test_a_prompt_larger_than_the_arena_is_refused_with_both_numbers() -> None:
    (reply,) = Node().tell(start("a", 8 * NUM_SLOTS + 1))
    assert isinstance(reply, SendUpdate)
    assert reply.update.failure.code == FailureCode.INVALID
    assert "25 blocks" in reply.update.failure.message and "24 slots" in reply.update.failure.message


def test_slots_of_a_running_pass_are_released_only_after_it() -> None:
    node = Node()
    node.tell(start("a", 33))
    run = only(node.tell(Acquired("a", slots(5), 0, 0)), RunPass)[0]
    assert node.tell(AbortAttempt("a")) == []
    assert node.tell(ev.PassDone(run.pass_id, [None], 1.0)) == [Release("a")]


def test_a_hand_over_that_fails_after_the_first_token_is_reported() -> None:
    node = Node()
    node.tell(start("a", 9))
    node.run_passes(node.tell(Acquired("a", slots(2), 0, 0)))
    (reply,) = node.tell(storage.HandOverFailed("a", failure(FailureCode.PEER_LOST)))
    assert isinstance(reply, SendUpdate) and reply.update.failure.code == FailureCode.PEER_LOST


def test_a_request_that_its_first_token_ends_is_not_handed_over() -> None:
    node = Node()
    node.tell(start("a", 9, max_tokens=1))
    actions = node.run_passes(node.tell(Acquired("a", slots(2), 0, 0)))
    assert only(actions, SendUpdate)[0].update.output.finish == Finish.LENGTH
    assert only(actions, Seal) == [] and actions[-1] == Release("a")


def test_a_lost_store_fails_everything_and_a_new_one_starts_afresh() -> None:
    node = Node()
    node.tell(start("a", 33))
    run = only(node.tell(Acquired("a", slots(5), 0, 0)), RunPass)[0]
    (reply,) = node.tell(events.StoreLost("the store is gone"))
    assert isinstance(reply, SendUpdate) and reply.update.failure.code == FailureCode.PEER_LOST
    (reply,) = node.tell(start("b", 9))
    assert isinstance(reply, SendUpdate) and reply.update.failure.code == FailureCode.PEER_LOST
    node.tell(events.StoreConnected(NUM_SLOTS))
    node.tell(start("c", 9))
    assert only(node.tell(Acquired("c", slots(2), 0, 0)), RunPass) == []
    assert len(only(node.tell(ev.PassDone(run.pass_id, [None], 1.0)), RunPass)) == 1


def test_a_chunk_begins_when_the_one_before_it_has_left_the_first_stage() -> None:
    node = Node(new_core(stages=3))
    node.tell(start("a", 70))
    first = only(node.tell(Acquired("a", slots(9), 0, 0)), RunPass)[0]
    assert first.predicted_ms == pytest.approx(node.core.cost.predict_ms(16))
    second = only(node.tell(ev.PassLeft(first.pass_id)), RunPass)[0]
    third = only(node.tell(ev.PassLeft(second.pass_id)), RunPass)[0]
    waiting = only(node.tell(ev.PassLeft(third.pass_id)), RunPass)[0]
    assert [run.rows[0].chunk.start for run in (first, second, third, waiting)] == [0, 16, 32, 48]
    assert [run.pushes[0].block_begin for run in (first, second, third, waiting)] == [0, 2, 4, 6]
    assert node.tell(ev.PassLeft(waiting.pass_id)) == [], "a fifth would have no buffer in the last stage"
    done = node.tell(ev.PassDone(first.pass_id, [None], 9.0))
    assert [(commit.first_block, len(commit.keys)) for commit in only(done, Commit)] == [(0, 2)]
    assert only(done, RunPass)[0].rows[0].chunk.start == 64
    assert node.load().tokens == 54


def test_slots_are_released_when_the_last_of_several_passes_has_ended() -> None:
    node = Node(new_core(stages=2))
    node.tell(start("a", 40))
    first = only(node.tell(Acquired("a", slots(5), 0, 0)), RunPass)[0]
    second = only(node.tell(ev.PassLeft(first.pass_id)), RunPass)[0]
    assert node.tell(AbortAttempt("a")) == []
    assert node.tell(ev.PassDone(first.pass_id, [None], 1.0)) == []
    assert node.tell(ev.PassDone(second.pass_id, [None], 1.0)) == [Release("a")]


def test_a_pass_that_builds_on_an_interrupted_one_counts_for_nothing() -> None:
    node = Node(new_core(stages=2))
    node.tell(start("a", 70, source_blocks=4))
    node.tell(Acquired("a", slots(9), 1, 3))
    first = only(node.tell(FetchProgress("a", 2)), RunPass)[0]
    node.tell(FetchTruncated("a", 4))
    second = only(node.tell(ev.PassLeft(first.pass_id)), RunPass)[0]
    assert [run.rows[0].chunk.start for run in (first, second)] == [32, 48]
    assert only(node.tell(ev.PassInterrupted(first.pass_id, overdue=False)), RunPass) == []
    again = only(node.tell(ev.PassLeft(second.pass_id)), RunPass)[0]
    assert again.rows[0].chunk.start == 32
    assert only(node.tell(ev.PassDone(second.pass_id, [None], 1.0)), Commit) == []
    assert only(node.tell(ev.PassDone(again.pass_id, [None], 1.0)), Commit) == [Commit("a", 4, start("a", 70).start.request.keys[4:6])]


def test_one_pass_at_a_time_waits_for_a_prefix() -> None:
    node = Node(new_core(stages=3))
    node.tell(start("a", 70, source_blocks=4))
    node.tell(Acquired("a", slots(9), 1, 3))
    first = only(node.tell(FetchProgress("a", 2)), RunPass)[0]
    assert only(node.tell(ev.PassLeft(first.pass_id)), RunPass) == [], "it would wait anew when the first one had waited in vain"
    second = only(node.tell(FetchProgress("a", 4)), RunPass)[0]
    assert (first.awaits, second.awaits, second.rows[0].chunk.start) == ("a", None, 48)


def test_a_pass_that_fails_when_its_attempt_has_begun_anew_fails_nothing() -> None:
    node = Node()
    node.tell(start("a", 33, source_blocks=4))
    node.tell(Acquired("a", slots(5), 1, 3))
    run = only(node.tell(FetchProgress("a", 2)), RunPass)[0]
    node.tell(FetchTruncated("a", 1))
    actions = node.tell(ev.PassFailed(run.pass_id, "by the test"))
    assert only(actions, SendUpdate) == [] and only(actions, RunPass)[0].rows[0].chunk.start == 8


def test_what_has_left_the_first_stage_is_in_nobodys_way() -> None:
    node = Node(new_core(stages=2))
    node.tell(start("a", 32))
    pass_ms = node.core.cost.slowest_share * node.core.cost.predict_ms(16)
    first = only(node.tell(Acquired("a", slots(4), 0, 0)), RunPass)[0]
    assert node.load().queue_ms == pytest.approx(2 * pass_ms)
    second = only(node.tell(ev.PassLeft(first.pass_id)), RunPass)[0]
    assert node.load().queue_ms == pytest.approx(pass_ms)
    node.tell(ev.PassDone(first.pass_id, [None], 1.0))
    assert node.load().queue_ms == pytest.approx(pass_ms)
    node.tell(ev.PassLeft(second.pass_id))
    assert node.load().queue_ms == 0.0 and node.load().tokens == 16


def test_what_has_left_the_first_stage_and_waits_for_the_next_one_is_in_the_way() -> None:
    node = Node(new_core(stages=2))
    node.tell(start("a", 32))
    pass_ms = node.core.cost.slowest_share * node.core.cost.predict_ms(16)
    first = only(node.tell(Acquired("a", slots(4), 0, 0)), RunPass)[0]
    second = only(node.tell(ev.PassLeft(first.pass_id)), RunPass)[0]
    node.tell(ev.PassLeft(second.pass_id))
    assert node.load().queue_ms == pytest.approx(pass_ms)
    node.tell(ev.PassDone(first.pass_id, [None], 1.0))
    assert node.load().queue_ms == 0.0


def test_what_is_predicted_of_a_group_follows_its_slowest_stage() -> None:
    core = new_core(stages=2)
    assert Chunking(core.cost, CHUNK_TOKENS).prompt_ms(16, 0) == pytest.approx(core.cost.predict_ms(16))
    # Two further chunks, each as long as half of a pass takes.
    assert Chunking(core.cost, CHUNK_TOKENS).prompt_ms(48, 0) == pytest.approx(2 * core.cost.predict_ms(16))


def test_passes_right_behind_others_of_their_size_show_the_cost_too() -> None:
    node = Node(new_core(stages=2))
    node.tell(start("a", 16 * 12))
    runs = only(node.tell(Acquired("a", slots(24), 0, 0)), RunPass)
    predicted_ms = node.core.cost.predict_ms(16)
    while runs:
        run = runs.pop(0)
        runs += only(node.tell(ev.PassLeft(run.pass_id)), RunPass)
        elapsed_ms = predicted_ms if run.pass_id == 0 else 0.5 * predicted_ms
        sampled = [SampledToken(7) if row.sampling else None for row in run.rows]
        runs += only(node.tell(ev.PassDone(run.pass_id, sampled, 3 * elapsed_ms)), RunPass)
    assert node.core.cost.predict_ms(16) == pytest.approx(3 * predicted_ms)


def test_passes_that_followed_another_one_late_show_nothing() -> None:
    node = Node(new_core(stages=2))
    cost = node.core.cost
    for i in range(8):
        node.tell(start(f"a{i}", 16))
        first = only(node.tell(Acquired(f"a{i}", slots(2), 0, 0)), RunPass)[0]
        node.tell(ev.PassLeft(first.pass_id))
        node.tell(start(f"b{i}", 16))
        late = only(node.tell(Acquired(f"b{i}", slots(2), 0, 0)), RunPass)[0]
        node.tell(ev.PassDone(first.pass_id, [SampledToken(7)], cost.predict_ms(16)))
        node.tell(ev.PassDone(late.pass_id, [SampledToken(7)], 0.9 * cost.predict_ms(16)))
    assert node.core.cost == cost


class World(AnyOrder):
    """A store, an engine and gateways around a core, answering in the order that hypothesis draws. Of every token's KV it keeps whether it
    is what it should be: computed on a prefix that was right, or fetched and not found truncated since."""

    def __init__(self, data: st.DataObject) -> None:
        self.stages = data.draw(st.integers(1, 4), label="stages")
        super().__init__(data, new_core(data.draw(st.sampled_from([150, 900, 4000]), label="unit_bytes"), self.stages), NUM_SLOTS)
        self.runs: list[RunPass] = []
        self.num_left = 0
        """Of those, which the first stage is done with."""
        self.truncated: set[str] = set()
        self.giving_way: set[int] = set()
        self.right: dict[str, list[bool]] = {}
        self.fetching: dict[str, tuple[int, int, int]] = {}
        """Attempt -> layers ready, local blocks, reused blocks."""
        self.handing_over: list[str] = []
        self.started: dict[str, int] = {}
        self.requests: dict[str, events.Start] = {}
        self.ended: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.excused: set[str] = set()
        self.pushed: defaultdict[str, dict[tuple[int, int], bool]] = defaultdict(dict)
        """(layer, block) -> whether what was pushed last is right."""
        self.tell(events.StoreConnected(NUM_SLOTS))

    def perform(self, action: Action) -> None:
        match action:
            case RunPass():
                assert len(self.runs) == self.num_left < most_passes(self.stages)
                for row in action.rows:
                    assert self.store.may_use(row.attempt_id, row.chunk.slots)
                    assert row.attempt_id == action.awaits or row.attempt_id not in self.fetching
                assert [push.layer_end for push in action.pushes] == sorted(push.layer_end for push in action.pushes)
                self.runs.append(action)
            case GiveWay(pass_id):
                assert pass_id not in self.giving_way and pass_id in [run.pass_id for run in self.runs if run.idle]
                self.giving_way.add(pass_id)
            case SendUpdate(session, update):
                assert isinstance(update, PrefillDone | AttemptFailed)
                name = update.output.attempt_id if isinstance(update, PrefillDone) else update.attempt_id
                assert self.started[name] == session
                assert name not in self.excused
                (self.done if isinstance(update, PrefillDone) else self.ended)[name] += 1
            case _:
                if isinstance(action, Release):
                    assert action.attempt_id not in {row.attempt_id for run in self.runs for row in run.rows}
                    self.fetching.pop(action.attempt_id, None)
                    if action.finish_hand_over:
                        assert self.pushed[action.attempt_id] == {
                            (layer, block): True for layer in range(INFO.layers) for block in range(len(self.store.held[action.attempt_id]))
                        }
                        assert all(self.right[action.attempt_id])
                        self.handing_over.append(action.attempt_id)
                    elif action.attempt_id in self.handing_over:
                        self.handing_over.remove(action.attempt_id)
                self.store.order(action)
                if isinstance(action, Push):
                    self.push(action)
                if isinstance(action, Commit):
                    end = (action.first_block + len(action.keys)) * BLOCK_TOKENS
                    assert all(self.right[action.attempt_id][:end])

    def push(self, push: Push) -> None:
        layers, blocks = range(push.layer_begin, push.layer_end), range(push.block_begin, push.block_end)
        right = self.right[push.attempt_id]
        self.pushed[push.attempt_id] |= {
            (layer, block): all(right[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]) for layer in layers for block in blocks
        }

    def step(self, choices: list[str]) -> None:
        choice = self.data.draw(st.sampled_from(choices), label="next")
        getattr(self, choice)()

    def possible(self) -> list[str]:
        choices = ["tick"]
        choices += ["answer"] * bool(self.store.unanswered)
        choices += ["end_pass"] * bool(self.runs)
        choices += ["leave"] * (self.stages > 1 and self.num_left < len(self.runs))
        choices += ["fetch"] * bool(self.fetching)
        choices += ["hand_over"] * bool(self.handing_over)
        return choices

    def start(self) -> None:
        name = f"a{len(self.started)}"
        session = self.data.draw(st.integers(1, 2), label="session")
        self.started[name] = session
        num_tokens = self.data.draw(st.integers(1, 90), label="num_tokens")
        max_tokens = self.data.draw(st.sampled_from([1, 8]), label="max_tokens")
        source_blocks = self.data.draw(st.integers(0, 4), label="source_blocks")
        idle = self.data.draw(st.integers(0, 2), label="idle") == 0
        text = self.data.draw(st.sampled_from([1, 1, 2]), label="text")
        self.requests[name] = start(
            name, num_tokens, session=session, max_tokens=max_tokens, source_blocks=source_blocks, idle=idle, text=text
        )
        self.tell(self.requests[name])

    def abort(self) -> None:
        name = self.pick(self.started)
        self.excused.add(name)
        self.tell(AbortAttempt(name))

    def end_session(self) -> None:
        session = self.data.draw(st.integers(1, 2), label="session")
        self.excused |= {name for name, owner in self.started.items() if owner == session}
        self.tell(events.SessionEnded(session))

    def lose_store(self) -> None:
        self.store.lost()
        self.fetching.clear()
        self.handing_over.clear()
        self.pushed.clear()
        self.right.clear()
        self.tell(events.StoreLost("lost"))
        self.tell(events.StoreConnected(NUM_SLOTS))

    def answer(self) -> None:
        name = self.pick(self.store.unanswered)
        acquire = self.store.unanswered[name]
        assert isinstance(acquire, Acquire)
        given = self.store.give(name)
        if given is None:
            self.tell(AttemptFailed(name, failure(FailureCode.POOL_FULL)))
            return
        local = self.data.draw(st.integers(0, acquire.max_reused_blocks), label="local")
        at_source = max((source.num_blocks for source in acquire.sources), default=0)
        remote = max(min(at_source, acquire.max_reused_blocks) - local, 0)
        if remote:
            self.fetching[name] = (0, local, local + remote)
        self.store.committed[name] = local + remote
        num_tokens = len(self.requests[name].start.request.token_ids)
        self.right[name] = [position < (local + remote) * BLOCK_TOKENS for position in range(num_tokens)]
        self.tell(Acquired(name, given, local, remote))

    def fetch(self) -> None:
        name = self.pick(self.fetching)
        layers, local, reused = self.fetching[name]
        if self.data.draw(st.booleans(), label="arrives"):
            layers = self.data.draw(st.integers(layers, INFO.layers), label="layers")
            self.fetching[name] = (layers, local, reused)
            if layers == INFO.layers:
                del self.fetching[name]
            self.tell(FetchProgress(name, layers))
        else:
            del self.fetching[name]
            valid = self.data.draw(st.integers(local, reused), label="valid")
            self.store.committed[name] = valid
            if valid < reused:
                self.truncated.add(name)
                self.wrong(name, valid * BLOCK_TOKENS, len(self.right[name]))
            self.tell(FetchTruncated(name, valid))

    def wrong(self, name: str, begin: int, end: int) -> None:
        right = self.right[name]
        right[begin:end] = [False] * (end - begin)
        for layer, block in self.pushed[name]:
            if begin < (block + 1) * BLOCK_TOKENS and block * BLOCK_TOKENS < end:
                self.pushed[name][layer, block] = False

    def leave(self) -> None:
        run = self.runs[self.num_left]
        self.num_left += 1
        self.tell(ev.PassLeft(run.pass_id))

    def end_pass(self) -> None:
        """In the last stage, and the others before it."""
        run = self.runs.pop(0)
        self.num_left = max(0, self.num_left - 1)
        failed = self.data.draw(st.integers(0, 9), label="pass fails") == 0
        if run.pass_id in self.giving_way and self.data.draw(st.booleans(), label="gives way"):
            self.computed(run, run.pushes[: self.data.draw(st.integers(0, len(run.pushes)), label="pushed before")], right=False)
            self.tell(ev.PassGaveWay(run.pass_id))
            return
        missing = run.awaits in self.truncated and self.data.draw(st.booleans(), label="truncated before it was read")
        if run.awaits in self.fetching or missing or failed:
            pushed = run.pushes[: self.data.draw(st.integers(0, len(run.pushes)), label="pushed before")]
            self.computed(run, pushed, right=False)
            if failed:
                self.tell(ev.PassFailed(run.pass_id, "by the test"))
            else:
                overdue = not missing and self.data.draw(st.booleans(), label="overdue")
                self.tell(ev.PassInterrupted(run.pass_id, overdue=overdue))
            return
        self.computed(run, run.pushes, right=True)
        token = self.data.draw(st.sampled_from([EOS, 5]), label="token")
        self.tell(ev.PassDone(run.pass_id, [SampledToken(token) if row.sampling else None for row in run.rows], 1.0))

    def computed(self, run: RunPass, pushes: tuple[Push, ...], right: bool) -> None:
        for row in run.rows:
            if row.attempt_id in self.right and row.attempt_id in self.store.held:
                begin, end = row.chunk.start, row.chunk.start + len(row.chunk.token_ids)
                if right and all(self.right[row.attempt_id][:begin]):
                    self.right[row.attempt_id][begin:end] = [True] * (end - begin)
                else:
                    self.wrong(row.attempt_id, begin, end)
        for push in pushes:
            if push.attempt_id in self.store.held:
                self.push(push)

    def hand_over(self) -> None:
        name = self.handing_over.pop()
        self.store.handing_over.discard(name)
        if self.data.draw(st.booleans(), label="handed over"):
            self.tell(HandedOver(name, 100))
        else:
            self.tell(storage.HandOverFailed(name, failure(FailureCode.PEER_LOST)))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_the_order_of_events_each_attempt_ends_once_and_gives_its_slots_back(data: st.DataObject) -> None:
    world = World(data)
    for _ in range(data.draw(st.integers(1, 60), label="steps")):
        world.step([*world.possible(), "start", "start", "quiet", *(["abort", "end_session", "lose_store"] if world.started else [])])
    world.tell(events.Quiet(False))
    for _ in range(2000):
        choices = [choice for choice in world.possible() if choice != "tick"]
        if not choices:
            world.now += 61.0 if world.core.load(slots_total=0, slots_available=0).waiting else 0.0
            world.tick()
            if not [choice for choice in world.possible() if choice != "tick"]:
                break
        else:
            getattr(world, choices[0])()
    assert not world.core.has_work
    assert world.store.held == {} and len(world.store.free) == NUM_SLOTS
    for name in world.started:
        assert world.done[name] <= 1 and world.ended[name] <= 1
        assert world.done[name] + world.ended[name] >= (name not in world.excused)


def test_prompts_share_a_pass_as_far_as_the_device_has_pages() -> None:
    def rows(pages: int | None) -> list[str]:
        node = Node()
        node.tell(events.StoreConnected(NUM_SLOTS, pages))
        actions: list[Action] = []
        for slot, name in enumerate("xab"):
            node.tell(start(name, 6))
            actions += node.tell(Acquired(name, (slot,), 0, 0))
        (busy,) = only(actions, RunPass)
        (run,) = only(node.tell(ev.PassDone(busy.pass_id, [SampledToken(7)], 5.0)), RunPass)
        return [row.attempt_id for row in run.rows]

    assert rows(None) == rows(2) == ["a", "b"]
    assert rows(1) == ["a"]
