"""What is said to Ray. All of it may block for as long as Ray's head is away."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.ray.agent import NodeAgent
from deploy.ray.orders import AgentPlace, NodeOrder, NodeState
from deploy.ray.placement import PlaceState, PlaceView, view_of_all
from deploy.ray.settings import LOCAL
from springtide.errors import ConfigError

logger = logging.getLogger(__name__)

ANSWER_S = 2.0
"""How long one look waits for the agents."""
_NODE_ID_LABEL = "ray.io/node-id"
_STORE_BYTES = 100 << 20
"""Of a Ray of this machine alone, whose object store nobody uses."""


@dataclass(frozen=True, slots=True)
class RayNode:
    node_id: str
    host: str
    total: Mapping[str, float]


def connect(address: str, cluster: str) -> None:
    """Raises ConfigError where there is no such Ray cluster, or this machine is not in it."""
    options: dict[str, Any] = {"namespace": f"springtide-{cluster}", "log_to_driver": False, "logging_level": logging.WARNING}
    if address == LOCAL:
        options |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
    try:
        ray.init(address, **options)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(f"ray.address: there is no Ray cluster at {address!r} that this machine is in: {error}") from None


def disconnect() -> None:
    """Agents end with this, and a Ray of this machine alone."""
    ray.shutdown()


def nodes() -> list[RayNode]:
    """Those that are alive."""
    return [RayNode(each["NodeID"], each["NodeManagerAddress"], each["Resources"]) for each in ray.nodes() if each["Alive"]]


class Agent:
    """What is known of one agent, and asked of it."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self._asked_where = actor.place.remote()
        self._asked_to_begin: Any = None
        self._began = False
        self._asked_state: Any = None
        self.where: AgentPlace | None = None
        """Once Ray has given the place."""
        self.said = ""
        """The end of what the process has said, where it has ended."""
        self.cards: tuple[str, ...] | None = None
        """Those of the process; None: there is none yet, or it is not known."""

    @property
    def begun(self) -> bool:
        """Whether it was told what to do."""
        return self._asked_to_begin is not None

    def start(self, order: NodeOrder, cards: tuple[str, ...]) -> None:
        self.cards = cards
        self._asked_to_begin = self.actor.start.remote(order, cards)

    def adopt(self, tag: str) -> None:
        self._asked_to_begin = self.actor.adopt.remote(tag)

    def ask(self) -> Any:
        """What an answer is waited for to now; None: to nothing."""
        if self.where is None:
            return self._asked_where
        if not self._began:
            return self._asked_to_begin
        if self._asked_state is None:
            self._asked_state = self.actor.state.remote()
        return self._asked_state

    def look(self) -> PlaceView:
        """What is known of it now. Waits for nothing."""
        asked = self.ask()
        state = PlaceState.WAITING
        try:
            if asked is not None and ray.wait([asked], timeout=0)[0]:
                state = self._take(ray.get(asked))
        except ActorUnavailableError:
            # Of one that has begun there will be news: it is back, or has died.
            self._asked_state = None
            state = PlaceState.WAITING if self._began else PlaceState.GONE
        except RayActorError:
            state = PlaceState.GONE
        except RayError as error:
            self.said = str(error)
            state = PlaceState.ENDED
        return PlaceView(state, (self.where.host,) if self.where is not None else ())

    def _take(self, answer: Any) -> PlaceState:
        if self.where is None:
            self.where = answer
        elif not self._began:
            self._began, self.cards = True, answer
        else:
            self._asked_state = None
            state: NodeState = answer
            self.said = state.said or self.said
            return PlaceState.RUNNING if state.runs else PlaceState.ENDED
        return PlaceState.WAITING


class Held:
    """A place that Ray was asked for: a placement group, and in each of its bundles an agent. A node has one, a prefill group whose stages
    are apart one for each stage, on as many Ray nodes."""

    def __init__(self, name: str, bundle: Mapping[str, float], among: Sequence[Sequence[str]]) -> None:
        """`among`: for each bundle the ids of Ray nodes; none: anywhere."""
        selectors = [{_NODE_ID_LABEL: f"in({','.join(ids)})"} if ids else {} for ids in among]
        self._group = placement_group(
            [dict(bundle) for _ in among],
            strategy="STRICT_PACK" if len(among) == 1 else "STRICT_SPREAD",
            name=name,
            bundle_label_selector=selectors if any(selectors) else None,
        )
        self._room = self._group.ready()
        rest = {each: amount for each, amount in bundle.items() if each not in ("CPU", "GPU", "memory")}
        self.agents = [
            Agent(
                ray.remote(NodeAgent)
                .options(
                    num_cpus=bundle.get("CPU", 0),
                    num_gpus=bundle.get("GPU", 0),
                    memory=bundle.get("memory", 0),
                    resources=rest,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
                )
                .remote()
            )
            for index in range(len(among))
        ]

    @property
    def has_room(self) -> bool:
        """Whether Ray has found all of the place. It is given when the agents are there, whose processes take a while to start."""
        return bool(ray.wait([self._room], timeout=0)[0])

    @property
    def given(self) -> bool:
        """Whether Ray has given all of the place."""
        return all(agent.where is not None for agent in self.agents)

    @property
    def begun(self) -> bool:
        """Whether agents were told what to do."""
        return any(agent.begun for agent in self.agents)

    @property
    def said(self) -> str:
        """The ends of what processes have said that have ended."""
        return "\n".join(agent.said for agent in self.agents if agent.said)

    def look(self) -> PlaceView:
        """What is known of it now. Waits for nothing."""
        view = view_of_all([agent.look() for agent in self.agents])
        coming = view.state is PlaceState.WAITING and self.has_room
        return replace(view, state=PlaceState.COMING) if coming else view

    def release(self) -> None:
        for agent in self.agents:
            ray.kill(agent.actor)
        remove_placement_group(self._group)


def look_at(held: Mapping[str, Held]) -> dict[str, PlaceView]:
    """Of each, after a while in which they could answer."""
    asked = [question for each in held.values() for agent in each.agents if (question := agent.ask()) is not None]
    if asked:
        ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)
    return {name: each.look() for name, each in held.items()}
