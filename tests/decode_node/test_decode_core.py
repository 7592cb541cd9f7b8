"""The decode core: single stories, and random orders of events."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.core import DecodeCore
from decode_node.core import events as ev
from decode_node.core.actions import Action, Reply, RunStep
from decode_node.core.core import Settings
from node_runtime import events, storage
from node_runtime.storage import AttemptFailed, Commit, Grow, Grown, Ingested, Release, Reserve, Reserved
from springtide.blocks import block_keys
from springtide.cost import DecodeCost
from springtide.rpc import common_pb2 as pb
from springtide.sampling import SampledToken
from tests.support.node_core import BLOCK_TOKENS, EOS, NAMESPACE, StoreLedger, failure, make_request

MAX_BATCH = 3
NUM_SLOTS = 12
POOL_FULL = failure(pb.FAILURE_CODE_POOL_FULL)


def new_core() -> DecodeCore:
    return DecodeCore(Settings(DecodeCost(1.0, 1.0, 0.01), BLOCK_TOKENS, MAX_BATCH, {EOS}, ingest_lease_s=300.0, slot_wait_s=30.0))


def start(name: str, num_tokens: int, *, session: int = 1, max_tokens: int = 100, sent: int = 0, tbt_slo_ms: float = 0.0) -> ev.Start:
    return ev.Start(session, make_request(name, num_tokens, num_prompt_tokens=num_tokens - sent, max_tokens=max_tokens), tbt_slo_ms)


def only(actions: list[Action], kind: type) -> list:  # type: ignore[type-arg]
    return [action for action in actions if isinstance(action, kind)]


class Node:
    """A connected core over a store that answers at once, as far as it has slots."""

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        self.core = new_core()
        self.store = StoreLedger(num_slots)
        self.now = 0.0
        self.tell(storage.StoreUp(num_slots))

    def tell(self, event: ev.Event) -> list[Action]:
        """Returns what followed, the store's answers and what they caused included."""
        seen: list[Action] = []
        pending: list[ev.Event] = [event]
        while pending:
            actions = self.core.handle(pending.pop(0), self.now)
            self.core.validate()
            seen += actions
            for action in actions:
                if not isinstance(action, RunStep | Reply):
                    self.store.order(action)
                    pending += self.answers(action)
        return seen

    def answers(self, order: storage.Order) -> list[ev.Event]:
        name = order.attempt_id
        if isinstance(order, Reserve):
            given = self.store.give(name)
            return [AttemptFailed(name, POOL_FULL) if given is None else Reserved(name, given, 0)]
        if isinstance(order, Grow):
            self.store.growing.remove(order)
            if not self.store.free:
                return [AttemptFailed(name, POOL_FULL)]
            slot = self.store.free.pop()
            self.store.held[name].append(slot)
            return [Grown(name, (slot,))]
        return []

    def join(self, begin: ev.Start, first_token: int = 100) -> list[Action]:
        return self.tell(begin) + self.tell(Ingested(begin.request.attempt_id, first_token))

    def step(self, run: RunStep, token: int = 5) -> list[Action]:
        return self.tell(ev.StepDone(run.step_id, [(SampledToken(token),)] * len(run.batch), 2.0))


def steps(node: Node, actions: list[Action], count: int, token: int = 5) -> list[Action]:
    """Runs `count` steps from the one in `actions` on; returns what followed the first."""
    seen: list[Action] = []
    for _ in range(count):
        (run,) = only(actions, RunStep)
        actions = node.step(run, token)
        seen += actions
    return seen


def outputs(actions: list[Action]) -> list[pb.TokenOutput]:
    return [output for reply in only(actions, Reply) for output in reply.outputs]


def failures(actions: list[Action]) -> list[tuple[str, int]]:
    return [(output.attempt_id, output.failure.code) for output in outputs(actions) if output.HasField("failure")]


def test_a_sequence_continues_after_the_first_token_until_its_limit() -> None:
    node = Node()
    actions = node.join(start("a", 10, max_tokens=4))
    (run,) = only(actions, RunStep)
    assert run.batch[0].start == 10 and list(run.batch[0].token_ids) == [100] and list(run.sampling[0].output_ids) == [100]
    seen = steps(node, actions, 3)
    assert [(output.position, list(output.token_ids), output.finish_reason) for output in outputs(seen)] == [
        (1, [5], pb.FINISH_REASON_UNSPECIFIED),
        (2, [5], pb.FINISH_REASON_UNSPECIFIED),
        (3, [5], pb.FINISH_REASON_LENGTH),
    ]
    assert only(seen, Release) == [Release("a")] and only(seen[-2:], RunStep) == []
    assert len(node.store.free) == NUM_SLOTS


