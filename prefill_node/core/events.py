"""What happens to a prefill group (beside what `node_runtime` tells either kind of engine)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from node_runtime import storage
from node_runtime.events import Abort, SessionEnded, Tick
from node_runtime.requests import Request
from springtide.rpc import common_pb2
from springtide.sampling import SampledToken


@dataclass(frozen=True, slots=True)
class Start:
    """A gateway's session wants the attempt's first token, and its KV at the decode node's store."""

    session: int
    request: Request
    decode_store_address: str
    decode_store_node_id: str
    ttft_budget_ms: float
    """Allowed from now on; 0 for none."""
    sources: tuple[common_pb2.PrefixSource, ...] = ()
    """Where more of the prefix lies than here, best first."""


@dataclass(frozen=True, slots=True)
class PassDone:
    """`sampled[i]` belongs to row i; None for rows that do not end their prompt."""

    pass_id: int
    sampled: Sequence[SampledToken | None]
    elapsed_ms: float


@dataclass(frozen=True, slots=True)
class PassInterrupted:
    """The prefix that the pass waited for does not arrive: truncated, which a FetchTruncated tells, or overdue."""

    pass_id: int
    overdue: bool


@dataclass(frozen=True, slots=True)
class PassFailed:
    pass_id: int
    message: str


Event = Start | Abort | SessionEnded | PassDone | PassInterrupted | PassFailed | Tick | storage.StoreUp | storage.StoreLost | storage.Notice
