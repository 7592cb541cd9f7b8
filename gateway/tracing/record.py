"""What is known of a traced request: times and words, gathered while it runs. Times are seconds on the gateway's clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway import events as ev
from gateway.objectives import Latencies
from springtide.errors import Overloaded, SpringtideError
from springtide.ids import AttemptId, InstanceId, RequestId
from springtide.protocol.instances import Role
from springtide.protocol.outputs import HandedOver, PrefillDone, TokenOutput
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.scheduling import Assignment
from springtide.protocol.timings import DecodeTimes
from springtide.trace_context import TraceContext


@dataclass(slots=True)
class Arrivals:
    """Outputs of a decode node as they came here, one a step."""

    steps: int = 0
    tokens: int = 0
    last_at: float | None = None
    longest_gap_s: float = 0.0
    gaps_s: float = 0.0

    def take(self, output: TokenOutput, now: float) -> None:
        self.steps += 1
        self.tokens += len(output.tokens)
        if self.last_at is not None:
            self.gaps_s += now - self.last_at
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_at)
        self.last_at = now


@dataclass(slots=True, eq=False)
class AttemptTrace:
    """An attempt, from the question to the Conductor on. One that was not placed stands for those after it, up to one that is."""

    attempt_id: AttemptId
    asked_at: float
    num_tokens: int
    """Of the prompt and what had been sent before."""
    num_asked: int = 1
    answered_at: float | None = None
    refusal: str = ""
    """Why it was not placed, in one word; and in a sentence."""
    refusal_message: str = ""
    assignment: Assignment | None = None
    started_at: dict[Role, float] = field(default_factory=dict)
    """When either side was told to begin."""
    done: PrefillDone | None = None
    done_at: float | None = None
    handed_over: HandedOver | None = None
    handed_over_at: float = 0.0
    times: DecodeTimes | None = None
    times_at: float = 0.0
    arrivals: Arrivals = field(default_factory=Arrivals)
    ended_at: float | None = None
    failure: str = ""
    """Why it failed; empty when it did not."""
    culprit: str = ""
    full: bool = False
    """It failed for want of room: nobody is at fault."""

    @property
    def placed(self) -> bool:
        return self.assignment is not None

    @property
    def lost(self) -> bool:
        """It failed by somebody's fault."""
        return bool(self.failure) and not self.full

    def instance_of(self, side: Role) -> InstanceId:
        assert self.assignment is not None
        return (self.assignment.prefill if side is Role.PREFILL else self.assignment.decode).instance_id


@dataclass(slots=True, eq=False)
class GenerationTrace:
    """One prompt, one output."""

    request_id: RequestId
    arrived_at: float
    num_prompt_tokens: int
    sampling: SamplingParams
    tenant: str
    promised: bool
    """It is held to the objectives."""
    attempts: list[AttemptTrace] = field(default_factory=list)
    attempts_left_out: int = 0
    """Of those in the middle, where there were very many."""
    latencies: Latencies = field(default_factory=Latencies)
    num_output_tokens: int = 0
    cached_tokens: int = 0
    reply: ev.Finished | ev.Failed | ev.Cancelled | None = None
    ended_at: float | None = None

    def emitted(self, num_tokens: int, now: float) -> None:
        """So many further tokens have gone to the client."""
        self.latencies.emitted(num_tokens, now - self.arrived_at)
        self.num_output_tokens += num_tokens

    @property
    def first_token_at(self) -> float | None:
        ttft_s = self.latencies.ttft_s
        return None if ttft_s is None else self.arrived_at + ttft_s

    @property
    def error(self) -> SpringtideError | None:
        return self.reply.error if isinstance(self.reply, ev.Failed) else None


@dataclass(slots=True, eq=False)
class RequestTrace:
    """A request of the API, from when it came until all of it has ended."""

    request_id: str
    context: TraceContext
    """Of its own span. `sampled`: it is kept whatever becomes of it."""
    parent: TraceContext | None
    """Of the span that the client has made of it, if it says so."""
    endpoint: str
    operation: str
    """What was asked for, by OpenTelemetry's name."""
    began_at: float
    began_unix_ns: int
    """By the wall clock."""
    model: str = ""
    stream: bool = False
    num_prompt_tokens: int = 0
    num_choices: int = 1
    generations: list[GenerationTrace] = field(default_factory=list)
    num_open: int = 1
    """What has not ended: the exchange with the client, and generations."""
    status: str = ""
    """How it was answered: an HTTP status, or the name of gRPC's."""
    ended_at: float = 0.0

    @property
    def header(self) -> str:
        """What goes with it to the nodes, and back to the client."""
        return self.context.header

    def tell(self, model: str, stream: bool, num_prompt_tokens: int, num_choices: int) -> None:
        """What has been asked for."""
        self.model, self.stream, self.num_prompt_tokens, self.num_choices = model, stream, num_prompt_tokens, num_choices

    def errors(self) -> Sequence[SpringtideError]:
        return [error for generation in self.generations if (error := generation.error) is not None]

    @property
    def rejected(self) -> bool:
        """For load, or a limit."""
        return self.status in ("429", "RESOURCE_EXHAUSTED") or any(isinstance(error, Overloaded) for error in self.errors())