def test_an_end_token_ends_the_output_and_is_not_part_of_it() -> None:
    node = Node()
    (output,) = outputs(steps(node, node.join(start("a", 10)), 1, token=EOS))
    assert output.finish_reason == pb.FINISH_REASON_STOP and list(output.token_ids) == []


def test_a_continued_request_counts_positions_from_its_original_prompt() -> None:
    node = Node()
    actions = node.join(start("a", 14, sent=4))
    (run,) = only(actions, RunStep)
    assert len(run.sampling[0].prompt_ids) == 10 and len(run.sampling[0].output_ids) == 5 and run.batch[0].start == 14
    assert outputs(steps(node, actions, 1))[0].position == 5


def test_blocks_are_committed_as_the_output_fills_them_under_chained_keys() -> None:
    node = Node()
    begin = start("a", 11)
    seen = steps(node, node.join(begin), 14)
    tokens = [*begin.request.token_ids, 100, *[5] * 14]
    keys = block_keys(NAMESPACE, tokens[:24], BLOCK_TOKENS)
    assert only(seen, Commit) == [Commit("a", 1, (keys[1],)), Commit("a", 2, (keys[2],))]


def test_slots_are_asked_for_one_block_ahead_and_not_beyond_the_limit() -> None:
    node = Node()
    actions = node.join(start("a", 10, max_tokens=8))
    assert only(actions, Grow) == [Grow("a", 1)]
    assert only(steps(node, actions, 7), Grow) == []


def test_one_message_a_step_goes_to_each_session_and_the_next_step_is_launched_before() -> None:
    node = Node()
    first = node.join(start("a", 5, session=1))
    node.join(start("b", 5, session=1))
    node.join(start("c", 5, session=2))
    actions = steps(node, first, 1)
    (run,) = only(actions, RunStep)
    assert run.attempt_ids == ("a", "b", "c")
    actions = node.step(run)
    assert [(reply.session, len(reply.outputs)) for reply in only(actions, Reply)] == [(1, 2), (2, 1)]
    assert actions.index(only(actions, RunStep)[0]) < actions.index(only(actions, Reply)[0])


def test_a_batch_has_at_most_its_places_and_the_oldest_have_them() -> None:
    node = Node(30)
    first = node.join(start("a", 5))
    for name in "bcde":
        node.join(start(name, 5))
    (run,) = only(steps(node, first, 1), RunStep)
    assert run.attempt_ids == ("a", "b", "c")


def test_the_door_is_closed_when_the_step_would_miss_an_objective() -> None:
    node = Node(100)
    node.join(start("a", 50, tbt_slo_ms=4.0))
    refused = node.tell(start("b", 200, tbt_slo_ms=100.0))
    assert failures(refused) == [("b", pb.FAILURE_CODE_OVERLOADED)] and only(refused, Reserve) == []
    assert failures(node.tell(start("c", 204, sent=4, tbt_slo_ms=4.0))) == []


def test_who_is_still_in_prefill_does_not_close_the_door() -> None:
    """When such an attempt joins, who runs now may have left: the Conductor weighs that."""
    node = Node(100)
    node.tell(start("a", 200, tbt_slo_ms=4.0))
    assert failures(node.tell(start("b", 50, tbt_slo_ms=4.0))) == []


def test_the_door_is_closed_when_as_many_wait_as_the_batch_holds() -> None:
    node = Node(100)
    for i in range(2 * MAX_BATCH):
        assert failures(node.tell(start(f"a{i}", 5))) == []
    assert failures(node.tell(start("late", 5))) == [("late", pb.FAILURE_CODE_OVERLOADED)]


def test_a_full_pool_at_the_reservation_is_waited_for_oldest_first_and_not_for_ever() -> None:
    node = Node(4)
    node.tell(start("a", 30, max_tokens=2))
    node.tell(start("b", 30, max_tokens=2))
    node.tell(start("c", 5, max_tokens=2))
    assert only(node.tell(events.Abort("a")), Reserve) == []
    assert [reserve.attempt_id for reserve in only(node.tell(storage.StoreLoad(4, 4)), Reserve)] == ["b", "c"]
    node.now = 31.0
    assert failures(node.tell(events.Tick())) == [("c", pb.FAILURE_CODE_POOL_FULL)]


def test_a_prompt_larger_than_the_arena_is_refused_with_both_numbers() -> None:
    (output,) = outputs(Node().tell(start("a", 8 * NUM_SLOTS + 1)))
    assert output.failure.code == pb.FAILURE_CODE_INVALID and "13 blocks" in output.failure.message and "12 slots" in output.failure.message


