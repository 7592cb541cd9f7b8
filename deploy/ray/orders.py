"""What the placer, the agent and the process of a node tell each other. Plain and small: agents load nothing of the cluster."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from springtide.choices import NodeRole


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """What a node is started with."""

    role: NodeRole
    name: str
    """Of the node; of a stage, that of its group."""
    placement: str
    cluster: str
    join: str
    """host:port of the join service."""
    token: str = field(repr=False)
    orphan_s: float
    settings: dict[str, Any]
    """By dotted names: those of this node that the cluster does not tell it."""
    stage: int = 0
    stages: int = 1
    """Of a prefill group whose stages are on nodes of their own; 1: the node is whole."""

    @property
    def tag(self) -> str:
        return tag_of(self.name, self.placement, self.stage)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def tag_of(name: str, placement: str, stage: int) -> str:
    """Of a process that was placed: no other has had it, of this or another cluster of this name on the same machine."""
    return f"{name} {stage} {placement}"


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """Where an agent is."""

    ray_node: str
    host: str
    cards: tuple[str, ...] = ()
    """Those that Ray has given it, as in CUDA_VISIBLE_DEVICES."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """What an agent sees of its node's process."""

    runs: bool
    said: str = ""
    """The end of what it has said, where it does not run any more."""
