"""Workloads made up from a few numbers and a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

import numpy as np

from simulator.workload.documents import Documents
from simulator.workload.draft import Draft, Labels
from simulator.workload.independent import Bursts, Poisson
from simulator.workload.request import Workload
from simulator.workload.sessions import Agents, Chat
from springtide.errors import ConfigError
from springtide.protocol.scheduling import MAX_DEADLINE_MS

_Key = TypeVar("_Key")


class Generator(Protocol):
    def draw(self, rng: np.random.Generator, draft: Draft, rate_per_s: float, duration_s: float) -> None:
        """Adds requests from 0 to `duration_s`, `rate_per_s` of them a second on average, in any order."""


GENERATORS: Mapping[str, Callable[..., Generator]] = {
    "poisson": Poisson,
    "bursts": Bursts,
    "chat": Chat,
    "documents": Documents,
    "agents": Agents,
}


@dataclass(frozen=True, slots=True)
class _Mix:
    """What can be mixed into any workload."""

    tenants: Mapping[str, float]
    """Share of the rate of each."""
    priorities: Mapping[int, float]
    """Share of the requests of each."""
    deadline_ms: float


def generator_options(name: str) -> dict[str, float]:
    """The options of a generator and their defaults. Raises ConfigError where there is no such generator."""
    return {option.name: getattr(_generator(name), option.name) for option in fields(_generator(name))}


def generate(
    name: str,
    rate_per_s: float,
    duration_s: float,
    seed: int,
    block_tokens: int = 512,
    *,
    tenants: Mapping[str, float] | None = None,
    priorities: Mapping[int, float] | None = None,
    deadline_ms: float = 0.0,
    **overrides: float,
) -> Workload:
    """A workload of one of the kinds in GENERATORS, with `rate_per_s` requests a second on average over
    `duration_s`; the same arguments make the same requests. `overrides` are that kind's options, described where it is defined.

    `tenants` maps names to shares of the rate. Each tenant has sessions and documents of its own, since KV is not shared between
    tenants. `priorities` maps priorities to shares of the requests, drawn for each request. Shares need not add up to 1.
    Raises ConfigError, naming the argument and its value, for one that cannot be."""
    kind = _generator(name)
    for argument, value in (("rate_per_s", rate_per_s), ("duration_s", duration_s), ("block_tokens", block_tokens)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{argument} of a workload should be above 0, not {value}", param=argument)
    if not 0.0 <= deadline_ms <= MAX_DEADLINE_MS:
        raise ConfigError(
            f"deadline_ms of a workload should be 0 or more, and at most {MAX_DEADLINE_MS:.0f}, not {deadline_ms}", param="deadline_ms"
        )
    known = generator_options(name)
    for option in overrides:
        if option not in known:
            raise ConfigError(f"the workload {name} has no option {option}; it has {', '.join(known)}", param=option)
    mix = _Mix(_shares("tenants", tenants or {"": 1.0}), _shares("priorities", priorities or {0: 1.0}), deadline_ms)
    rng = np.random.default_rng(seed)
    generator = kind(**overrides)
    draft = Draft(block_tokens)
    ends = []
    for share in mix.tenants.values():
        generator.draw(rng, draft, rate_per_s * share, duration_s)
        ends.append(len(draft))
    return draft.workload(name, _labels(rng, mix, ends))


def _generator(name: str) -> Any:
    if name not in GENERATORS:
        raise ConfigError(f"there is no workload {name!r}; there are {', '.join(GENERATORS)}")
    return GENERATORS[name]


def _shares(argument: str, weights: Mapping[_Key, float]) -> dict[_Key, float]:
    total = sum(weights.values())
    if not all(weight >= 0 for weight in weights.values()) or not 0 < total < float("inf"):
        raise ConfigError(f"the shares of {argument} should be numbers not below 0, not all 0: {dict(weights)}", param=argument)
    return {key: weight / total for key, weight in weights.items()}


def _labels(rng: np.random.Generator, mix: _Mix, ends: list[int]) -> Labels:
    """`ends[i]` is the number of requests added before those of tenant i + 1."""
    names = list(mix.tenants)
    tenants = np.repeat(np.arange(len(names)), np.diff([0, *ends]))
    levels = list(mix.priorities)
    priorities = rng.choice(len(levels), size=ends[-1], p=list(mix.priorities.values()))
    return lambda at: (names[tenants[at]], levels[priorities[at]], mix.deadline_ms)