def test_the_youngest_gives_its_slots_to_an_older_one_when_the_pool_is_truly_full() -> None:
    node = Node(5)
    actions = node.join(start("old", 14))
    node.join(start("young", 1, max_tokens=16))
    seen = steps(node, actions, 12)
    assert failures(seen) == [("young", pb.FAILURE_CODE_PREEMPTED)]
    assert [output.position for output in outputs(seen) if output.attempt_id == "old"] == list(range(1, 13))


def test_a_sequence_without_a_slot_sits_out_and_stalls_nobody() -> None:
    node = Node(100)
    actions = node.join(start("a", 5))
    node.core.handle(start("b", 8, max_tokens=20), 0.0)
    node.core.handle(Reserved("b", (90,), 0), 0.0)
    node.core.handle(Ingested("b", 9), 0.0)
    (run,) = only(actions, RunStep)
    (run,) = only(node.step(run), RunStep)
    assert run.attempt_ids == ("a",)
    node.core.handle(Grown("b", (91,)), 0.0)
    (run,) = only(node.core.handle(ev.StepDone(run.step_id, [(SampledToken(5),)], 1.0), 0.0), RunStep)
    assert run.attempt_ids == ("a", "b")


def test_a_sequence_that_outgrows_the_arena_alone_fails_with_both_numbers() -> None:
    node = Node(2)
    seen = steps(node, node.join(start("a", 10)), 6)
    (output,) = [output for output in outputs(seen) if output.HasField("failure")]
    assert output.failure.code == pb.FAILURE_CODE_INVALID and "3 blocks" in output.failure.message and "2 slots" in output.failure.message


def test_a_request_that_its_first_token_ends_is_released_silently() -> None:
    node = Node()
    assert only(node.join(start("a", 10, max_tokens=1)), Reply) == [] and len(node.store.free) == NUM_SLOTS
    assert only(node.join(start("b", 10), first_token=EOS), Reply) == [] and len(node.store.free) == NUM_SLOTS


def test_slots_of_a_running_step_are_released_only_after_it() -> None:
    node = Node()
    (run,) = only(node.join(start("a", 10)), RunStep)
    assert node.tell(events.Abort("a")) == []
    assert node.step(run) == [Release("a")]


def test_a_prompt_that_is_never_handed_over_is_given_up() -> None:
    node = Node()
    node.tell(start("a", 10))
    node.now = 300.0
    assert failures(node.tell(events.Tick())) == [("a", pb.FAILURE_CODE_PEER_LOST)] and len(node.store.free) == NUM_SLOTS


def test_a_lost_store_fails_everything_and_a_new_one_starts_afresh() -> None:
    node = Node()
    (run,) = only(node.join(start("a", 10)), RunStep)
    assert failures(node.core.handle(storage.StoreLost("gone"), 0.0)) == [("a", pb.FAILURE_CODE_PEER_LOST)]
    assert failures(node.core.handle(start("b", 10), 0.0)) == [("b", pb.FAILURE_CODE_PEER_LOST)]
    node.store.lost()
    node.tell(storage.StoreUp(NUM_SLOTS))
    assert only(node.join(start("c", 10)), RunStep) == []
    assert [run.attempt_ids for run in only(node.step(run), RunStep)] == [("c",)]


