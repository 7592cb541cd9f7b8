"""What the gateway's core schedules (generations), what it is told (events) and what it wants done (actions)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from springtide.clock import Tick
from springtide.errors import SpringtideError
from springtide.ids import AttemptId, InstanceId, RequestId
from springtide.protocol.attempts import LiveAttempt, Progress
from springtide.protocol.instances import InstanceRef, Role
from springtide.protocol.outputs import (
    AttemptFailed,
    AttemptSign,
    Finish,
    HandedOver,
    PrefillDone,
    PromptLogprobs,
    SampledToken,
    TokenOutput,
)
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.scheduling import NO_TERMS, Assignment, Rejection, Schedule, Terms
from springtide.protocol.starts import DecodeStart, ForetellTokens, PrefillStart
from springtide.protocol.timings import DecodeTimes

# ---- what is scheduled ----


@dataclass(frozen=True, slots=True)
class Generation:
    """One prompt, one output: what is scheduled. An API request with several choices has as many generations."""

    request_id: RequestId
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    tenant: str = ""
    terms: Terms = NO_TERMS
    """Whose deadline counts from `requested_at`."""
    operation: str = "chat"
    """As of Origin."""
    traceparent: str = ""
    requested_at: float | None = None
    """When the API request came: the further choices of a prompt begin later. None: with this generation."""
    accepted: bool = False
    """Belongs to a request that the Conductor has accepted already (a further choice of it): never rejected for load."""
    prompt_only: bool = False
    """No output is wanted: the prompt is computed, and is in the pool from then on. `sampling` asks for one token, which nodes sample
    anyway and nobody gets."""
    salt: str = ""
    """Only generations of the same tenant with the same salt share blocks."""
    patience_s: float = math.inf
    """Of a prompt alone: it is given up when nothing more of it has been computed for so long and as long as all of it should take."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("Generation.prompt_ids must hold at least one token")
        if self.prompt_only and self.sampling.max_tokens != 1:
            raise ValueError(f"a Generation of a prompt alone has max_tokens 1, not {self.sampling.max_tokens}")
        if self.patience_s < math.inf and not self.prompt_only:
            raise ValueError("a Generation of which output is wanted has no patience_s")

    @property
    def promised(self) -> bool:
        """It is held to the objectives."""
        return not self.terms.idle and not self.prompt_only


# ---- events ----


@dataclass(frozen=True, slots=True)
class Arrived:
    """A valid request: from now on the core owes it one terminal reply."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Rejected:
    attempt_id: AttemptId
    rejection: Rejection


@dataclass(frozen=True, slots=True)
class SchedulerUnreachable:
    attempt_id: AttemptId
    message: str


@dataclass(frozen=True, slots=True)
class DecodeReserved:
    """The decode node, which was asked first, has room."""

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True)
class SideFailed:
    """One side of an attempt says that it has failed there."""

    side: Role
    failed: AttemptFailed


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The session with an instance is over, and with it these attempts there. `connected` is False when it never came to be."""

    side: Role
    instance_id: InstanceId
    attempt_ids: tuple[AttemptId, ...]
    connected: bool


@dataclass(frozen=True, slots=True)
class InstancesHung:
    """The Conductor has found that these hang, and that others could do their work. An instance's address tells its lives apart."""

    addresses: frozenset[tuple[InstanceId, str]]


@dataclass(frozen=True, slots=True)
class MovesWanted:
    """The Conductor finds that these attempts had better decode elsewhere."""

    attempt_ids: tuple[AttemptId, ...]


@dataclass(frozen=True, slots=True)
class Signs:
    """The signs of life of all attempts that a node runs for this gateway."""

    side: Role
    signs: tuple[AttemptSign, ...]


@dataclass(frozen=True, slots=True)
class StopStringHit:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ClientGone:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The gateway ends: every request that it owns, or is still given, is answered at once."""


Event = (
    Arrived
    | Assignment
    | Rejected
    | SchedulerUnreachable
    | PrefillDone
    | TokenOutput
    | DecodeReserved
    | SideFailed
    | SessionLost
    | InstancesHung
    | MovesWanted
    | Signs
    | StopStringHit
    | ClientGone
    | Shutdown
    | HandedOver
    | DecodeTimes
    | Tick
)
"""What comes over a wire as one word is an event as it is: an Assignment, a PrefillDone, and, from the decode node, a TokenOutput. A
HandedOver and DecodeTimes change nothing: they are for the trace alone (gateway/tracing)."""

# ---- actions ----


@dataclass(frozen=True, slots=True)
class StartAtDecode:
    """Begin the attempt at its decode node. Where it waits for room there, StartAtPrefill follows when it has some. `successor`: another
    one of the request runs, and goes on for now."""

    instance: InstanceRef
    start: DecodeStart
    successor: bool = False


@dataclass(frozen=True, slots=True)
class StartAtPrefill:
    """Begin the attempt at its prefill group."""

    instance: InstanceRef
    start: PrefillStart


@dataclass(frozen=True, slots=True)
class Abort:
    """Whatever this side still does or holds for the attempt is to be given up."""

    side: Role
    instance_id: InstanceId
    attempt_id: AttemptId


@dataclass(frozen=True, slots=True)
class Emit:
    """The next output tokens, each position exactly once and in order."""

    request_id: RequestId
    tokens: tuple[SampledToken, ...]
    cached_tokens: int = 0
    """Of the prompt, found in the pool by the attempt that had the first output token."""


@dataclass(frozen=True, slots=True)
class EmitPrompt:
    """The log-probabilities of the prompt, where the request asks for them: once, before any output token and the end."""

    request_id: RequestId
    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the Conductor. Once the attempt is over nothing of it is of interest any more."""

    progress: Progress
    culprit: str = ""
    """Who failed, if known."""
    why: str = ""
    """Of a failed one, for the log."""
    full: bool = False
    """Of a failed one: nobody is at fault; there was no room at a healthy node, and the request waits."""


@dataclass(frozen=True, slots=True)
class Foretell:
    """Tell a successor what the attempt has come to whose place it is to take."""

    instance_id: InstanceId
    tokens: ForetellTokens


@dataclass(frozen=True, slots=True)
class TellPlaced:
    """Tell all Conductors of an attempt that none of them has placed."""

    placed: LiveAttempt


@dataclass(frozen=True, slots=True)
class Moved:
    """The request goes on at another decode node. `behind`: tokens that it has yet to come to, for they were sent before; None: it is not
    there yet, but the old place has failed."""

    request_id: RequestId
    source: InstanceId
    target: InstanceId
    behind: int | None


@dataclass(frozen=True, slots=True)
class MoveGivenUp:
    """The request, which runs, goes on where it is."""

    request_id: RequestId
    why: str


@dataclass(frozen=True, slots=True)
class Finished:
    reason: Finish
    cached_tokens: int
    """Prompt tokens that the first attempt found in the pool."""
    stop_token: int | None = None
    """Which of the request's stop tokens ended it, if one did."""
    prompt_at: InstanceRef | None = None
    """Where the prompt was last computed: its blocks are in the store of that node."""


@dataclass(frozen=True, slots=True)
class Failed:
    error: SpringtideError
    cached_tokens: int = 0
    """As of one that finished."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client went away, or has had enough."""

    cached_tokens: int = 0
    """As of one that finished."""


@dataclass(frozen=True, slots=True)
class Terminal:
    request_id: RequestId
    reply: Finished | Failed | Cancelled


Action = (
    Schedule | StartAtDecode | StartAtPrefill | Foretell | Abort | Emit | EmitPrompt | Report | TellPlaced | Moved | MoveGivenUp | Terminal
)
