"""What the gateway's core is told (events) and what it wants done (actions)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from springtide.errors import SpringtideError
from springtide.ids import AttemptId, InstanceId, NodeId, RequestId
from springtide.rpc import common_pb2 as pb
from springtide.rpc import conductor_pb2 as conductor_pb
from springtide.sampling import SampledToken, SamplingParams

Side = Literal["prefill", "decode"]
SIDES: tuple[Side, ...] = ("prefill", "decode")
Finish = Literal["stop", "length"]
Phase = Literal["prefill", "decode", "finished", "failed"]


@dataclass(frozen=True, slots=True)
class Generation:
    """One prompt, one output: what is scheduled. An API request with several choices has as many generations."""

    request_id: RequestId
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    tenant: str = ""
    priority: int = 0
    traceparent: str = ""
    deadline_ms: float = 0.0
    """Until when the whole output is wanted, from `requested_at`; 0 for whenever."""
    requested_at: float | None = None
    """When the API request came: the further choices of a prompt begin later. None: with this generation."""
    accepted: bool = False
    """Belongs to a request that the Conductor has accepted already (a further choice of it): never rejected for load."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("Generation.prompt_ids must hold at least one token")
        if not 0 <= self.deadline_ms < math.inf:
            raise ValueError(f"Generation.deadline_ms must be finite and not negative, not {self.deadline_ms}")


@dataclass(frozen=True, slots=True)
class Instance:
    instance_id: InstanceId
    address: str
    node_id: NodeId
    store_address: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where an attempt runs; fields as in `proto/springtide/v1/conductor.proto`."""

    attempt_id: AttemptId
    prefill: Instance
    decode: Instance
    sources: tuple[pb.PrefixSource, ...] = ()
    predicted_ttft_ms: float = 0.0
    ttft_slo_ms: float = 0.0
    tbt_slo_ms: float = 0.0
    prediction: conductor_pb.Prediction | None = None
    waits: bool = False
    """No decode node had room: this one is asked first, and prefill begins when it has reserved."""
    refusable: bool = False
    """The decode node's door may refuse it."""

    @property
    def expected_tokens(self) -> float:
        """Predicted length of the output still to come; 0: not known."""
        return self.prediction.output_tokens if self.prediction is not None else 0.0

    @property
    def inlined(self) -> bool:
        """The decode node computes the prompt: there is no prefill side."""
        return self.prefill.instance_id == self.decode.instance_id


# ---- events ----


@dataclass(frozen=True, slots=True)
class Arrived:
    """A valid request: from now on the core owes it one terminal reply."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Assigned:
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Rejected:
    attempt_id: AttemptId
    reason: conductor_pb.RejectionReason
    message: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class SchedulerUnreachable:
    attempt_id: AttemptId
    message: str


@dataclass(frozen=True, slots=True)
class Output:
    """Tokens of an attempt; `position` is the output position of the first, counted from the end of the original prompt."""

    attempt_id: AttemptId
    position: int
    tokens: tuple[SampledToken, ...]
    finish: Finish | None = None

    @property
    def end(self) -> int:
        return self.position + len(self.tokens)


@dataclass(frozen=True, slots=True)
class PrefillDone:
    output: Output
    cached_tokens: int
    remote_tokens: int = 0
    """Of the cached ones, those that came from another node, which took `fetch_ms`."""
    fetch_ms: float = 0.0
    queue_ms: float = 0.0
    compute_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    output: Output


@dataclass(frozen=True, slots=True)
class DecodeReserved:
    """The decode node, which was asked first, has room."""

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    attempt_id: AttemptId
    side: Side
    code: pb.FailureCode
    message: str


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The session with an instance is over, and with it these attempts there. `connected` is False when it never came to be."""

    side: Side
    instance_id: InstanceId
    attempt_ids: tuple[AttemptId, ...]
    connected: bool


@dataclass(frozen=True, slots=True)
class InstancesHung:
    """The Conductor has found that these hang, and that others could do their work. An instance's address tells its lives apart."""

    addresses: frozenset[tuple[InstanceId, str]]


@dataclass(frozen=True, slots=True)
class Sign:
    """An attempt is known at the node that sent this, with so many tokens of prompt and output computed. `waiting`: it is not its turn."""

    attempt_id: AttemptId
    computed_tokens: int
    waiting: bool


@dataclass(frozen=True, slots=True)
class Signs:
    """Of all attempts that a node runs for this gateway."""

    side: Side
    signs: tuple[Sign, ...]


@dataclass(frozen=True, slots=True)
class StopStringHit:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ClientGone:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Shutdown:
    """This gateway ends: every request that it owns, or is still given, is answered at once."""


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    Arrived
    | Assigned
    | Rejected
    | SchedulerUnreachable
    | PrefillDone
    | DecodeOutput
    | DecodeReserved
    | AttemptFailed
    | SessionLost
    | InstancesHung
    | Signs
    | StopStringHit
    | ClientGone
    | Shutdown
    | Tick
)

# ---- actions ----


@dataclass(frozen=True, slots=True)
class Schedule:
    """Ask the Conductor where this attempt is to run. Asking again for the same attempt replaces what it answered before."""

    attempt_id: AttemptId
    generation: Generation
    token_ids: Sequence[int]
    """The prompt and every output token received so far."""
    accepted: bool
    avoid: tuple[InstanceId, ...]
    deadline_ms: float = 0.0
    """Of the request's deadline, what is left of it; 0 without one."""

    @property
    def max_new_tokens(self) -> int:
        return self.generation.sampling.max_tokens - (len(self.token_ids) - len(self.generation.prompt_ids))

    @property
    def min_new_tokens(self) -> int:
        """Nothing ends an output before its limit whose end tokens are ignored, unless a stop string or the client does."""
        return self.max_new_tokens if self.generation.sampling.ignore_eos else 1


@dataclass(frozen=True, slots=True)
class StartDecode:
    generation: Generation
    token_ids: Sequence[int]
    assignment: Assignment
    age_ms: float
    """Of the request: where there is not room for all, the oldest goes first."""
    waits: bool
    """For room, as long as it takes: StartPrefill follows when it says that it has some."""


@dataclass(frozen=True, slots=True)
class StartPrefill:
    generation: Generation
    token_ids: Sequence[int]
    assignment: Assignment
    age_ms: float
    ttft_budget_ms: float


@dataclass(frozen=True, slots=True)
class Abort:
    """Whatever this side still does or holds for the attempt is to be given up."""

    side: Side
    instance_id: InstanceId
    attempt_id: AttemptId


@dataclass(frozen=True, slots=True)
class Emit:
    """The next output tokens, each position exactly once and in order."""

    request_id: RequestId
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class Advance:
    """Tell the Conductor. After `finished` or `failed` nothing of the attempt is of interest any more."""

    attempt_id: AttemptId
    phase: Phase
    instance_id: str = ""
    """Who failed, if known."""
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_ms: float = 0.0
    remote_tokens: int = 0
    fetch_ms: float = 0.0
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    why: str = ""
    """Of a failed one, for the log."""


@dataclass(frozen=True, slots=True)
class Finished:
    reason: Finish
    cached_tokens: int
    """Prompt tokens that the first attempt found in the pool."""


@dataclass(frozen=True, slots=True)
class Failed:
    error: SpringtideError


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client went away; nobody reads this reply."""


@dataclass(frozen=True, slots=True)
class Terminal:
    request_id: RequestId
    reply: Finished | Failed | Cancelled


Action = Schedule | StartDecode | StartPrefill | Abort | Emit | Advance | Terminal
