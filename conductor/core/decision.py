"""What a scheduling decision rests on, and what it comes to. Both survive JSON, so a decision can be replayed from its log line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

from springtide.ids import AttemptId, InstanceId, NodeId

Branch = Literal["cache-aware", "fetch", "recompute"]
"""Of Algorithm 1: `cache-aware` uses the node's own prefix, for the best one is not much longer; else the rest is fetched, or computed
where that is predicted to be quicker."""


class PrefillEstimate(NamedTuple):
    """What the request may expect of one prefill instance. Milliseconds."""

    instance_id: InstanceId
    local_blocks: int
    source_id: NodeId | None
    source_blocks: int
    """The first blocks of the prompt that lie at the source, the local ones included; 0 without a source."""
    queue_ms: float
    transfer_ms: float
    prefill_ms: float
    slots_total: int
    branch: Branch

    @property
    def ttft_ms(self) -> float:
        return self.queue_ms + self.transfer_ms + self.prefill_ms


class DecodeEstimate(NamedTuple):
    """What the request may expect of one decode node, everything already promised to it included."""

    instance_id: InstanceId
    prefix_blocks: int
    tbt_ms: float
    batch: int
    """Attempts in its batch with this one."""
    slots_free: int
    """Without this request's."""
    slots_total: int


@dataclass(frozen=True, slots=True)
class Alternatives:
    """One request and every instance that could serve it. All that `scheduler.decide` looks at."""

    attempt_id: AttemptId
    policy: str
    admission: str
    turn: int
    """Decisions made before this one."""
    num_blocks: int
    """Slots that the prompt and the first output token need."""
    accepted: bool
    avoid: tuple[InstanceId, ...]
    ttft_slo_ms: float
    tbt_slo_ms: float
    mean_output_tokens: float
    """Of recent requests: how soon places become free."""
    rejoin_s: float
    """When to come back if there is no instance at all."""
    prefills: tuple[PrefillEstimate, ...]
    decodes: tuple[DecodeEstimate, ...]
    holders: tuple[tuple[NodeId, int], ...]
    """Some of the stores that hold a prefix of the prompt, and how many blocks of it: the longest first, then the least congested."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Alternatives:
        fields: dict[str, Any] = json.loads(line)
        fields["avoid"] = tuple(fields["avoid"])
        fields["prefills"] = tuple(PrefillEstimate(*row) for row in fields["prefills"])
        fields["decodes"] = tuple(DecodeEstimate(*row) for row in fields["decodes"])
        fields["holders"] = tuple((node_id, blocks) for node_id, blocks in fields["holders"])
        return cls(**fields)


class Reason(Enum):
    TTFT = "ttft"
    TBT = "tbt"
    NO_PREFILL = "no_prefill"
    NO_DECODE = "no_decode"
    NO_SLOTS = "no_slots"
    TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True)
class Placement:
    prefill: PrefillEstimate
    decode: DecodeEstimate


@dataclass(frozen=True, slots=True)
class Rejection:
    reason: Reason
    message: str
    retry_after_s: float = 0.0
    """0: coming back does not help."""


Outcome = Placement | Rejection
