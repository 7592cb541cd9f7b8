"""What a scheduling decision rests on, and what it comes to: Alternatives, with the Outlook that admission judges by, and a Decision.

Plain figures that survive JSON, so a decision can be replayed from its log line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum, StrEnum
from typing import Any

from conductor.core.types.estimates import (
    DecodeEstimate,
    DecodeEstimates,
    InlineEstimate,
    OthersEstimates,
    PrefillEstimate,
    PrefillEstimates,
)
from springtide.choices import AdmissionName, PolicyName
from springtide.ids import AttemptId, InstanceId, NodeId
from springtide.protocol.scheduling import Rejection, Terms
from springtide.values import value_class

# ---- what admission judges a placed request by ----


class LimitedBy(Enum):
    """Who or what keeps a request from using all that the objectives leave."""

    OBJECTIVES = "objectives"
    PRIORITY = "priority"
    TENANT = "tenant"
    SIZE = "size"


@value_class(frozen=True, slots=True)
class Limit:
    """The share of what the objectives leave for waiting and for others that a request may find in use, in (0, 1]."""

    share: float
    by: LimitedBy

    def __post_init__(self) -> None:
        assert 0 < self.share <= 1, f"a limit of {self.share} is none"

    def tightened(self, share: float, by: LimitedBy) -> Limit:
        """The limit at `share` of it; by the stricter of both reasons."""
        return self if share == 1.0 else Limit(self.share * share, by if share < self.share else self.by)

    def to_fields(self) -> tuple[float, str]:
        """The fields for JSON."""
        return self.share, self.by.value

    @classmethod
    def from_fields(cls, share: float, by: str) -> Limit:
        return cls(share, LimitedBy(by))


class Foresight(Enum):
    """Which load of the decode nodes an admission rule looks at."""

    NONE = "none"
    ARRIVAL = "arrival"
    """Of the pool, now: whoever decodes when the request arrives."""
    PREFILL_END = "prefill-end"
    """Of the pool, when this request's prefill is predicted to end: who will have joined by then is in, who will have left is not."""
    REQUEST = "request"
    """The worst of the request's own decode node, from the end of its prefill to its own predicted end."""


@value_class(frozen=True, slots=True)
class Outlook:
    """What is in store for one request and the pair of instances it would be placed on. Milliseconds."""

    prefill_limit: Limit
    """How much of the slack that the objective leaves it may find in use."""
    decode_limit: Limit
    output_tokens: float
    """Predicted."""
    own_tbt_ms: float
    """Expected between tokens at its decode node: at the end of its prefill, if the rule looks ahead; else with all that is promised."""
    tbt_ms: float
    """Between tokens, in the load that the admission rule looks at, this request included; 0 when it looks at none."""
    idle_tbt_ms: float
    """The same with nobody else there."""

    def to_fields(self) -> dict[str, Any]:
        """The fields for JSON."""
        return {**asdict(self), "prefill_limit": self.prefill_limit.to_fields(), "decode_limit": self.decode_limit.to_fields()}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Outlook:
        prefill_limit, decode_limit = (Limit.from_fields(*fields[name]) for name in ("prefill_limit", "decode_limit"))
        return cls(**{**fields, "prefill_limit": prefill_limit, "decode_limit": decode_limit})


# ---- what every instance has to offer, and what is chosen ----


class MoveReason(StrEnum):
    """Why an attempt is to go on decoding at another node."""

    LEAVING = "leaving"
    """Its node takes no more work, and ends."""
    SLOW = "slow"
    """Its node's steps take longer than the objective."""
    ROOM = "room"
    """More has been promised of its node's slots than there is."""
    ASKED = "asked"
    """Whoever operates the cluster wants it."""