class World:
    """A store, an engine, gateways and prefill nodes around a core, answering in the order that hypothesis draws."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.core = new_core()
        self.store = StoreLedger(NUM_SLOTS)
        self.now = 0.0
        self.run: RunStep | None = None
        self.ingesting: list[str] = []
        self.ended: Counter[str] = Counter()
        self.positions: dict[str, int] = {}
        self.sessions: dict[str, int] = {}
        self.max_tokens: dict[str, int] = {}
        self.excused: set[str] = set()
        """Aborted, or over with their first token: no terminal message is due."""
        self.tell(storage.StoreUp(NUM_SLOTS))

    def tell(self, event: ev.Event) -> None:
        self.now += 0.01
        actions = self.core.handle(event, self.now)
        self.core.validate()
        for action in actions:
            match action:
                case RunStep():
                    assert self.run is None
                    for name, chunk in zip(action.attempt_ids, action.batch, strict=True):
                        assert self.store.may_use(name, chunk.slots)
                        assert chunk.start < len(chunk.slots) * BLOCK_TOKENS
                    self.run = action
                case Reply(session, messages):
                    for output in messages:
                        self.receive(session, output)
                case _:
                    if isinstance(action, Release):
                        assert self.run is None or action.attempt_id not in self.run.attempt_ids
                        self.ingesting = [name for name in self.ingesting if name != action.attempt_id]
                    self.store.order(action)

    def receive(self, session: int, output: pb.TokenOutput) -> None:
        name = output.attempt_id
        assert self.sessions[name] == session and name not in self.excused and not self.ended[name]
        if output.HasField("failure") or output.finish_reason:
            self.ended[name] += 1
        if not output.HasField("failure"):
            assert output.position == self.positions[name]
            self.positions[name] += 1

    def possible(self) -> list[str]:
        choices = ["answer"] * bool(self.store.unanswered) + ["grow"] * bool(self.store.growing)
        return choices + ["end_step"] * (self.run is not None) + ["ingest"] * bool(self.ingesting)

    def pick(self, names: list[str]) -> str:
        return self.data.draw(st.sampled_from(sorted(names)), label="which")

    def start(self) -> None:
        name = f"a{len(self.sessions)}"
        self.sessions[name] = self.data.draw(st.integers(1, 2), label="session")
        num_tokens = self.data.draw(st.integers(2, 50), label="num_tokens")
        sent = self.data.draw(st.integers(0, 1), label="sent")
        self.max_tokens[name] = self.data.draw(st.sampled_from([sent + 1, 30]), label="max_tokens")
        self.positions[name] = sent + 1
        self.tell(start(name, num_tokens, session=self.sessions[name], sent=sent, max_tokens=self.max_tokens[name]))

    def abort(self) -> None:
        name = self.pick(list(self.sessions))
        self.excused |= {name} - set(self.ended)
        self.tell(events.Abort(name))

    def end_session(self) -> None:
        session = self.data.draw(st.integers(1, 2), label="session")
        self.excused |= {name for name, owner in self.sessions.items() if owner == session} - set(self.ended)
        self.tell(events.SessionEnded(session))

    def lose_store(self) -> None:
        self.store.lost()
        self.ingesting.clear()
        self.tell(storage.StoreLost("lost"))
        self.tell(storage.StoreUp(NUM_SLOTS))

    def tick(self) -> None:
        self.tell(events.Tick())
        self.tell(storage.StoreLoad(len(self.store.free), len(self.store.free)))

    def answer(self) -> None:
        name = self.pick(list(self.store.unanswered))
        given = self.store.give(name)
        if given is not None:
            self.ingesting.append(name)
        self.tell(AttemptFailed(name, POOL_FULL) if given is None else Reserved(name, given, 0))

    def grow(self) -> None:
        order = self.store.growing.pop(0)
        if not self.store.free:
            self.tell(AttemptFailed(order.attempt_id, POOL_FULL))
            return
        slot = self.store.free.pop()
        self.store.held[order.attempt_id].append(slot)
        self.tell(Grown(order.attempt_id, (slot,)))

    def ingest(self) -> None:
        name = self.pick(self.ingesting)
        self.ingesting.remove(name)
        if self.data.draw(st.integers(0, 4), label="hand-over fails") == 0:
            self.tell(AttemptFailed(name, failure(pb.FAILURE_CODE_PEER_LOST)))
            return
        token = self.data.draw(st.sampled_from([EOS, 7, 7]), label="first token")
        if token == EOS or self.max_tokens[name] == self.positions[name]:
            self.excused.add(name)
        self.tell(Ingested(name, token))

    def end_step(self) -> None:
        run, self.run = self.run, None
        assert run is not None
        if self.data.draw(st.integers(0, 19), label="step fails") == 19:
            self.tell(ev.StepFailed(run.step_id, "by the test"))
            return
        tokens = [SampledToken(self.data.draw(st.sampled_from([6, 7, 8, EOS]), label="token")) for _ in run.batch]
        self.tell(ev.StepDone(run.step_id, [(token,) for token in tokens], 1.0))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_whatever_the_order_of_events_each_attempt_ends_once_and_gives_its_slots_back(data: st.DataObject) -> None:
    world = World(data)
    for _ in range(data.draw(st.integers(1, 60), label="steps")):
        choices = [*world.possible(), "start", "start", "tick", *(["abort", "end_session", "lose_store"] if world.sessions else [])]
        getattr(world, data.draw(st.sampled_from(choices), label="next"))()
    for _ in range(3000):
        choices = world.possible()
        if choices:
            getattr(world, choices[0])()
        elif world.core.load().attempt_ids:
            world.now += 31.0
            world.tick()
        else:
            break
    assert world.core.load().attempt_ids == ()
    assert world.store.held == {} and len(world.store.free) == NUM_SLOTS
    for name in world.sessions:
        assert (world.ended[name] == 1) or (name in world.excused)
