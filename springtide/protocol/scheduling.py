"""Words between gateways and the Conductor: where an attempt is to run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Annotated

from springtide.blocks import PackedKeys, packed
from springtide.errors import InvalidRequest
from springtide.ids import AttemptId, BlockKey, GatewayId, InstanceId, NodeId, RequestId
from springtide.protocol.attempts import NO_ATTEMPT, Prediction
from springtide.protocol.codec import As
from springtide.protocol.instances import InstanceRef
from springtide.values import value_class

BlockKeys = Annotated[Sequence[BlockKey], As(packed, PackedKeys)]
"""Of every full block of a prompt; on the wire end to end, for a million tokens' are taken in at once."""


MAX_DEADLINE_MS = 24 * 3600 * 1000.0
MOST_LACKING_BLOCKS = 4
"""Of a request that moves while it runs, how many blocks its new node may have to compute itself: those that were filled since stores told
of any, and the one that it is at."""


@value_class(frozen=True, slots=True)
class Terms:
    """What a client asks of whoever schedules its request: the fields of the API that travel from the gateway to the Conductor as they are
    (docs/add-an-api-field.md). Raises InvalidRequest, naming the field."""

    priority: int = 0
    """The higher, the more important."""
    deadline_ms: float = 0.0
    """Until when the whole output is wanted, counted from where the terms are: from the request's arrival as the client sends them, from
    now as a gateway asks the Conductor (`after`). 0: whenever."""
    idle: bool = False
    """Only in capacity that nobody else wants: never refused for load, it waits for such, and gives way at once to whoever asks without
    this."""

    def __post_init__(self) -> None:
        if not 0 <= self.deadline_ms <= MAX_DEADLINE_MS:
            raise InvalidRequest(f"deadline_ms must be between 0 and {MAX_DEADLINE_MS:.0f}, not {self.deadline_ms}", param="deadline_ms")

    def after(self, elapsed_ms: float) -> Terms | None:
        """What is left of them when so much time has passed: of the deadline, what is to come; of what is no time span, all. None: the
        deadline has passed."""
        if not self.deadline_ms:
            return self
        left_ms = self.deadline_ms - elapsed_ms
        return replace(self, deadline_ms=left_ms) if left_ms > 0 else None


NO_TERMS = Terms()


@value_class(frozen=True, slots=True)
class Schedule:
    """A gateway asks where to run an attempt. Raises InvalidRequest, naming the field."""

    attempt_id: AttemptId
    request_id: RequestId
    gateway_id: GatewayId
    block_keys: BlockKeys
    num_tokens: int
    max_new_tokens: int
    accepted: bool = False
    """Before: a continuation after a failure is never rejected for load."""
    avoid: frozenset[InstanceId] = frozenset()
    """Instances that just failed this request; avoided when there is another."""
    ttft_slo_ms: float = 0.0
    """0: the cluster's objective."""
    tbt_slo_ms: float = 0.0
    tenant: str = ""
    terms: Terms = NO_TERMS
    min_new_tokens: int = 0
    """Lower bound of the output."""
    debug: bool = False
    """The answer is to have every alternative's estimate."""
    epoch: int = 0
    """The highest leadership epoch that the gateway has seen."""
    whole_prompt: bool = False
    """All of the prompt is computed by a prefill group: nothing of it is reused, and no decode node computes it in its steps."""
    successor_of: AttemptId = NO_ATTEMPT
    """The attempt, which runs and goes on meanwhile, whose place this one is to take at another decode node, which computes what it lacks
    of the tokens itself; NO_ATTEMPT: there is none."""
    output_tokens: int = 0
    """Of `num_tokens`, those of the output, which earlier attempts have made."""

    def __post_init__(self) -> None:
        if not self.attempt_id:
            raise InvalidRequest("attempt_id is empty: the gateway names each attempt", param="attempt_id")
        if self.num_tokens < 1:
            raise InvalidRequest(f"num_tokens must be at least 1, not {self.num_tokens}: there is nothing to prefill", param="num_tokens")
        if not (0 <= self.ttft_slo_ms < math.inf and 0 <= self.tbt_slo_ms < math.inf):
            name = "tbt_slo_ms" if 0 <= self.ttft_slo_ms < math.inf else "ttft_slo_ms"
            raise InvalidRequest(f"{name} must be finite and not negative, but is {getattr(self, name)}", param=name)

    @property
    def reusable_keys(self) -> Sequence[BlockKey]:
        """Of the blocks that may be taken from where they are."""
        return () if self.whole_prompt else self.block_keys


