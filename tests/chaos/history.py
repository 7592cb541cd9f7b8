"""What was sent, what was injected and what was seen of a run, in seconds since it began. Checks and report read nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tests.chaos.plan import DUTY_CYCLE_S, Fault
from tests.chaos.workload import Item
from tests.support.intervals import Interval, merged

Token = tuple[str, float | None]
"""Its text as the API shows it, and its log-probability."""


@dataclass(frozen=True, slots=True)
class Choice:
    text: str
    tokens: tuple[Token, ...]
    """Where log-probabilities were asked for."""
    finish: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """All of what a client is told, save what depends on the moment."""

    status: int
    code: str | None = None
    """Of the error."""
    choices: dict[int, Choice] = field(default_factory=dict)
    """By index."""
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """One choice's part of one event."""

    at_s: float
    index: int
    text: str
    tokens: tuple[Token, ...] = ()
    finish: str | None = None


Outcome = Literal["completed", "aborted", "refused", "failed", "broken off", "no answer", "not ended"]
"""What became of a request: it failed when it was accepted and ended by an error."""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(slots=True)
class Exchange:
    """One request and all that came back."""

    number: int
    client: str
    item: Item
    gateway: str
    sent_s: float
    abort_after: int | None = None
    """Events after which the client closes the connection."""
    status: int | None = None
    request_id: str | None = None
    """Of the answer, a refusal's too."""
    retry_after: str | None = None
    pieces: list[Piece] = field(default_factory=list)
    dones: int = 0
    """[DONE] events; of an answer that is not streamed, its end."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of errors: of a refusal, or as events of a stream that had begun."""
    after_the_end: int = 0
    """Events that came after [DONE] or an error."""
    completion_tokens: int | None = None
    broken: str | None = None
    """Why the connection ended before the answer had."""
    aborted: bool = False
    stored_as: str | None = None
    """The id under which its answer was to be had again."""
    looked_up_s: float | None = None
    """When it was asked for under that id."""
    not_kept: str | None = None
    """What came instead of it."""
    ended_s: float | None = None
    """None: it has not."""

    @property
    def lifetime(self) -> Interval:
        return self.sent_s, float("inf") if self.ended_s is None else self.ended_s

    @property
    def accepted(self) -> bool:
        """As far as its client can tell."""
        return self.status == 200

    @property
    def outcome(self) -> Outcome:
        if self.ended_s is None:
            return "not ended"
        if self.status is None:
            return "no answer"
        if not self.accepted:
            return "refused"
        if self.aborted:
            return "aborted"
        if self.dones:
            return "completed"
        return "failed" if self.errors else "broken off"

    @property
    def code(self) -> str | None:
        return next((error.get("code") for error in self.errors), None)

    @property
    def answer(self) -> Answer:
        texts: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            texts.setdefault(piece.index, []).append(piece)
        choices = {
            index: Choice(
                "".join(piece.text for piece in pieces),
                tuple(token for piece in pieces for token in piece.tokens),
                next((piece.finish for piece in pieces if piece.finish), None),
            )
            for index, pieces in sorted(texts.items())
        }
        return Answer(self.status or 0, self.code, choices, self.completion_tokens)

    def gaps(self) -> Iterator[tuple[Interval, int]]:
        """From one piece of a choice to its next, and the choice. The last one reaches to the end of the exchange."""
        last: dict[int, float] = {}
        finished: set[int] = set()
        for piece in self.pieces:
            if piece.index in last:
                yield (last[piece.index], piece.at_s), piece.index
            last[piece.index] = piece.at_s
            if piece.finish:
                finished.add(piece.index)
        if self.ended_s is not None and not self.aborted:
            for index in last.keys() - finished:
                yield (last[index], self.ended_s), index

    @property
    def first_at_s(self) -> float | None:
        return self.pieces[0].at_s if self.pieces else None


@dataclass(slots=True)
class Injection:
    fault: Fault
    at_s: float
    until_s: float | None = None
    """When it was taken back; kills and the like are over at once."""
    not_injected: str | None = None
    """Why."""

    @property
    def interval(self) -> Interval:
        return self.at_s, self.until_s if self.until_s is not None else self.at_s

    @property
    def standstills(self) -> Iterator[Interval]:
        """When its target did nothing: of one that was slowed, the parts of each cycle in which it stood."""
        begin, end = self.interval
        if self.fault.kind != "slow":
            yield begin, end
            return
        stands_s = DUTY_CYCLE_S * (1 - self.fault.amount / 100)
        for number in range(math.ceil((end - begin) / DUTY_CYCLE_S)):
            since = begin + number * DUTY_CYCLE_S
            yield since, min(since + stands_s, end)


