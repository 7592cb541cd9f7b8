"""What becomes of the nodes that Ray places. Pure: what was seen comes in, what is to be done goes out.

A node has a place at Ray (a placement group and in it an agent) and, apart from that, a process. When the place is lost, with its Ray node
or with all of Ray, the process may well live on and serve: it is found again where there still is a Ray node on its host, and otherwise
serves until another has taken its place.

A prefill group whose stages are on Ray nodes of their own is one node here, with a place of several bundles: it comes and goes as a whole.
When a part of its place is lost it serves on if it can, and otherwise leaves, so that another comes where it was.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from deploy.ray.resources import Pool
from springtide.protocol.instances import Role

ADOPT_S = 10.0
"""How long Ray has to find a place on the host where the process is."""
COME_S = 60.0
"""And to give it, whose agent is a process that a busy machine takes its time to start."""
RETURN_S = 120.0
"""How long a node that serves without a place is left alone: its Ray node, or all of Ray, may come back, and it is found again."""
ABSENT_S = 10.0
"""Whose lease has not held for so long is gone: twice what it takes a lease to run out."""
ROOM_S = 120.0
"""How long those of a pool that is wanted no more wait for Ray to find room for who takes their place, before one of them makes room."""
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""From a node that ended before it served to the next attempt of its pool, and after many of them."""


class Phase(Enum):
    PLACING = "placing"
    """It is waiting for its place, or for its process to be ready."""
    SERVING = "serving"
    LOST = "lost"
    """Its place is gone; its process may be there."""
    ADOPTING = "adopting"
    """It is waiting for a place where its process is."""
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node as the placer knows it, and tells it to itself (deploy/ray/record.py)."""

    name: str
    placement: str
    """Differs from that of every other node that has had this name."""
    pool: Pool
    phase: Phase
    hosts: tuple[str, ...] = ()
    """Of the Ray nodes that it was placed on, stage by stage; empty before."""


class PlaceState(Enum):
    """What is seen of a place."""

    WAITING = "waiting"
    """Ray has not found it yet, or its agent does not say what it wants to know just now."""
    COMING = "coming"
    """Ray has found it, and an agent is on the way, or is there and has yet to say what it has found."""
    RUNNING = "running"
    """The agent's process runs."""
    ENDED = "ended"
    """It has ended, or there is none to be adopted."""
    GONE = "gone"
    """The agent has died, by itself or with its Ray node."""
    BROKEN = "broken"
    """Of several agents or their processes some are gone or have ended, and others not."""


@dataclass(frozen=True, slots=True)
class PlaceView:
    state: PlaceState
    hosts: tuple[str, ...] = ()


def view_of_all(views: Sequence[PlaceView]) -> PlaceView:
    """Of a place with several agents."""
    states = {view.state for view in views}
    over = states & {PlaceState.GONE, PlaceState.ENDED}
    if over == states:
        state = PlaceState.GONE if PlaceState.GONE in states else PlaceState.ENDED
    elif over:
        state = PlaceState.BROKEN
    else:
        state = PlaceState.RUNNING if states == {PlaceState.RUNNING} else PlaceState.WAITING
    hosts = [view.hosts for view in views]
    return PlaceView(state, sum(hosts, ()) if all(hosts) else ())


@dataclass(frozen=True, slots=True)
class Sight:
    """What was seen of the cluster in one look."""

    places: Mapping[str, PlaceView]
    """Those that Ray was asked for and that were not given back, by the names of nodes."""
    hosts: frozenset[str]
    """Of the Ray nodes that are alive."""
    present: frozenset[str] | None
    """The nodes whose stores are in the membership; None: that cannot be asked."""
    ready: Mapping[str, Role] | None
    """The nodes that take requests, by the role that they have now; None: no Conductor that leads can be asked."""
    busy: Mapping[str, float]
    """What runs and waits there."""


@dataclass(frozen=True, slots=True)
class Create:
    """Ask Ray for a place, and start the node there."""

    node: PlacedNode


@dataclass(frozen=True, slots=True)
class Adopt:
    """Ask Ray for a place on the node's host, and find the node's process there."""

    node: PlacedNode