@value_class(frozen=True, slots=True)
class GatewayOrders:
    """What a gateway is to do with attempts that run."""

    hung: tuple[InstanceRef, ...] = ()
    """All instances that are silent, or have said that they make no headway, and whose work can go on elsewhere: another instance of the
    role is ready."""
    moves: tuple[AttemptId, ...] = ()
    """Attempts of the gateway that had better decode elsewhere, each named once."""


@value_class(frozen=True, slots=True)
class PrefixSource:
    """A store that holds the first `num_blocks` blocks of a prompt."""

    node_id: NodeId
    store_address: str
    num_blocks: int


@value_class(frozen=True, slots=True)
class Assignment:
    """Where an attempt is to run."""

    attempt_id: AttemptId
    prefill: InstanceRef
    """Of the decode instance's node where the prompt is inlined: there is no prefill side then."""
    decode: InstanceRef
    local_blocks: int
    """Predicted to be at the prefill group's own store."""
    sources: tuple[PrefixSource, ...]
    """Where to fetch more from (`local_blocks` are counted in theirs), best first; the prediction counts on the first."""
    predicted_ttft_ms: float
    predicted_tbt_ms: float
    ttft_slo_ms: float
    tbt_slo_ms: float
    prediction: Prediction
    """The gateway passes it on to the Conductors that did not make it."""
    waits: bool
    """No decode node has room: this one is asked first, and prefill begins when it has reserved."""
    refusable: bool
    """The decode node's admission check may refuse it for its objective."""

    @property
    def inlined(self) -> bool:
        """The engine that decodes computes the prompt, too: there is no prefill side."""
        return self.prefill.node_id == self.decode.node_id


class Reason(Enum):
    """Why an attempt is not placed."""

    TTFT = "ttft"
    TBT = "tbt"
    NO_PREFILL = "no_prefill"
    NO_DECODE = "no_decode"
    TOO_LARGE = "too_large"
    """Never fits, whatever the load."""
    DEADLINE = "deadline"
    """It would be missed."""
    PRIORITY = "priority"
    """What is left under load is for requests of higher priority."""
    TENANT_SHARE = "tenant_share"
    """What is left under load is for tenants that have had less than their share."""
    SIZE = "size"
    """What is left under load serves several smaller requests in its place."""
    NOT_IDLE = "not_idle"
    """It asks for idle capacity, of which there is none just now."""


@value_class(frozen=True, slots=True)
class Rejection:
    """An attempt is not placed."""

    reason: Reason
    message: str
    retry_after_s: float = 0.0
    """0: coming back does not help."""


@value_class(frozen=True, slots=True)
class NotLeader:
    """Nothing was decided: another Conductor is to be asked."""

    leader_address: str
    """Who leads, gRPC host:port, as far as is known; else empty."""
    epoch: int
    """The highest known there."""


@value_class(frozen=True, slots=True)
class Estimate:
    """What one instance would have come to: for people."""

    instance_id: InstanceId
    prefix_blocks: int
    queue_ms: float = 0.0
    transfer_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    tbt_ms: float = 0.0
    note: str = ""


@value_class(frozen=True, slots=True)
class ScheduleReply:
    """The Conductor's answer to a Schedule: exactly one of the first three."""

    assignment: Assignment | None = None
    rejection: Rejection | None = None
    not_leader: NotLeader | None = None
    estimates: tuple[Estimate, ...] = ()
    """Every alternative's, when asked for."""
    epoch: int = 0
    """Of the leadership under which this was decided; gateways refuse what is older than they have seen. 0: there is one Conductor
    only."""
