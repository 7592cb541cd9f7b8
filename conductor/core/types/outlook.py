"""What admission judges a placed request by: plain figures, so that a decision can be replayed from its log line."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class LimitedBy(Enum):
    OBJECTIVES = "objectives"
    PRIORITY = "priority"
    TENANT = "tenant"
    SIZE = "size"


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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