@dataclass(frozen=True, slots=True)
class Sample:
    """What was ready at a moment."""

    at_s: float
    ready: frozenset[str]
    """Engines, Conductors, gateways and `valkey`. An engine is, when a Conductor that answers says so; a Conductor, when it leads."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    name: str
    pid: int
    fds: int
    threads: int
    private_bytes: int
    """Resident, and not shared with others as arenas are."""


@dataclass(frozen=True, slots=True)
class CalmPoint:
    """After every request of a round has ended and every fault been taken back."""

    at_s: float
    leaks: dict[str, float]
    """What had not become 0 in time, by `process metric`."""
    processes: tuple[ProcessState, ...]
    verdicts: dict[str, str]
    """Of `springtide store verify`, by store."""
    not_whole: str | None = None
    """What was still missing of the cluster."""


@dataclass(frozen=True, slots=True)
class Aftermath:
    """After the cluster was told to stop."""

    left_processes: tuple[str, ...] = ()
    left_shared_memory: tuple[str, ...] = ()
    problem: str | None = None
    """How the stop itself failed."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Names of processes by what they do; an instance that does both is among either."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    conductors: tuple[str, ...]
    gateways: tuple[str, ...]
    gateway_in_conductor: bool = False
    """The gateway lives and dies with conductor-0."""

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.prefill, *self.decode)))


@dataclass(frozen=True, slots=True)
class Limits:
    gap_s: float = 5.0
    first_token_s: float = 30.0
    end_s: float = 120.0
    """Longest that an exchange may take."""
    sheds_load: bool = False
    """Requests may be refused for load."""
    aftereffect_s: float = 10.0
    """How long after it was taken back a fault is still named as the reason of what is seen."""


@dataclass(slots=True)
class History:
    topology: Topology
    limits: Limits
    items: tuple[Item, ...]
    reference: dict[str, Answer]
    """By item, as a calm cluster answers it."""
    exchanges: list[Exchange] = field(default_factory=list)
    injections: list[Injection] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    rounds: list[Interval] = field(default_factory=list)
    calm_points: list[CalmPoint] = field(default_factory=list)
    aftermath: Aftermath | None = None
    nudged: dict[str, tuple[Answer, ...]] = field(default_factory=dict)
    """By item, of those that were answered otherwise than by the reference: the answers of calm clusters whose weights are a little off."""
    died: str | None = None
    """The cluster ended by itself, or could not be made to run."""
    own_stalls: list[Interval] = field(default_factory=list)
    """When the clients' own event loop stood still: what came then, and when, is not known."""

    def near(self, interval: Interval, *kinds: str) -> list[Injection]:
        """Those of these kinds, or of any, whose effects may be felt in the interval."""
        begin, end = interval
        return [
            injection
            for injection in self.injections
            if (not kinds or injection.fault.kind in kinds)
            and injection.not_injected is None
            and injection.interval[0] <= end
            and injection.interval[1] + self.limits.aftereffect_s >= begin
        ]


Absence = Literal["prefill", "decode", "conductor", "gateway", "valkey"]


def absent(history: History, role: Absence, gateway: str | None = None) -> list[Interval]:
    """When nobody of a role could serve: each was under a fault, or not ready as last sampled. Of `gateway`, that one."""
    topology = history.topology
    names = {
        "prefill": topology.prefill,
        "decode": topology.decode,
        "conductor": topology.conductors,
        "gateway": (gateway,) if gateway else topology.gateways,
        "valkey": ("valkey",),
    }[role]
    each = [absences(history, name) for name in names]
    common = each[0] if each else []
    for intervals in each[1:]:
        common = [(max(a, c), min(b, d)) for a, b in common for c, d in intervals if max(a, c) < min(b, d)]
    return merged(common)


def absences(history: History, name: str) -> list[Interval]:
    """When it did nothing by a fault, or was not ready as last sampled."""
    return merged([*_faulted(history, name), *_unready(history.samples, name)])


def _faulted(history: History, name: str) -> Iterator[Interval]:
    for injection in _hits(history, name):
        if injection.fault.disables:
            yield from injection.standstills


def disconnected(history: History, name: str) -> list[Interval]:
    """When it went on, and what others had from it may have been lost."""
    return [injection.interval for injection in _hits(history, name) if injection.fault.disconnects]


def _hits(history: History, name: str) -> Iterator[Injection]:
    """What befell it, its store or its children."""
    in_conductor = history.topology.gateway_in_conductor and name in history.topology.gateways
    for injection in history.injections:
        target = injection.fault.target
        hit = (
            target == "all"
            or target == name
            or target.startswith((f"{name}-store", f"{name}/"))
            or (in_conductor and target == "conductor-0")
        )
        if hit and injection.not_injected is None:
            yield injection


def _unready(samples: list[Sample], name: str) -> Iterator[Interval]:
    """From the first sample without it to the next sample with it."""
    since: float | None = None
    for sample in samples:
        if name not in sample.ready and since is None:
            since = sample.at_s
        elif name in sample.ready and since is not None:
            yield since, sample.at_s
            since = None
    if since is not None:
        yield since, float("inf")