@dataclass(slots=True)
class Alternatives:
    """One request and every instance that could serve it. All that `scheduler.decide` looks at. Only the outlook is added later."""

    attempt_id: AttemptId
    policy: PolicyName
    admission: AdmissionName
    turn: int
    """Decisions made before this one."""
    num_blocks: int
    """Slots that the prompt and the first output token need."""
    expected_blocks: int
    """Slots that the prompt and its predicted output need."""
    most_blocks: int
    """Slots that it can come to need."""
    accepted: bool
    terms: Terms
    avoid: tuple[InstanceId, ...]
    ttft_slo_ms: float
    tbt_slo_ms: float
    mean_output_tokens: float
    """Of the outputs that are under way: how soon places become free."""
    rejoin_s: float
    """When to come back if there is no instance at all."""
    prefills: PrefillEstimates
    decodes: DecodeEstimates
    holders: tuple[tuple[NodeId, int], ...]
    """Some of the stores that hold a prefix of the prompt, and how many blocks of it: the longest first, then the least congested."""
    outlook: Outlook | None = None
    """Of the request where it would be placed; None when it cannot be."""
    inlines: Sequence[InlineEstimate] = ()
    """Decode nodes that could compute the prompt themselves, the soonest first."""
    concentrated_up_to: float = 0.0
    """Of the TBT objective, what the steps of instances that do both may take where outputs go to few of them, for prompts want the time of
    the others. 0: they do not."""
    others: OthersEstimates | None = None
    """For a request in idle capacity."""
    moves: MoveReason | None = None
    """Why the request, which runs, is to go on elsewhere: `avoid` has where it is."""
    idle_slowdown: float = 0.0
    """As of ConductorSettings, for such a request."""

    def drain_ms(self, share: float, tbt_ms: float) -> float:
        """When `share` of a decode node's load will be gone: in steady state all of it is replaced in the time of one mean output."""
        return share * max(self.mean_output_tokens, 1.0) * max(tbt_ms, 1e-3)

    def to_json(self) -> str:
        """The alternatives as one line. Its length, and the time to write it, grow with the instances: some 40 to 150 bytes and 1 us
        each."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["prefills"], values["decodes"] = self.prefills.plain(), self.decodes.plain()
        values["outlook"] = self.outlook.to_fields() if self.outlook is not None else None
        values["terms"] = asdict(self.terms)
        values["others"] = self.others.plain() if self.others is not None else None
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Alternatives:
        values: dict[str, Any] = json.loads(line)
        values["terms"] = Terms(**values["terms"])
        values["avoid"] = tuple(values["avoid"])
        values["prefills"] = PrefillEstimates.of_plain(values["prefills"])
        values["decodes"] = DecodeEstimates.of_plain(values["decodes"])
        values["holders"] = tuple((node_id, blocks) for node_id, blocks in values["holders"])
        values["inlines"] = tuple(InlineEstimate(*figures) for figures in values["inlines"])
        values["moves"] = MoveReason(values["moves"]) if values["moves"] is not None else None
        values["outlook"] = Outlook.from_fields(values["outlook"]) if values["outlook"] is not None else None
        values["others"] = OthersEstimates.of_plain(values["others"]) if values["others"] is not None else None
        return cls(**values)


@value_class(frozen=True, slots=True)
class Placement:
    """The pair of instances for a request: the same one twice where the decode node computes the prompt itself."""

    prefill: PrefillEstimate
    decode: DecodeEstimate

    @property
    def inlined(self) -> bool:
        return self.prefill.instance_id == self.decode.instance_id

    @property
    def waits(self) -> bool:
        """The decode node has no room now, and prefill begins when it has."""
        return self.decode.wait_ms > 0

    @property
    def wait_ms(self) -> float:
        """The time until prefill begins: for room at the decode node, while the queue at the prefill side gets shorter too."""
        queue_ms, room_ms = self.prefill.queue_ms, self.decode.wait_ms
        return queue_ms if queue_ms > room_ms else room_ms

    @property
    def own_ms(self) -> float:
        """The time to the first token with nobody else there."""
        return self.prefill.transfer_ms + self.prefill.prefill_ms

    @property
    def ttft_ms(self) -> float:
        return self.wait_ms + self.own_ms


Decision = Placement | Rejection
