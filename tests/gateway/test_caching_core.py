"""What is decided for a context cache: a simulated world of stores does what looks say, and fails as it likes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.caching import core
from gateway.caching.context import CacheId, ContextCache, Kept, Status, Strength
from gateway.caching.core import LOOK_EVERY_S, Look, Store
from springtide.ids import Incarnation, NodeId

BLOCKS = 10
NOW = 1_000_000.0


def new_cache(**changes: object) -> ContextCache:
    cache = ContextCache(CacheId("cache-1"), "ann", "m", BLOCKS * 64, BLOCKS, NOW, NOW + 3600, active_since=NOW)
    return replace(cache, **changes)  # type: ignore[arg-type]


@dataclass
class World:
    """Stores with what they hold, and whether they are well."""

    stores: dict[NodeId, Store]
    held: dict[NodeId, int] = field(default_factory=dict)
    pins: dict[NodeId, Strength] = field(default_factory=dict)
    dead: set[NodeId] = field(default_factory=set)
    no_hard: set[NodeId] = field(default_factory=set)
    no_copies: set[NodeId] = field(default_factory=set)
    uses: dict[NodeId, int] = field(default_factory=dict)
    computing_fails: bool = False
    computed: int = 0
    actions: list[core.Action] = field(default_factory=list)

    @classmethod
    def of(cls, count: int) -> World:
        """The first half of them, rounded up, with prefill nodes."""
        nodes = [NodeId(f"node-{index}") for index in range(count)]
        return cls({node: Store(node, Incarnation(index + 1), f"{node}:1", index < (count + 1) // 2) for index, node in enumerate(nodes)})

    def restart(self, node: NodeId) -> None:
        """It comes back empty."""
        self.stores[node] = replace(self.stores[node], incarnation=Incarnation(self.stores[node].incarnation + 1000))
        self.held.pop(node, None)
        self.pins.pop(node, None)
        self.dead.discard(node)

    def look(self, cache: ContextCache, now: float, deleted: bool = False) -> tuple[ContextCache, float | None]:
        """One look, to its end, and another that works if that is what it ends with: the cache then, and when it is due again."""
        cache, rest = self.one_look(cache, now, deleted, works=False)
        if rest.works:
            held = cache.kept.status is Status.READY
            assert rest.until == (min(now + LOOK_EVERY_S, cache.expires_at) if held else None), "what is held is looked at meanwhile"
            cache, rest = self.one_look(cache, now, deleted, works=True)
        return cache, rest.until

    def one_look(self, cache: ContextCache, now: float, deleted: bool, works: bool) -> tuple[ContextCache, core.Rest]:
        look, events = Look(cache, works), deque[core.Event]([core.Begun(tuple(self.stores.values()), self.uses)])
        while True:
            assert events, f"nothing is under way, and the look is not over: {self.actions}"
            for action in look.handle(events.popleft(), now):
                look.validate()
                self.actions.append(action)
                match action:
                    case core.Rest():
                        assert look.over and not (works and action.works)
                        return cache, action
                    case core.Save(kept):
                        cache = cache.with_kept(kept)
                        if deleted:
                            events.append(core.Gone())
                    case core.Unpin(node):
                        self.pins.pop(node, None)
                    case core.ForgetUses(node):
                        del self.uses[node]
                    case _:
                        assert works or isinstance(action, core.Pin), "what takes long waits for its turn"
                        events.append(self.answer(action))

    def answer(self, action: core.Action) -> core.Event:
        match action:
            case core.Pin(node, strength, ttl_s):
                assert ttl_s > 0
                if node in self.dead:
                    return core.NotPinned(node)
                if strength is Strength.HARD and node in self.no_hard:
                    return core.TooManyHard(node)
                if self.held.get(node):
                    self.pins[node] = strength
                return core.Pinned(node, self.held.get(node, 0))
            case core.Copy(node, sources):
                well = [source for source in sources if source not in self.dead and self.held.get(source, 0) >= BLOCKS]
                if node in self.dead or node in self.no_copies or not well:
                    return core.Copied(node, self.held.get(node, 0) if node not in self.dead else 0)
                self.held[node] = BLOCKS
                return core.Copied(node, BLOCKS)
            case core.Compute():
                self.computed += 1
                there = [node for node, store in self.stores.items() if store.prefills and node not in self.dead]
                if self.computing_fails or not there:
                    return core.NotComputed("nobody is there", core.Failure.NOT_NOW)
                self.held[there[0]] = BLOCKS
                return core.Computed(self.stores[there[0]])
        raise AssertionError(f"{action} has no answer")


def test_a_new_one_is_computed_and_pinned_where_it_was() -> None:
    world = World.of(3)
    cache, due = world.look(new_cache(), NOW)
    assert (cache.kept.status, set(cache.kept.held)) == (Status.READY, {NodeId("node-0")})
    assert world.pins == {NodeId("node-0"): Strength.SOFT} and world.computed == 1
    assert due == NOW + LOOK_EVERY_S


def test_it_is_copied_to_as_many_stores_as_asked_and_no_more() -> None:
    world = World.of(4)
    cache, _ = world.look(new_cache(replicas=3), NOW)
    assert len(world.pins) == len(cache.kept.held) == 3 and world.computed == 1
    fewer, _ = world.look(replace(cache, replicas=1), NOW)
    assert len(world.pins) == len(fewer.kept.held) == 1


def test_copies_are_made_where_prompts_are_computed_first() -> None:
    world = World.of(6)
    cache, _ = world.look(new_cache(replicas=3), NOW)
    assert all(world.stores[node].prefills for node in cache.kept.held)


def test_a_store_that_died_is_replaced_by_a_copy_and_nothing_is_computed() -> None:
    world = World.of(3)
    cache, _ = world.look(new_cache(replicas=2), NOW)
    lost = next(iter(cache.kept.held))
    del world.stores[lost]
    world.dead.add(lost)
    cache, _ = world.look(cache, NOW + 1)
    assert lost not in cache.kept.held and len(cache.kept.held) == 2 and world.computed == 1


def in_use(uses: dict[str, int], strength: Strength = Strength.SOFT, replicas: int = 1) -> tuple[World, ContextCache]:
    """A cache of which four stores have a copy, and that was pinned where it was computed before it was used so often at each of them."""
    world = World.of(4)
    cache, _ = world.look(new_cache(strength=strength, replicas=replicas), NOW)
    world.held = dict.fromkeys(world.stores, BLOCKS)
    world.uses = {NodeId(node): count for node, count in uses.items()}
    world.actions.clear()
    return world, cache


def test_a_pin_moves_to_a_copy_that_is_used_much_more() -> None:
    world, cache = in_use({"node-0": 3, "node-1": 20, "node-2": 12}, Strength.HARD)
    cache, _ = world.look(cache, NOW + 20)
    assert world.pins == {NodeId("node-1"): Strength.HARD} and set(cache.kept.held) == {NodeId("node-1")}
    assert not any(isinstance(action, core.Copy) for action in world.actions), "the copy was there"
    world.actions.clear()
    assert world.look(cache, NOW + 40)[0] == cache and len(world.actions) == 2, "there it stays"


def test_a_pin_stays_where_it_is_used_about_as_much_as_elsewhere() -> None:
    for uses in ({"node-0": 20, "node-1": 40}, {"node-1": 3}, {"gone": 60}):
        world, cache = in_use(uses)
        assert world.look(cache, NOW + 20)[0] == cache and set(world.pins) == {NodeId("node-0")}


def test_of_several_pins_those_move_where_it_is_used_least() -> None:
    world, cache = in_use({"node-0": 30, "node-1": 1, "node-2": 30, "node-3": 20}, replicas=2)
    assert set(cache.kept.held) == {NodeId("node-0"), NodeId("node-1")}
    cache, _ = world.look(cache, NOW + 20)
    assert set(world.pins) == set(cache.kept.held) == {NodeId("node-0"), NodeId("node-2")}


def test_a_pin_does_not_move_to_what_is_no_whole_copy_nor_to_where_it_would_be_soft() -> None:
    world, cache = in_use({"node-1": 20, "node-2": 10}, Strength.HARD)
    world.held[NodeId("node-1")] = BLOCKS - 1
    world.no_hard.add(NodeId("node-2"))
    assert world.look(cache, NOW + 20)[0] == cache and world.pins == {NodeId("node-0"): Strength.HARD}


def test_uses_of_a_copy_that_is_gone_are_forgotten_and_nobody_asks_for_it_again() -> None:
    world, cache = in_use({"node-0": 3, "node-1": 20})
    world.held[NodeId("node-1")] = BLOCKS // 2
    assert world.look(cache, NOW + 20)[0] == cache and world.uses == {NodeId("node-0"): 3}
    assert set(world.pins) == {NodeId("node-0")}, "the half is unpinned"
    world.actions.clear()
    assert world.look(cache, NOW + 40)[0] == cache
    assert [action.node_id for action in world.actions if isinstance(action, core.Pin)] == ["node-0"]


def test_when_the_pinned_copy_is_lost_one_where_it_is_used_takes_its_place_and_nothing_is_computed() -> None:
    for marked in (False, True):
        world, cache = in_use({"node-2": 1})
        world.restart(NodeId("node-0"))
        cache, _ = world.look(replace(cache, marked=marked), NOW + 1)
        assert set(world.pins) == set(cache.kept.held) == {NodeId("node-2")}
        assert [action.kept.status for action in world.actions if isinstance(action, core.Save)] == [Status.READY], "it was never pending"
        assert world.computed == 1


def test_copies_that_are_there_are_pinned_before_others_are_made() -> None:
    world, cache = in_use({"node-3": 1})
    cache, _ = world.look(replace(cache, replicas=2), NOW + 20)
    assert set(cache.kept.held) == {NodeId("node-0"), NodeId("node-3")}
    assert not any(isinstance(action, core.Copy) for action in world.actions)


def test_it_is_pending_while_nobody_holds_it_and_computed_anew() -> None:
    world = World.of(2)
    cache, _ = world.look(new_cache(), NOW)
    world.restart(next(iter(cache.kept.held)))
    world.actions.clear()
    cache, _ = world.look(cache, NOW + 1)
    states = [action.kept.status for action in world.actions if isinstance(action, core.Save)]
    assert states == [Status.PENDING, Status.READY] and world.computed == 2


def test_a_store_that_lost_some_of_its_blocks_gets_them_from_another() -> None:
    world = World.of(2)
    cache, _ = world.look(new_cache(replicas=2), NOW)
    world.held[NodeId("node-1")] = BLOCKS // 2
    cache, _ = world.look(cache, NOW + 1)
    assert len(cache.kept.held) == 2 and world.held[NodeId("node-1")] == BLOCKS and world.computed == 1


def test_a_pin_that_no_store_takes_hard_is_soft() -> None:
    world = World.of(1)
    world.no_hard.add(NodeId("node-0"))
    cache, _ = world.look(new_cache(strength=Strength.HARD), NOW)
    assert cache.kept.status is Status.READY and world.pins == {NodeId("node-0"): Strength.SOFT}


def test_what_cannot_be_computed_now_is_tried_again_and_again_later() -> None:
    world = World.of(1)
    world.computing_fails = True
    cache, pauses = new_cache(), []
    for _ in range(8):
        cache, due = world.look(cache, NOW)
        assert cache.kept.status is Status.PENDING and due is not None
        pauses.append(due - NOW)
    assert pauses == sorted(pauses) and pauses[0] == 1.0 and pauses[-1] == 30.0
    world.computing_fails = False
    assert world.look(cache, NOW)[0].kept == Kept(Status.READY, held={NodeId("node-0"): Incarnation(1)})


def test_what_breaks_down_whoever_computes_it_is_tried_some_times() -> None:
    cache, now, pauses = new_cache(), NOW, list[float]()
    for tries in range(1, core.MOST_BREAKDOWNS + 1):
        look, idle = Look(cache, works=True), Look(cache, works=True)
        idle.handle(core.Begun(()), now)
        saved, _ = idle.handle(core.NotComputed("nobody is there", core.Failure.NOT_NOW), now)
        assert isinstance(saved, core.Save) and saved.kept.breakdowns == tries - 1, "that is nobody's breakdown"
        assert look.handle(core.Begun(()), now)[-1] == core.Compute()
        saved, rest = look.handle(core.NotComputed("not now", core.Failure.BREAKDOWN), now)
        assert isinstance(saved, core.Save) and isinstance(rest, core.Rest)
        cache = cache.with_kept(saved.kept)
        if rest.until is not None:
            assert cache.kept == Kept(Status.PENDING, "not now", failures=tries, breakdowns=tries)
            pauses.append(rest.until - now)
            now = rest.until
    assert pauses == [4.0, 16.0, 64.0, 256.0]
    assert cache.kept.status is Status.ERROR and "in each of 5 tries" in cache.kept.error
    assert cache.extended(now + 9, now).kept.status is Status.PENDING, "its owner may have it tried anew"


def test_what_can_never_be_computed_is_an_error_until_its_owner_changes_it() -> None:
    look = Look(new_cache(), works=True)
    assert look.handle(core.Begun(()), NOW) == [core.Compute()]
    actions = look.handle(core.NotComputed("too long", core.Failure.NEVER), NOW)
    assert actions == [core.Save(Kept(Status.ERROR, "too long")), core.Rest(None)]
    broken = new_cache(kept=Kept(Status.ERROR, "too long"))
    assert Look(broken, works=False).handle(core.Begun(()), NOW) == [core.Rest(None)]
    assert broken.extended(NOW + 9, NOW).kept.status is Status.PENDING


def test_when_its_time_is_over_it_is_unpinned_and_can_be_revived() -> None:
    world = World.of(2)
    cache, _ = world.look(new_cache(replicas=2), NOW)
    end = cache.expires_at
    assert cache.status(end - 1) is Status.READY and cache.status(end) is Status.INACTIVE, "whether anybody has looked or not"
    cache, due = world.look(cache, end)
    assert not world.pins and cache.kept.status is Status.INACTIVE and due is None
    revived = cache.extended(end + 700, end + 600)
    assert revived.status(end + 600) is Status.PENDING
    cache, _ = world.look(revived, end + 600)
    assert len(cache.kept.held) == 2


def test_one_that_marks_made_is_not_computed_anew() -> None:
    world = World.of(1)
    world.held[NodeId("node-0")] = BLOCKS
    marked = new_cache(marked=True, kept=Kept(held={NodeId("node-0"): Incarnation(1)}))
    cache, _ = world.look(marked, NOW)
    assert cache.kept.status is Status.READY
    world.restart(NodeId("node-0"))
    cache, due = world.look(cache, NOW)
    assert (cache.kept.status, due, world.computed) == (Status.INACTIVE, None, 0)


def test_what_is_deleted_while_it_is_computed_is_pinned_nowhere() -> None:
    world = World.of(3)
    _, rest = world.one_look(new_cache(replicas=3), NOW, deleted=True, works=True)
    assert not world.pins and rest == core.Rest(None)


def test_what_is_postponed_waits_for_its_next_turn_and_tells_why() -> None:
    look = Look(new_cache(kept=Kept(failures=2)), works=True)
    assert look.handle(core.Begun(()), NOW) == [core.Compute()]
    saved, rest = look.handle(core.Postponed("nobody is idle"), NOW)
    assert saved == core.Save(Kept(Status.PENDING, "nobody is idle", failures=2)) and rest == core.Rest(NOW), "it has not failed"
    waiting = new_cache(kept=Kept(Status.PENDING, "nobody is idle", failures=2))
    assert Look(waiting, works=False).handle(core.Begun(()), NOW) == [core.Rest(None, works=True)]
    assert Look(waiting, works=True).handle(core.Begun(()), NOW) == [core.Compute()]


def test_what_is_gone_while_it_is_computed_is_left_as_it_is() -> None:
    look = Look(new_cache(), works=True)
    assert look.handle(core.Begun(()), NOW) == [core.Compute()]
    assert look.handle(core.Gone(), NOW) == [core.Rest(None)]
    assert look.handle(core.NotComputed("too late", core.Failure.NEVER), NOW) == []


def test_begun_minutes_count_whole_and_times_of_rest_do_not() -> None:
    cache = new_cache(tokens=1000, expires_at=NOW + 90)
    assert [cache.token_minutes(NOW + after) for after in (0, 1, 60, 61, 90, 5000)] == [0, 1000, 1000, 2000, 2000, 2000]
    revived = cache.extended(NOW + 700, NOW + 600)
    assert revived.token_minutes(NOW + 601) == 3000


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    count=st.integers(1, 6),
    replicas=st.integers(1, 4),
    strength=st.sampled_from(Strength),
    faults=st.lists(
        st.tuples(
            st.sampled_from(["restart", "die", "gone", "evict", "no_hard", "no_copies", "cannot compute", "use", "mend"]), st.integers(0, 5)
        ),
        max_size=20,
    ),
)
def test_whatever_fails_it_is_held_again_once_the_stores_are_well(
    count: int, replicas: int, strength: Strength, faults: list[tuple[str, int]]
) -> None:
    world = World.of(count)
    everybody = dict(world.stores)
    cache, now = new_cache(replicas=replicas, strength=strength), NOW

    def mend() -> None:
        world.stores = {node: world.stores.get(node, store) for node, store in everybody.items()}
        world.dead.clear()
        world.no_copies.clear()
        world.computing_fails = False

    for fault, index in faults:
        node = NodeId(f"node-{index % count}")
        match fault:
            case "restart" if node in world.stores:
                world.restart(node)
            case "die":
                world.dead.add(node)
            case "gone":
                world.stores.pop(node, None)
                world.held.pop(node, None)
                world.pins.pop(node, None)
            case "evict":
                world.held[node] = world.held.get(node, 0) // 2
            case "no_hard":
                world.no_hard.add(node)
            case "no_copies":
                world.no_copies.add(node)
            case "use":
                world.uses[node] = world.uses.get(node, 0) + 5
                if node in world.stores and node not in world.dead:
                    world.held[node] = BLOCKS
            case "cannot compute":
                world.computing_fails = True
            case "mend":
                mend()
        cache, due = world.look(cache, now)
        assert due is not None and now < due <= now + 30, "it is looked at again"
        if cache.kept.status is Status.READY:
            assert cache.kept.held and len(cache.kept.held) <= replicas
            assert all(world.held[node] == BLOCKS and node in world.pins for node in cache.kept.held), "what is said to be held is"
        else:
            assert cache.kept.status is Status.PENDING and not cache.kept.held
    mend()
    for _ in range(2):
        cache, _ = world.look(cache, now)
    assert cache.kept.status is Status.READY
    assert len(cache.kept.held) == min(replicas, count), "in as many stores as asked, where there are so many"
    assert cache.kept.held.items() <= {node: store.incarnation for node, store in world.stores.items()}.items()
