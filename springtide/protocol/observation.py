"""Words of what people are shown of the cluster: its state in parts, and why a request went where it went. Times without another word to
them are seconds on the Conductor's clock, of which `Overview.now` is the present."""

from __future__ import annotations

from springtide.ids import AttemptId, BlockKey, GatewayId, InstanceId, NodeId
from springtide.protocol.attempts import Phase, Prediction
from springtide.protocol.instances import Role
from springtide.protocol.scheduling import Estimate, Reason
from springtide.protocol.status import ClusterStatus
from springtide.values import value_class


@value_class(frozen=True, slots=True)
class Observe:
    """A question for the state of the cluster, by who has so much already of this history; 0 for nothing."""

    history: int = 0
    version: int = 0
    bucket: int = 0
    """Number of the newest TimeBucket."""


@value_class(frozen=True, slots=True)
class Overview:
    """The cluster as a whole."""

    now: float
    status: ClusterStatus
    """Without instances."""
    history: int
    """Which one: another after a restart or a change of leader."""
    version: int
    """Of the decisions in it."""
    attempts_in_prefill: int
    ttft_slo_ms: float
    tbt_slo_ms: float
    block_tokens: int
    bytes_per_block: int
    policy: str
    admission: str


@value_class(frozen=True, slots=True)
class InstanceTable:
    """Some of the instances, a column a figure."""

    instance_ids: tuple[InstanceId, ...]
    node_ids: tuple[NodeId, ...]
    roles: tuple[Role, ...]
    ready: tuple[bool, ...]
    loads: tuple[float, ...]
    """1 being as much as the objectives allow."""
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    idle: tuple[int, ...]
    """Attempts in idle capacity, which are not among those above."""
    queue_ms: tuple[float, ...]
    step_ms: tuple[float, ...]
    slots_total: tuple[int, ...]
    slots_available: tuple[int, ...]
    seconds_since_report: tuple[float, ...]


@value_class(frozen=True, slots=True)
class ObservedAttempt:
    """An attempt that runs."""

    attempt_id: AttemptId
    request_id: str
    """Empty: another Conductor has placed it."""
    tenant: str
    gateway_id: GatewayId
    prefill_id: InstanceId
    decode_id: InstanceId
    phase: Phase
    num_tokens: int
    idle: bool
    placed_at: float
    first_token_at: float
    """0: it is not out."""
    prediction: Prediction | None


@value_class(frozen=True, slots=True)
class AttemptTable:
    """Some of the attempts that run."""

    attempts: tuple[ObservedAttempt, ...]


@value_class(frozen=True, slots=True)
class StoreTable:
    """Some of the stores, a column a figure."""

    node_ids: tuple[NodeId, ...]
    dram_blocks: tuple[int, ...]
    ssd_blocks: tuple[int, ...]


@value_class(frozen=True, slots=True)
class ObservedPrefix:
    """A prefix that is asked for again and again, and who holds it."""

    key: BlockKey
    """Of its last block."""
    tenant: str
    blocks: int
    asks: float
    """In the last minute or so."""
    num_holders: int
    """Stores that hold some of it; not all of them are named."""
    num_whole: int
    """Those that hold all of it."""
    node_ids: tuple[NodeId, ...]
    held: tuple[int, ...]
    """How many of its blocks each of them holds."""
    held_in_dram: tuple[int, ...]


@value_class(frozen=True, slots=True)
class PrefixTable:
    """Some of the popular prefixes."""

    prefixes: tuple[ObservedPrefix, ...]


@value_class(frozen=True, slots=True)
class ObservedDecision:
    """What was decided of an attempt, and what came of it. Amounts that are not known (yet) are 0."""

    attempt_id: AttemptId
    request_id: str
    tenant: str
    gateway_id: GatewayId
    decided_at: float
    num_tokens: int
    idle: bool
    prediction: Prediction | None = None
    """None: it was refused."""
    prefill_id: str = ""
    """The decode instance itself where it computes the prompt."""
    decode_id: str = ""
    branch: str = ""
    """Of Algorithm 1."""
    local_blocks: int = 0
    source_id: str = ""
    """The store that more is fetched from; empty: none."""
    source_blocks: int = 0
    waits: bool = False
    reason: Reason | None = None
    """None: it was placed."""
    message: str = ""
    retry_after_s: float = 0.0
    phase: Phase | None = None
    """None: it was refused."""
    first_token_at: float = 0.0
    ended_at: float = 0.0
    ttft_ms: float = 0.0
    queue_ms: float = 0.0
    fetch_ms: float = 0.0
    prefill_ms: float = 0.0
    cached_tokens: int = 0
    output_tokens: int = 0
    tbt_ms: float = 0.0


@value_class(frozen=True, slots=True)
class DecisionTable:
    """Some of the latest decisions."""

    decisions: tuple[ObservedDecision, ...]


BUCKET_S = 10.0
MOST_BUCKETS = 360
"""That are remembered: an hour."""


@value_class(frozen=True, slots=True)
class TimeBucket:
    """What came to pass in `BUCKET_S` seconds."""

    number: int
    """It begins at `BUCKET_S` times that."""
    placed: int
    refused: int
    finished: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_tokens: int
    in_time: int
    """First tokens within the objective."""
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tbt_p50_ms: float
    tbt_p90_ms: float
    tbt_p99_ms: float
    prefill_load: float
    decode_load: float
    attempts: int


@value_class(frozen=True, slots=True)
class HistoryTable:
    """Some of the last hour."""

    buckets: tuple[TimeBucket, ...]


ObservedPart = Overview | InstanceTable | AttemptTable | StoreTable | PrefixTable | DecisionTable | HistoryTable


@value_class(frozen=True, slots=True)
class Explain:
    """A question for the decisions about a request, one of its choices, or an attempt."""

    id: str


@value_class(frozen=True, slots=True)
class ExplainedDecision:
    """A decision with what it was made from."""

    decision: ObservedDecision
    ttft_slo_ms: float
    tbt_slo_ms: float
    policy: str
    admission: str
    num_prefills: int
    """That could take it."""
    num_decodes: int
    prefills: tuple[Estimate, ...]
    """Some of them: the one that was chosen, then the best of the others. Empty: they were not kept."""
    decodes: tuple[Estimate, ...]
    inlines: tuple[Estimate, ...]


@value_class(frozen=True, slots=True)
class Explanation:
    """All that is known of one request, the earliest attempt first."""

    decisions: tuple[ExplainedDecision, ...]
    now: float
