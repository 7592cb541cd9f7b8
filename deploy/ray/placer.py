"""`python -m deploy.ray.placer`: the process beside the head's others that speaks with Ray, so that nobody else needs to.

Ray ends a process that was connected to it when its head is away for long; then the supervisor starts another, which knows by the record in
Valkey what there is, and finds it again as soon as there is a Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from deploy.ca.authority import first_fingerprint
from deploy.commands.conductors import leaders_status, views
from deploy.join.tokens import TokenBook
from deploy.ray import cluster as on_ray
from deploy.ray.cluster import Agent, Held, RayNode
from deploy.ray.orders import NodeOrder, tag_of
from deploy.ray.placement import Action, Adopt, Create, Leave, Phase, PlacedNode, Placement, PlaceState, PlaceView, Release, Sight
from deploy.ray.record import PlacementBook, PlacementRecord
from deploy.ray.resources import Pool, bundle, cards_of, fits, least_nodes, num_stages, own_settings, pool_config, preferences
from deploy.ray.scaling import PoolFigures, PoolLimits, PoolSize, figures_of
from springtide.config import ENV_PREFIX, ClusterConfig, in_url
from springtide.credentials import credentials_of
from springtide.errors import ConfigError, Unavailable
from springtide.membership import Member, Membership
from springtide.process import ProcessArguments, parse_arguments, run
from springtide.protocol.status import ClusterStatus
from springtide.supervision import end, first_of, supervised
from springtide.valkey import ValkeyClient

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
CONNECT_AGAIN_S = 5.0
TELL_EVERY_S = 1.0
TOKEN_S = 600.0
"""A node has it from the agent, and joins within seconds."""
NARROW_S = 3.0
"""How long Ray has to find a place where it would be best, before it may be elsewhere."""
PATIENT_S = 20.0
"""And before it is said that there is none."""
_RUNS = (PlaceState.RUNNING, PlaceState.BROKEN)


@dataclass(slots=True)
class _Ask:
    """A place that was asked for, or several, one after the other."""

    node: PlacedNode
    adopts: bool
    choices: list[Sequence[tuple[str, ...]]]
    """Of Ray nodes, for each bundle of the place; the present one first."""
    held: Held
    since: float
    token_id: str = ""
    warned: bool = False

    @property
    def ray_nodes(self) -> list[str]:
        """Where it is; before that is known, where it was asked to be, as far as that is one place."""
        asked = [among[0] if len(among) == 1 else "" for among in self.choices[0]]
        return [before if agent.where is None else agent.where.ray_node for before, agent in zip(asked, self.held.agents, strict=True)]


class Placer:
    def __init__(self, config: ClusterConfig, valkey: ValkeyClient, membership: Membership) -> None:
        self._config = config
        self._credentials = credentials_of(config)
        self._membership = membership
        self._book = PlacementBook(valkey, config.cluster, self._credentials)
        self._tokens = TokenBook(valkey, config.cluster, self._credentials)
        self._placement = Placement({}, time.monotonic())
        self._sizes: dict[Pool, PoolSize] = {}
        """Of the pools that have nodes."""
        self._asks: dict[str, _Ask] = {}
        self._beat = 0
        self._telling = asyncio.Lock()
        self._has_cards = False

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`, and all nodes have left. Raises ConfigError where there is no such Ray cluster at the first start."""
        config = self._config
        address = config.ray.address
        assert address is not None, "there is no placer without a Ray cluster"
        record = await self._recorded()
        known: Mapping[str, PlacedNode] = {} if record is None else record.nodes
        anew = all(node.phase is Phase.LEAVING for node in known.values())
        if anew:
            await self._connect(address, stop)
        self._placement = Placement(known, time.monotonic())
        for pool in Pool:
            if least := least_nodes(config, pool):
                limits = PoolLimits(least, pool_config(config, pool).most or least)
                self._sizes[pool] = PoolSize(limits, config.ray, self._placement.count(pool))
        telling = supervised(self._keep_telling, "tell nodes that they are wanted")
        try:
            await first_of(self._place(address, stop, connected=anew), stop.wait())
            await self._end()
        finally:
            await end(telling)

    async def _recorded(self) -> PlacementRecord | None:
        while True:
            try:
                return await self._book.read()
            except Unavailable as error:
                logger.info("%s", error)
                await asyncio.sleep(LOOK_EVERY_S)

    async def _connect(self, address: str, stop: asyncio.Event) -> None:
        """Raises ConfigError where there is no such Ray cluster."""
        await asyncio.to_thread(on_ray.connect, address, self._config.cluster)
        for number in (signal.SIGTERM, signal.SIGINT):  # Ray has put handlers of its own in the place of ours
            asyncio.get_running_loop().add_signal_handler(number, stop.set)

    async def _place(self, address: str, stop: asyncio.Event, connected: bool) -> None:
        while not connected:
            try:
                await self._connect(address, stop)
                connected = True
            except ConfigError as error:
                logger.warning("%s; the nodes go on without", error.message)
                await asyncio.sleep(CONNECT_AGAIN_S)
        logger.info("connected with the Ray cluster at %s", address)
        while True:
            await self._look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self) -> None:
        ray_nodes = await asyncio.to_thread(on_ray.nodes)
        self._has_cards = any(each.total.get("GPU") for each in ray_nodes)
        status, sight = await self._sight(ray_nodes)
        now = time.monotonic()
        wanted = {pool: self._wanted(pool, status, now) if pool in self._sizes else 0 for pool in Pool}
        phases = {name: node.phase for name, node in self._placement.nodes.items()}
        for action in self._placement.look(sight, wanted, now):
            await self._do(action, ray_nodes, now)
        for name, node in self._placement.nodes.items():
            if node.phase is not phases.get(name):
                logger.info("%s is %s%s", name, node.phase.value, f" at {', '.join(node.hosts)}" if node.hosts else "")
        await self._begin(ray_nodes, now)

    async def _sight(self, ray_nodes: list[RayNode]) -> tuple[ClusterStatus | None, Sight]:
        places = await asyncio.to_thread(on_ray.look_at, {name: ask.held for name, ask in self._asks.items()})
        members = await self._membership.members()
        status = await self._status(members or [])
        ready = None if status is None else [each for each in status.instances if each.ready]
        busy = Counter[str]()
        for each in ready or ():
            busy[each.instance.node_id] += each.running + each.waiting
        return status, Sight(
            places=places,
            hosts=frozenset(each.host for each in ray_nodes),
            present=None if members is None else frozenset(member.member_id for member in members if member.role == "store"),
            ready=None if ready is None else {each.instance.instance_id: each.instance.role for each in ready},
            busy=busy,
        )

    async def _status(self, members: list[Member]) -> ClusterStatus | None:
        """The leader's: a standby decides nothing, and one that has just begun may not have heard of everybody."""
        return leaders_status(await views(members, self._credentials))

    def _wanted(self, pool: Pool, status: ClusterStatus | None, now: float) -> int:
        size, figures = self._sizes[pool], None if status is None else figures_of(pool, status, self._config.ray.scale_load)
        before = size.wanted
        size.see(figures, now)
        if size.wanted != before:
            logger.info("%d %s nodes are wanted, not %d: %s", size.wanted, pool, before, _why(figures))
        return size.wanted

    async def _do(self, action: Action, ray_nodes: list[RayNode], now: float) -> None:
        match action:
            case Create(node):
                stages = num_stages(self._config, node.pool)
                await self._ask(node, [[()] * stages] if stages > 1 else self._best(node.pool, ray_nodes), now)
            case Adopt(node):
                logger.info("%s has lost its place; it is looked for at %s", node.name, ", ".join(node.hosts))
                at = [tuple(each.node_id for each in ray_nodes if each.host == host) for host in node.hosts]
                await self._ask(node, [at], now, adopts=True)
            case Release(name):
                await self._release(name)
            case Leave(name):
                logger.info("%s is to leave", name)
                await self._tell()
                if name in self._asks and not self._asks[name].held.begun:
                    await self._release(name)

    def _best(self, pool: Pool, ray_nodes: list[RayNode]) -> list[Sequence[tuple[str, ...]]]:
        """Where a further node would best be."""
        wanted = bundle(self._config, pool, self._has_cards)
        able = [each.node_id for each in ray_nodes if fits(wanted, each.total)]
        occupied = [each for ask in self._asks.values() if ask.node.pool is pool for each in ask.ray_nodes]
        return [[among] for among in preferences(pool_config(self._config, pool).arrange, able, occupied)]

    async def _ask(self, node: PlacedNode, choices: list[Sequence[tuple[str, ...]]], now: float, adopts: bool = False) -> None:
        held = await asyncio.to_thread(Held, node.name, bundle(self._config, node.pool, self._has_cards), choices[0])
        self._asks[node.name] = _Ask(node, adopts, choices, held, now)

    async def _begin(self, ray_nodes: list[RayNode], now: float) -> None:
        """What has its place is begun there; what has none where it would be best may be elsewhere."""
        alive = {each.node_id for each in ray_nodes}
        for name, ask in list(self._asks.items()):
            there = all(alive.intersection(among) for among in ask.choices[0])
            has_room = ask.held.given or ask.held.has_room
            if not ask.held.given and len(ask.choices) > 1 and (not there or (not has_room and now - ask.since >= NARROW_S)):
                await asyncio.to_thread(ask.held.release)
                ask.choices, ask.since = ask.choices[1:], now
                ask.held = await asyncio.to_thread(Held, name, bundle(self._config, ask.node.pool, self._has_cards), ask.choices[0])
            elif not has_room and not ask.warned and now - ask.since >= PATIENT_S:
                ask.warned = True
                wanted = bundle(self._config, ask.node.pool, self._has_cards)
                where = "one Ray node" if len(ask.held.agents) == 1 else f"each of {len(ask.held.agents)} Ray nodes"
                logger.warning("Ray has had no room for %s for %d s: on %s there must be free %s", name, PATIENT_S, where, wanted)
            elif ask.held.given and not ask.held.begun:
                await self._tell()
                if ask.adopts:
                    for stage, agent in enumerate(ask.held.agents):
                        await asyncio.to_thread(agent.adopt, tag_of(name, ask.node.placement, stage))
                elif self._knows_cards(ask.held, now):
                    with contextlib.suppress(Unavailable):  # Valkey is away: at the next look
                        for agent, order in zip(ask.held.agents, await self._orders(ask), strict=True):
                            await asyncio.to_thread(agent.start, order, self._cards_of(agent))
            elif ask.token_id and self._placement.nodes[name].phase is Phase.SERVING:
                await self._revoke(ask)

    def _knows_cards(self, held: Held, now: float) -> bool:
        """Whether an agent is with every process where it is to be, if it takes cards."""
        hosts = {agent.where.host for agent in held.agents if agent.where is not None and agent.where.cards}
        return not any(hosts.intersection(node.hosts) for node in self._placement.alone(self._asks, now))

    def _cards_of(self, agent: Agent) -> tuple[str, ...]:
        """Those that its process is to have."""
        place = agent.where
        assert place is not None, "a node is started where its place is given"
        there = [
            (other.where, other.cards or ())
            for ask in self._asks.values()
            for other in ask.held.agents
            if other.where is not None and other.where.ray_node == place.ray_node
        ]
        booked, used = (card for where, _ in there for card in where.cards), (card for _, cards in there for card in cards)
        return cards_of(place.cards, booked, used)

    async def _orders(self, ask: _Ask) -> list[NodeOrder]:
        """Of all that are to be started there, with a token of their own. Raises Unavailable."""
        config, node = self._config, ask.node
        assert config.tls.ca is not None, "a cluster that can be joined has authorities"
        token = await self._tokens.create(first_fingerprint(config.tls.ca.read_bytes()), TOKEN_S, time.time())
        ask.token_id = token.token_id
        whole = NodeOrder(
            role=node.pool.value,
            name=node.name,
            placement=node.placement,
            cluster=config.cluster,
            join=f"{in_url(config.address)}:{config.join_port}",
            token=str(token),
            orphan_s=config.ray.orphan_s,
            settings=own_settings(config, node.pool),
        )
        stages = len(ask.held.agents)
        return [replace(whole, stage=stage, stages=stages) for stage in range(stages)]

    async def _release(self, name: str) -> None:
        ask = self._asks.pop(name)
        if ask.held.said:
            logger.warning("%s has ended. The end of what it said:\n%s", name, ask.held.said)
        await self._revoke(ask)
        await asyncio.to_thread(ask.held.release)

    async def _revoke(self, ask: _Ask) -> None:
        with contextlib.suppress(Unavailable):
            if ask.token_id:
                await self._tokens.revoke(ask.token_id)
            ask.token_id = ""

    async def _keep_telling(self) -> None:
        while True:
            await self._tell()
            await asyncio.sleep(TELL_EVERY_S)

    async def _tell(self) -> None:
        async with self._telling:
            self._beat += 1
            try:
                await self._book.write(PlacementRecord(os.getpid(), self._beat, self._placement.nodes))
            except Unavailable as error:
                logger.debug("%s", error)

    async def _end(self) -> None:
        """Returns when every node has left; the supervisor does not wait for ever."""
        self._placement.leave(time.monotonic())
        await self._tell()
        there = {name for name, ask in self._asks.items() if ask.held.begun} | (self._placement.nodes.keys() - self._asks.keys())
        while there:
            await asyncio.sleep(0.2)
            members = await self._membership.members() or []
            present = {member.member_id for member in members if member.role == "store"}
            views_of = await self._views(there)
            there = {name for name in there if (name in present if name not in views_of else views_of[name].state in _RUNS)}
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(on_ray.disconnect), on_ray.ANSWER_S)

    async def _views(self, names: set[str]) -> dict[str, PlaceView]:
        """Of those of which Ray says something."""
        held = {name: self._asks[name].held for name in names if name in self._asks}
        try:
            found = await asyncio.wait_for(asyncio.to_thread(on_ray.look_at, held), 2 * on_ray.ANSWER_S)
        except TimeoutError:
            return {}
        return {name: view for name, view in found.items() if view.state not in (PlaceState.WAITING, PlaceState.COMING)}


def _why(figures: PoolFigures | None) -> str:
    if figures is None:
        return ""
    return f"the work of late keeps {figures.work:.2f} of them busy, and their load is {figures.load:.0%} of what the objectives allow"


async def serve(arguments: ProcessArguments, stop: asyncio.Event) -> None:
    config = arguments.config
    assert config.redis_url is not None, "the configuration must be placed"
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        del os.environ[name]  # a Ray of this machine alone would hand it on to the nodes, as theirs
    os.chdir(arguments.run_dir)  # Ray has agents look here for modules before all else: in a directory of the user's might be any
    membership = Membership.of(config, credentials_of(config))
    async with ValkeyClient.from_url(config.redis_url, socket_timeout=2.0, socket_connect_timeout=2.0) as valkey:
        try:
            await Placer(config, valkey, membership).run(stop)
        finally:
            await membership.close()


if __name__ == "__main__":
    arguments = parse_arguments("The placer of a Springtide cluster: has Ray place its nodes.")
    run("placer", arguments, partial(serve, arguments))
