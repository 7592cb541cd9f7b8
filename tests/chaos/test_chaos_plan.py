"""What is sent and what is broken follows from the seed alone."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from springtide.config import ClusterConfig
from tests.chaos import shapes
from tests.chaos.apis import DIALECTS
from tests.chaos.plan import LEAD_S, TAIL_S, Targets, plan
from tests.chaos.shapes import SHAPES, choose, mixed, named
from tests.chaos.workload import ABORT_SHARE, CONTEXT_TOKENS, KINDS, Item, acts, catalogue, flood

TARGETS = Targets(
    engines=("prefill-0", "decode-0", "decode-1"),
    stores=("prefill-0-store", "decode-0-store", "decode-1-store"),
    children=("prefill-0/0",),
    conductors=("conductor-0", "conductor-1"),
    gateways=("gateway-0",),
    disks=("prefill-0",),
    movable=("decode-0", "decode-1"),
)


def test_the_same_seed_gives_the_same_plan_and_another_another() -> None:
    assert plan(7, TARGETS, 10) == plan(7, TARGETS, 10)
    assert plan(7, TARGETS, 10) != plan(8, TARGETS, 10)


@pytest.mark.parametrize("seed", range(20))
def test_everything_is_taken_back_before_its_round_ends(seed: int) -> None:
    for one in plan(seed, TARGETS, 5):
        assert one.faults, "no round passes in peace"
        for fault in one.faults:
            assert LEAD_S <= fault.at_s < one.lasts_s - TAIL_S
            assert fault.at_s + fault.for_s <= one.lasts_s + 0.1


def test_the_reference_is_of_as_many_ranks_and_of_nothing_else_that_a_shape_has() -> None:
    shape = named("ranks+tiny")
    assert shape.calm.settings == {**shape.calm.settings, "prefill_node": {"tensor_parallel": 2}, "decode_node": {"tensor_parallel": 2}}
    assert "kv" not in shape.calm.settings
    assert shape.calm.topology.decode == ("decode-0",)
    assert named("stages").calm == named("plain").calm


def test_rounds_fill_the_time_that_was_asked_for() -> None:
    for minutes in (1, 3, 10):
        rounds = plan(1, TARGETS, minutes)
        assert sum(one.lasts_s for one in rounds) <= minutes * 60
        assert len(rounds) == minutes


def test_every_kind_of_fault_befalls_every_sort_of_process_in_the_long_run() -> None:
    faults = [fault for one in plan(3, TARGETS, 120) for fault in one.faults]
    kinds = {
        *("kill", "end", "stop", "slow", "cut", "reset", "narrow", "disk full", "flood", "move"),
        *("pause", "flush", "malformed record", "suspend"),
    }
    assert {fault.kind for fault in faults} == kinds
    for kind in ("kill", "end", "stop", "slow"):
        assert {fault.target for fault in faults if fault.kind == kind} == set(TARGETS.processes)
    assert {fault.then_kill for fault in faults if fault.kind == "stop"} == {True, False}
    assert {fault.target for fault in faults if fault.kind == "move"} == set(TARGETS.movable)


def test_what_is_not_there_is_not_hit() -> None:
    small = Targets(("prefill-0", "decode-0"), ("prefill-0-store", "decode-0-store"), (), ("conductor-0",), ())
    faults = [fault for one in plan(3, small, 120) for fault in one.faults]
    assert {fault.target for fault in faults} <= {*small.processes, "all"}
    assert all(fault.kind not in ("disk full", "move") for fault in faults)


def test_a_gateway_in_the_conductors_process_is_not_cut_off_from_its_clients() -> None:
    small = Targets(("prefill-0",), ("prefill-0-store",), (), ("conductor-0",), ())
    assert {fault.target for one in plan(3, small, 120) for fault in one.faults if fault.kind == "cut"} == {"prefill-0"}


def test_the_same_seed_gives_the_same_requests_and_another_others() -> None:
    assert catalogue(5) == catalogue(5) and flood(5, 1, 8) == flood(5, 1, 8)
    assert catalogue(5) != catalogue(6) and flood(5, 1, 8) != flood(5, 2, 8)
    items = catalogue(5)
    assert list(itertools.islice(acts(5, 1, items), 50)) == list(itertools.islice(acts(5, 1, items), 50))
    assert list(itertools.islice(acts(5, 1, items), 50)) != list(itertools.islice(acts(5, 2, items), 50))


def test_every_output_is_decided_by_its_request() -> None:
    """Else there would be nothing to compare it with."""
    for seed in range(10):
        for item in catalogue(seed):
            assert not item.valid or item.settings.get("temperature", 1) == 0 or "seed" in item.settings, item


def test_the_catalogue_has_each_kind_of_request() -> None:
    items = [item for seed in range(5) for item in catalogue(seed)]

    def some(condition) -> bool:
        return any(item.valid and condition(item) for item in items)

    assert {item.kind for item in items} == set(KINDS) and {item.api for item in items} == set(DIALECTS)
    for field in (
        "stop",
        "n",
        "logprobs",
        "seed",
        "deadline_ms",
        "stream_options",
        "response_format",
        "structured_outputs",
        "echo",
        "best_of",
        "idle",
    ):
        assert some(lambda item, field=field: field in item.body), field
    for field in ("prompt_logprobs", "min_tokens", "bad_words", "allowed_token_ids", "store", "candidateCount", "responseJsonSchema"):
        assert some(lambda item, field=field: field in item.settings), field
    for choice in ("required", {"type": "function", "function": {"name": "look_up"}}, {"type": "any"}):
        assert some(lambda item, choice=choice: item.body.get("tool_choice") == choice), choice
    for api in ("completions", "chat/completions", "responses", "messages"):
        assert {item.stream for item in items if item.api == api} == {False, True}, api
    assert some(lambda item: item.stream) and some(lambda item: not item.stream)
    assert some(lambda item: item.num_choices >= 8) and some(lambda item: len(item.body.get("prompt", "")) > 1500)
    assert any(not item.valid for item in items)
    prompts = [item.body["prompt"] for item in catalogue(1) if item.kind in ("shared prefix", "second prefix")]
    assert max(Counter(prompt[:200] for prompt in prompts).values()) > 1, "prefixes are shared"


def test_an_answer_has_as_many_choices_as_were_asked_for() -> None:
    assert Item("1", "x", "completions", {"prompt": ["a", "b"], "n": 3}).num_choices == 6
    assert Item("1", "x", "completions", {"prompt": [1, 2]}).num_choices == 1
    assert Item("1", "x", "generateContent", {"generationConfig": {"candidateCount": 2}}).num_choices == 2


def test_some_streams_are_aborted_and_some_requests_come_in_bursts() -> None:
    turns = list(itertools.islice(acts(1, 0, catalogue(1)), 1000))
    aborted = sum(turn.abort_after is not None for turn in turns) / len(turns)
    assert 0.5 * ABORT_SHARE < aborted < 2 * ABORT_SHARE
    assert any(len(turn.items) > 1 for turn in turns)


def test_a_deadline_is_all_that_the_reference_leaves_out() -> None:
    item = Item("1", "deadline", "completions", {"prompt": "x", "deadline_ms": 500, "seed": 1})
    assert item.deadline_s == 0.5
    assert item.undisturbed.body == {"prompt": "x", "seed": 1}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shapes_are_configurations(shape: shapes.Shape, tmp_path: Path) -> None:
    """And every request of the catalogue fits into the arena."""
    config = ClusterConfig(**shape.configuration(tmp_path, tmp_path, tmp_path / "ssd"))
    names = {f"{role}-{number}" for role in ("prefill", "decode", "instance") for number in range(_nodes(config, role))}
    assert set(shape.topology.engines) == names
    assert {*shape.topology.prefill} & {*shape.topology.decode} == {name for name in names if name.startswith("instance-")}
    assert config.conductor.replicas == len(shape.topology.conductors)
    assert config.server.separate_gateway or shape.topology.gateway_in_conductor or config.conductor.replicas > 1
    assert config.kv.arena_size >= CONTEXT_TOKENS * shapes.BYTES_PER_TOKEN
    assert (config.kv.ssd_dir is not None) == shape.ssd


def _nodes(config: ClusterConfig, role: str) -> int:
    return {"prefill": config.prefill, "decode": config.decode, "instance": config.instances}[role]


def test_beside_instances_are_only_the_nodes_of_one_role_that_are_asked_for() -> None:
    assert named("default+stages").topology.engines == ("prefill-0", "instance-0", "instance-1")
    assert named("tcp+default").topology.engines == ("instance-0", "instance-1")
    assert named("default+ranks").targets.children == ("prefill-0/0", "instance-0/0", "instance-1/0", "decode-0/0")


def test_shapes_can_be_mixed() -> None:
    both = mixed(named("stages"), named("tcp"))
    assert both.name == "stages+tcp" and both == named("stages+tcp")
    assert both.settings["prefill_node"]["stages"] == 2 and both.settings["kv"]["transports"] == ["tcp"]
    assert len(both.topology.prefill) == 2, "the larger of the two"
    assert both.targets.children == ("prefill-0/0", "prefill-1/0")


def test_seeds_choose_every_shape_and_mixtures() -> None:
    chosen = {choose(seed).name for seed in range(200)}
    assert {shape.name for shape in SHAPES} <= chosen
    assert any("+" in name for name in chosen)


def test_an_unknown_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"--shape tcp\+round: there is no shape 'round'; there are plain, "):
        named("tcp+round")
