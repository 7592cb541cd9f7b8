"""Which line runs next: every line to its one result, tenants side by side, whatever comes of each line."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batches.batch import Batch, BatchStatus, InputError
from gateway.batches.core import (
    LONGEST_PAUSE_S,
    Action,
    Answered,
    BatchesCore,
    Cancelled,
    DropLines,
    Event,
    Finish,
    Held,
    Lost,
    NotAnswered,
    OverBudget,
    RunLine,
    Tick,
)


@dataclass
class World:
    """A core, and what runs by its word."""

    most_lines: int = 4
    now: float = 0.0
    running: set[tuple[str, int]] = field(default_factory=set)
    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    finished: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.core = BatchesCore(self.most_lines)

    def feed(self, event: Event) -> list[Action]:
        actions = self.core.handle(event, self.now)
        self.core.validate()
        for action in actions:
            match action:
                case RunLine(batch_id, line, _):
                    assert (batch_id, line) not in self.running and batch_id not in self.finished
                    assert not self.answered[batch_id, line], "a line that has its result is run again"
                    self.running.add((batch_id, line))
                case DropLines(batch_id):
                    self.running = {one for one in self.running if one[0] != batch_id}
                case Finish(batch_id, how):
                    assert batch_id not in self.finished and not any(name == batch_id for name, _ in self.running)
                    self.finished[batch_id] = how
        return actions

    def hold(self, name: str, lines: int, tenant: str = "", made_at: float = 0.0, expires_at: float = 1e9) -> list[Action]:
        return self.feed(Held(name, tenant, made_at, expires_at, range(lines)))

    def answer(self, name: str, line: int) -> list[Action]:
        self.running.remove((name, line))
        self.answered[name, line] += 1
        return self.feed(Answered(name, line))

    def fail(self, name: str, line: int) -> list[Action]:
        self.running.remove((name, line))
        return self.feed(NotAnswered(name, line))

    def refuse(self, name: str, line: int, wait_s: float) -> list[Action]:
        self.running.remove((name, line))
        return self.feed(OverBudget(name, line, wait_s))


def test_so_many_lines_run_at_once_in_the_order_of_the_file() -> None:
    world = World()
    world.hold("a", 6)
    assert sorted(world.running) == [("a", 0), ("a", 1), ("a", 2), ("a", 3)]
    assert world.answer("a", 2) == [RunLine("a", 4)]


def test_a_batch_is_over_when_its_last_line_has_its_result() -> None:
    world = World()
    world.hold("a", 2)
    world.answer("a", 1)
    assert world.answer("a", 0) == [Finish("a", "completed")]


def test_one_of_which_every_line_has_a_result_is_over_at_once() -> None:
    world = World()
    assert world.feed(Held("a", "", 0.0, 1e9, [])) == [Finish("a", "completed")]


def test_a_tenant_that_comes_later_soon_has_its_half() -> None:
    world = World()
    world.hold("large", 100, tenant="first")
    world.hold("small", 100, tenant="second")
    for _ in range(4):
        name, line = min(world.running)
        world.answer(name, line)
    for _ in range(20):
        assert Counter(name for name, _ in world.running) == {"large": 2, "small": 2}
        name, line = min(world.running, key=lambda one: one[1])
        world.answer(name, line)


def test_a_tenants_batches_come_one_after_the_other() -> None:
    world = World(most_lines=2)
    world.hold("older", 3, made_at=1.0)
    world.hold("newer", 3, made_at=2.0)
    order = []
    while world.running:
        name, line = min(world.running, key=lambda one: (one[0] != "older", one[1]))
        order.append(name)
        world.answer(name, line)
    assert order == ["older"] * 3 + ["newer"] * 3


def test_a_line_that_came_to_nothing_is_tried_again_after_a_pause_that_grows() -> None:
    world = World(most_lines=1)
    world.hold("a", 1)
    pauses, tries = list[float](), list[int]()
    for _ in range(9):
        world.fail("a", 0)
        began = world.now
        while not world.running:
            world.now += 0.5
            tries += [action.tries for action in world.feed(Tick()) if isinstance(action, RunLine)]
        pauses.append(world.now - began)
        assert tries == [*range(1, len(pauses) + 1)]
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert world.answer("a", 0) == [Finish("a", "completed")]


def test_while_one_line_pauses_others_run() -> None:
    world = World(most_lines=1)
    world.hold("a", 2)
    assert world.fail("a", 0) == [RunLine("a", 1)]


def test_a_batch_whose_maker_has_had_its_tokens_rests_and_others_run() -> None:
    world = World(most_lines=2)
    world.hold("a", 4)
    world.hold("b", 2, made_at=1.0)
    assert world.refuse("a", 1, 20.0) == [RunLine("b", 0)], "none of its lines is tried in the place of the one that was refused"
    assert world.answer("a", 0) == [RunLine("b", 1)], "what runs goes on"
    assert world.answer("b", 0) == [] and world.answer("b", 1) == [Finish("b", "completed")]
    world.now = 19.0
    assert world.feed(Tick()) == []
    world.now = 20.0
    assert world.feed(Tick()) == [RunLine("a", 1), RunLine("a", 2)], "in the order of the file, and at once"


def test_one_that_rests_ends_in_time() -> None:
    world = World()
    world.hold("a", 1, expires_at=10.0)
    assert world.refuse("a", 0, 50.0) == []
    world.now = 10.0
    assert world.feed(Tick()) == [DropLines("a"), Finish("a", "expired")]


def test_when_its_time_is_over_a_batch_ends_with_what_it_has() -> None:
    world = World()
    world.hold("a", 6, expires_at=10.0)
    world.answer("a", 0)
    world.now = 10.0
    assert world.feed(Tick()) == [DropLines("a"), Finish("a", "expired")] and not world.running
    assert world.feed(NotAnswered("a", 1)) == [], "what was dropped may still be heard of"


def test_what_its_client_does_not_want_is_dropped_at_once() -> None:
    world = World()
    world.hold("a", 6)
    world.hold("b", 1, made_at=1.0)
    assert world.feed(Cancelled("a")) == [DropLines("a"), Finish("a", "cancelled"), RunLine("b", 0)]


def test_a_batch_that_somebody_else_has_is_none_of_ours() -> None:
    world = World()
    world.hold("a", 6)
    assert world.feed(Lost("a")) == [DropLines("a")]
    assert world.feed(Lost("a")) == [] and world.feed(Cancelled("a")) == [] and world.feed(Answered("a", 0)) == []


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_whatever_happens_every_line_of_a_batch_that_is_held_to_its_end_has_one_result(data: st.DataObject) -> None:
    world = World(most_lines=data.draw(st.integers(1, 5)))
    sizes: dict[str, int] = {}
    lost: set[str] = set()
    for _ in range(data.draw(st.integers(1, 60), label="steps")):
        live = sorted(sizes.keys() - world.finished.keys() - lost)
        kinds = ["hold", "tick", *(["answer"] * 4 + ["fail", "refuse"] if world.running else []), *(["cancel", "lose"] if live else [])]
        match data.draw(st.sampled_from(kinds), label="next"):
            case "hold":
                name = f"b{len(sizes)}"
                sizes[name] = data.draw(st.integers(0, 8), label="lines")
                expires_at = world.now + data.draw(st.sampled_from([5.0, 1e9]), label="time")
                world.hold(name, sizes[name], tenant=data.draw(st.sampled_from("xy")), made_at=float(len(sizes)), expires_at=expires_at)
            case "answer":
                world.answer(*data.draw(st.sampled_from(sorted(world.running))))
            case "fail":
                world.fail(*data.draw(st.sampled_from(sorted(world.running))))
            case "refuse":
                world.refuse(*data.draw(st.sampled_from(sorted(world.running))), data.draw(st.sampled_from([0.0, 2.0, 60.0])))
            case "tick":
                world.now += data.draw(st.sampled_from([0.5, 3.0]))
                world.feed(Tick())
            case "cancel":
                world.feed(Cancelled(data.draw(st.sampled_from(live))))
            case "lose":
                lost.add(name := data.draw(st.sampled_from(live)))
                world.feed(Lost(name))
    for _ in range(1000):
        if not sizes.keys() - world.finished.keys() - lost:
            break
        world.now += LONGEST_PAUSE_S
        world.feed(Tick())
        for name, line in sorted(world.running):
            if (name, line) in world.running:
                world.answer(name, line)
    assert world.finished.keys() | lost == sizes.keys() and not world.running
    assert max(world.answered.values(), default=0) <= 1
    for name, how in world.finished.items():
        if how == "completed":
            assert all(world.answered[name, line] == 1 for line in range(sizes[name]))


# ---- what may become of a batch ----


def batch(**changes: object) -> Batch:
    values: dict[str, object] = {"batch_id": "batch-1", "tenant": "acme", "endpoint": "/v1/completions", "input_file_id": "file-1"}
    made = Batch(**{**values, "completion_window": "24h", "created_at": 1, "expires_at": 86401, **changes})  # type: ignore[arg-type]
    assert Batch.from_record(made.to_record()) == made
    return made


def test_from_its_making_to_its_end() -> None:
    taken = batch(metadata={"a": "b"}).taken()
    assert taken is not None and taken.epoch == 1
    running = taken.validated(1, 3, 5)
    assert running is not None and (running.status, running.total, running.in_progress_at) == (BatchStatus.IN_PROGRESS, 3, 5)
    further = running.advanced(1, 2, 0)
    assert further is not None and further.advanced(1, 2, 0) is None, "nothing to write"
    made = further.finalizing(1, 6)
    assert made is not None
    over = made.ended(1, "completed", 2, 1, "file-o", "file-e", 7)
    assert over is not None and over.status.over and (over.completed, over.failed, over.completed_at) == (2, 1, 7)
    assert over.taken() is None and over.cancelling(8) is None
    assert Batch.from_record(over.to_record()) == over


@pytest.mark.parametrize("status", [BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS])
def test_who_has_been_taken_over_changes_nothing(status: BatchStatus) -> None:
    successor = batch(status=status, epoch=2)
    assert successor.validated(1, 3, 5) is None
    assert successor.refused(1, (InputError("empty_file", "no line"),), 5) is None
    assert successor.advanced(1, 1, 1) is None
    assert successor.finalizing(1, 5) is None
    assert successor.ended(1, "completed", 1, 0, "", "", 5) is None


def test_one_that_is_cancelled_is_run_no_further() -> None:
    wanted_no_more = batch(epoch=1, status=BatchStatus.IN_PROGRESS).cancelling(5)
    assert wanted_no_more is not None and wanted_no_more.cancelling_at == 5
    assert wanted_no_more.finalizing(1, 6) is None and wanted_no_more.validated(1, 3, 6) is None
    over = wanted_no_more.ended(1, "cancelled", 1, 0, "file-o", "", 7)
    assert over is not None and over.status is BatchStatus.CANCELLED
