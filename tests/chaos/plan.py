"""The nemesis's schedule, decided ahead: which fault befalls whom, when and for how long. Pure: the same seed gives the same plan."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "kill", "end", "stop", "slow", "cut", "reset", "narrow", "disk full", "flood", "move", "pause", "flush", "malformed record", "suspend"
]

LEAD_S = 2.0
"""From the start of a round, so that requests run."""
EASY_S = (1.0, 5.0)
"""From one fault to the next."""
TAIL_S = 3.0
"""At the end of a round nothing new begins."""
ROUND_S = 45.0
CALM_S = 15.0
"""Set aside for the end of each round; what is left of it is not waited out."""
DUTY_CYCLE_S = 0.1
"""In which who is slowed stands for a while, then runs."""


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    """Since the round began."""
    kind: Kind
    target: str
    """A process as `springtide up` names it, `prefill-0/1` being its second child; a node where all of it is hit; or `all`."""
    for_s: float = 0.0
    """Until it is taken back. 0: nothing is to be taken back."""
    then_kill: bool = False
    """Stopped for good: replaced by its supervisor after a kill, not woken."""
    amount: int = 0
    """Requests of a flood; sequences that move at once; Mbit/s left of a network; per cent of the time that who is slowed may run."""

    @property
    def disables(self) -> bool:
        """While it lasts, the target answers nobody; one that is slowed, while it stands."""
        return self.kind in ("kill", "end", "stop", "cut", "suspend", "slow")

    @property
    def disconnects(self) -> bool:
        """It goes on, and what others had from it may be lost: connections broke, or signs of life came late."""
        return self.kind in ("reset", "narrow")


@dataclass(frozen=True, slots=True)
class Round:
    number: int
    faults: tuple[Fault, ...]
    lasts_s: float


@dataclass(frozen=True, slots=True)
class Targets:
    """What can be hit in a cluster."""

    engines: tuple[str, ...]
    stores: tuple[str, ...]
    children: tuple[str, ...]
    """Stages and ranks."""
    conductors: tuple[str, ...]
    gateways: tuple[str, ...]
    """That have processes of their own."""
    valkey: tuple[str, ...] = ("valkey",)
    disks: tuple[str, ...] = ()
    """Nodes with an SSD tier."""
    movable: tuple[str, ...] = ()
    """Instances whose sequences can go on at another one."""

    @property
    def processes(self) -> tuple[str, ...]:
        return (*self.engines, *self.stores, *self.children, *self.conductors, *self.gateways, *self.valkey)


def plan(seed: int, targets: Targets, minutes: float) -> tuple[Round, ...]:
    """Rounds that fill the time. Every round has a stop; kinds come in shuffled order, so that each comes before one comes again."""
    generator = random.Random(f"nemesis {seed}")
    num_rounds = max(1, round(minutes * 60 / (ROUND_S + CALM_S)))
    lasts_s = max(LEAD_S + TAIL_S + 1.0, minutes * 60 / num_rounds - CALM_S)
    deck = _endless(_kinds(targets), generator)
    return tuple(Round(number, tuple(_faults(generator, deck, targets, lasts_s)), lasts_s) for number in range(num_rounds))


def _kinds(targets: Targets) -> tuple[Kind, ...]:
    """What dies and what hangs comes more often than the rest."""
    kinds: list[Kind] = ["kill", "kill", "kill", "stop", "stop", "stop", "stop", "end", "slow", "cut", "cut", "reset", "narrow"]
    kinds += ["flood", "pause", "flush", "malformed record", "suspend"]
    kinds += ["disk full"] if targets.disks else []
    kinds += ["move", "move"] if targets.movable else []
    return tuple(kinds)


def _endless(kinds: Sequence[Kind], generator: random.Random) -> Iterator[Kind]:
    while True:
        yield from generator.sample(kinds, len(kinds))


def _faults(generator: random.Random, deck: Iterator[Kind], targets: Targets, lasts_s: float) -> Iterator[Fault]:
    at_s = LEAD_S
    while at_s < lasts_s - TAIL_S:
        yield _fault(generator, next(deck), targets, at_s, lasts_s - at_s)
        at_s = round(at_s + generator.uniform(*EASY_S), 1)


def _fault(generator: random.Random, kind: Kind, targets: Targets, at_s: float, left_s: float) -> Fault:
    """What is to be taken back is so before the round ends."""

    def lasting(least_s: float, most_s: float) -> float:
        return round(min(generator.uniform(least_s, most_s), left_s), 1)

    nodes = targets.engines
    match kind:
        case "kill" | "end":
            return Fault(at_s, kind, _one_of_each_sort(generator, targets))
        case "stop":
            return Fault(at_s, kind, _one_of_each_sort(generator, targets), lasting(1.0, 20.0), then_kill=generator.random() < 0.4)
        case "slow":
            return Fault(at_s, kind, _one_of_each_sort(generator, targets), lasting(3.0, 10.0), amount=generator.choice((10, 25, 50)))
        case "cut":
            # Valkey has no network here, but a Unix socket.
            who = generator.choice((*nodes, *nodes, *targets.conductors) if targets.gateways else nodes)
            return Fault(at_s, kind, who, lasting(2.0, 15.0))
        case "reset":
            return Fault(at_s, kind, generator.choice(nodes))
        case "narrow":
            return Fault(at_s, kind, "all", lasting(3.0, 10.0), amount=generator.choice((4, 16, 64)))
        case "disk full":
            return Fault(at_s, kind, generator.choice(targets.disks), lasting(4.0, 15.0))
        case "flood":
            return Fault(at_s, kind, "all", amount=generator.choice((16, 24, 32)))
        case "move":
            return Fault(at_s, kind, generator.choice(targets.movable), lasting(1.0, 6.0), amount=generator.choice((1, 2, 8)))
        case "pause":
            return Fault(at_s, kind, "valkey", lasting(1.0, 12.0))
        case "flush":
            return Fault(at_s, kind, "valkey")
        case "malformed record":
            return Fault(at_s, kind, "valkey", lasting(2.0, 8.0), amount=generator.randrange(1 << 16))
        case "suspend":
            return Fault(at_s, kind, "all", lasting(1.0, 12.0))


def _one_of_each_sort(generator: random.Random, targets: Targets) -> str:
    """A process, each sort of process being as likely as another."""
    sorts = (targets.engines, targets.engines, targets.stores, targets.children, targets.conductors, targets.gateways, targets.valkey)
    return generator.choice(generator.choice([sort for sort in sorts if sort]))