@dataclass(frozen=True, slots=True)
class Release:
    """Give the place back to Ray. The process is told nothing."""

    name: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Let the process know that it is to end what it has, and then itself."""

    name: str


Action: TypeAlias = Create | Adopt | Release | Leave


@dataclass(slots=True)
class _Memory:
    """What is remembered of a node besides."""

    since: float
    """When its phase began."""
    absent_since: float | None = None
    lost_until: float = 0.0
    """Until then it is looked for, and no other is placed while it serves."""


class Placement:
    """The nodes of all pools. To be told of every look, about once a second."""

    def __init__(self, known: Mapping[str, PlacedNode], now: float, new_id: Callable[[], str] = lambda: secrets.token_hex(4)) -> None:
        """`known`: what an earlier placer, which is gone with its places, has left."""
        self._new_id = new_id
        self._nodes: dict[str, PlacedNode] = {}
        self._memory: dict[str, _Memory] = {}
        self._failures = dict.fromkeys(Pool, 0)
        self._retry_at = dict.fromkeys(Pool, now)
        self._made_room_at = now
        for node in known.values():
            self._enter(node, Phase.LEAVING if node.phase is Phase.LEAVING else Phase.LOST, now)

    @property
    def nodes(self) -> Mapping[str, PlacedNode]:
        return self._nodes

    def count(self, pool: Pool) -> int:
        """Nodes that were placed for this pool and have not been told to leave."""
        return sum(node.pool is pool and node.phase is not Phase.LEAVING for node in self._nodes.values())

    def alone(self, held: Container[str], now: float) -> list[PlacedNode]:
        """Those whose processes may run with no agent beside them, for as long as one may come or they are to end. `held`: the names of
        those that have a place at Ray."""
        return [
            node
            for name, node in self._nodes.items()
            if node.phase is Phase.ADOPTING
            or (node.phase is Phase.LOST and now < self._memory[name].lost_until)
            or (node.phase is Phase.LEAVING and name not in held)
        ]

    def look(self, sight: Sight, wanted: Mapping[Pool, int], now: float) -> list[Action]:
        """What is to be done after a look, so that there are so many nodes of each pool."""
        actions: list[Action] = []
        for name in sorted(self._nodes):
            actions += self._follow(self._nodes[name], sight, now)
        for pool in Pool:
            if wanted[pool]:
                actions += self._fit(pool, sight, wanted[pool], now)
        actions += self._retire(sight, wanted, now)
        return actions

    def leave(self, now: float) -> list[Action]:
        """All are to leave, and nobody comes."""
        names = [name for name, node in self._nodes.items() if node.phase is not Phase.LEAVING]
        return [self._sent_away(name, now) for name in names]

    def _follow(self, node: PlacedNode, sight: Sight, now: float) -> Iterator[Action]:
        view, memory = sight.places.get(node.name), self._memory[node.name]
        state = None if view is None else view.state
        if view is not None and view.hosts:
            node = self._nodes[node.name] = replace(node, hosts=view.hosts)
        match node.phase:
            case Phase.PLACING:
                if state in (PlaceState.GONE, PlaceState.ENDED):
                    yield from self._forget(node, sight)
                    self._failed(node.pool, now)
                elif state is PlaceState.BROKEN:
                    yield self._sent_away(node.name, now)
                    self._failed(node.pool, now)
                elif state is PlaceState.RUNNING and sight.ready is not None and node.name in sight.ready:
                    self._enter(node, Phase.SERVING, now)
                    self._failures[node.pool] = 0
            case Phase.ADOPTING:
                if state is PlaceState.RUNNING:
                    self._enter(node, Phase.SERVING, now)
                elif state is PlaceState.ENDED:
                    yield from self._forget(node, sight)
                elif state is PlaceState.BROKEN:
                    yield self._sent_away(node.name, now)
                elif (
                    state is PlaceState.GONE
                    or not sight.hosts.issuperset(node.hosts)
                    or now - memory.since >= (COME_S if state is PlaceState.COMING else ADOPT_S)
                ):
                    yield Release(node.name)
                    self._enter(node, Phase.LOST, now)
            case Phase.SERVING:
                if state is PlaceState.ENDED:
                    yield from self._forget(node, sight)
                elif state is PlaceState.BROKEN and sight.ready is not None and node.name not in sight.ready:
                    yield self._sent_away(node.name, now)
                elif state is PlaceState.GONE:
                    yield Release(node.name)
                    self._enter(node, Phase.LOST, now)
                    yield from self._adopted(self._nodes[node.name], sight, now)
            case Phase.LOST:
                if self._absent(node.name, sight, now):
                    yield from self._forget(node, sight)
                else:
                    yield from self._adopted(node, sight, now)
            case Phase.LEAVING:
                if state in (PlaceState.ENDED, PlaceState.GONE) or (state is None and self._absent(node.name, sight, now)):
                    yield from self._forget(node, sight)

    def _adopted(self, node: PlacedNode, sight: Sight, now: float) -> Iterator[Action]:
        if now < self._memory[node.name].lost_until and node.hosts and sight.hosts.issuperset(node.hosts):
            self._enter(node, Phase.ADOPTING, now)
            yield Adopt(self._nodes[node.name])

    def _fit(self, pool: Pool, sight: Sight, wanted: int, now: float) -> Iterator[Action]:
        ready = sight.ready or {}
        own = [node for node in self._nodes.values() if _serves_in(node, ready) is pool]
        active = [node for node in own if node.phase in (Phase.PLACING, Phase.SERVING, Phase.ADOPTING)]
        may_serve = [node for node in own if node.phase is Phase.LOST and now < self._memory[node.name].lost_until]
        active += [node for node in may_serve if sight.ready is None or node.name in ready]
        if len(active) < wanted and now >= self._retry_at[pool]:
            for _ in range(wanted - len(active)):
                yield Create(self._new(pool, sight, now))
        if sight.ready is None:
            return  # and nobody is sent away who may be the one that serves
        surplus = sorted(
            active, key=lambda node: (node.name in ready, node.phase is not Phase.PLACING, sight.busy.get(node.name, 0.0), node.name)
        )
        for node in surplus[: max(0, len(active) - wanted)]:
            yield self._sent_away(node.name, now)
        if sum(node.phase is Phase.SERVING and node.name in ready for node in active) >= wanted:
            for node in own:
                if node.phase is Phase.LOST and node not in active:
                    yield self._sent_away(node.name, now)

    def _retire(self, sight: Sight, wanted: Mapping[Pool, int], now: float) -> Iterator[Action]:
        """Nodes of pools that are wanted no more leave when all others serve; where Ray has no room for these beside them, one by one."""
        ready = sight.ready
        if ready is None:
            return
        own = [node for node in self._nodes.values() if not wanted[_serves_in(node, ready)] and node.phase is not Phase.LEAVING]
        leaving = [node for node in own if node.phase is Phase.PLACING]
        serving = Counter(_serves_in(node, ready) for name, node in self._nodes.items() if node.phase is Phase.SERVING and name in ready)
        if all(serving[pool] >= count for pool, count in wanted.items()):
            leaving = own
        elif not leaving and own and self._lacks_room(sight, now):
            self._made_room_at = now
            leaving = [min(own, key=lambda node: (node.name in ready, sight.busy.get(node.name, 0.0), node.name))]
        for node in sorted(leaving, key=lambda node: node.name):
            yield self._sent_away(node.name, now)

    def _lacks_room(self, sight: Sight, now: float) -> bool:
        """Whether Ray has looked for it in vain for long, and as long since somebody last made some."""
        placing = [node for node in self._nodes.values() if node.phase is Phase.PLACING and node.name in sight.places and not node.hosts]
        return any(now - max(self._made_room_at, self._memory[node.name].since) >= ROOM_S for node in placing)

    def _new(self, pool: Pool, sight: Sight, now: float) -> PlacedNode:
        """With the first name that nobody has: what a store keeps on an SSD is found again by it."""
        taken = self._nodes.keys() | (sight.present or frozenset())
        index = next(index for index in range(len(taken) + 1) if f"{pool}-{index}" not in taken)
        node = PlacedNode(f"{pool}-{index}", self._new_id(), pool, Phase.PLACING)
        self._enter(node, Phase.PLACING, now)
        return node

    def _sent_away(self, name: str, now: float) -> Leave:
        self._enter(self._nodes[name], Phase.LEAVING, now)
        return Leave(name)

    def _forget(self, node: PlacedNode, sight: Sight) -> Iterator[Action]:
        del self._nodes[node.name], self._memory[node.name]
        if node.name in sight.places:
            yield Release(node.name)

    def _failed(self, pool: Pool, now: float) -> None:
        self._retry_at[pool] = now + min(FIRST_RETRY_S * 2 ** self._failures[pool], LONGEST_RETRY_S)
        self._failures[pool] = min(self._failures[pool] + 1, 16)

    def _enter(self, node: PlacedNode, phase: Phase, now: float) -> None:
        before = self._memory.get(node.name)
        goes_on = before is not None and self._nodes[node.name].phase in (Phase.LOST, Phase.ADOPTING)
        self._nodes[node.name] = replace(node, phase=phase)
        self._memory[node.name] = _Memory(now, lost_until=before.lost_until if before is not None and goes_on else now + RETURN_S)

    def _absent(self, name: str, sight: Sight, now: float) -> bool:
        """Whether its lease has not held for so long that it is gone."""
        memory = self._memory[name]
        if sight.present is None or name in sight.present:
            memory.absent_since = None
            return False
        if memory.absent_since is None:
            memory.absent_since = now
        return now - memory.absent_since >= ABSENT_S


def _serves_in(node: PlacedNode, ready: Mapping[str, Role]) -> Pool:
    """The pool where it counts. A node of one role may have switched it; one that has both keeps both."""
    return node.pool if node.pool is Pool.INSTANCE or node.name not in ready else Pool(ready[node.name])
