from springtide.rpc import common_pb2 as _common_pb2
from springtide.rpc import conductor_pb2 as _conductor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ObserveRequest(_message.Message):
    __slots__ = ("history", "version", "bucket")
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    history: int
    version: int
    bucket: int
    def __init__(self, history: _Optional[int] = ..., version: _Optional[int] = ..., bucket: _Optional[int] = ...) -> None: ...

class ObservedPart(_message.Message):
    __slots__ = ("overview", "instances", "attempts", "stores", "prefixes", "decisions", "history")
    OVERVIEW_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    overview: Overview
    instances: InstanceTable
    attempts: AttemptTable
    stores: StoreTable
    prefixes: PrefixTable
    decisions: DecisionTable
    history: HistoryTable
    def __init__(self, overview: _Optional[_Union[Overview, _Mapping]] = ..., instances: _Optional[_Union[InstanceTable, _Mapping]] = ..., attempts: _Optional[_Union[AttemptTable, _Mapping]] = ..., stores: _Optional[_Union[StoreTable, _Mapping]] = ..., prefixes: _Optional[_Union[PrefixTable, _Mapping]] = ..., decisions: _Optional[_Union[DecisionTable, _Mapping]] = ..., history: _Optional[_Union[HistoryTable, _Mapping]] = ...) -> None: ...

class Overview(_message.Message):
    __slots__ = ("now", "status", "history", "version", "attempts_in_prefill", "ttft_slo_ms", "tbt_slo_ms", "block_tokens", "bytes_per_block", "policy", "admission")
    NOW_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_IN_PREFILL_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    now: float
    status: _conductor_pb2.ClusterStatus
    history: int
    version: int
    attempts_in_prefill: int
    ttft_slo_ms: float
    tbt_slo_ms: float
    block_tokens: int
    bytes_per_block: int
    policy: str
    admission: str
    def __init__(self, now: _Optional[float] = ..., status: _Optional[_Union[_conductor_pb2.ClusterStatus, _Mapping]] = ..., history: _Optional[int] = ..., version: _Optional[int] = ..., attempts_in_prefill: _Optional[int] = ..., ttft_slo_ms: _Optional[float] = ..., tbt_slo_ms: _Optional[float] = ..., block_tokens: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., policy: _Optional[str] = ..., admission: _Optional[str] = ...) -> None: ...

class InstanceTable(_message.Message):
    __slots__ = ("instance_ids", "node_ids", "roles", "ready", "loads", "running", "waiting", "idle", "queue_ms", "step_ms", "slots_total", "slots_available", "seconds_since_report")
    INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_REPORT_FIELD_NUMBER: _ClassVar[int]
    instance_ids: _containers.RepeatedScalarFieldContainer[str]
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    roles: _containers.RepeatedScalarFieldContainer[_common_pb2.Role]
    ready: _containers.RepeatedScalarFieldContainer[bool]
    loads: _containers.RepeatedScalarFieldContainer[float]
    running: _containers.RepeatedScalarFieldContainer[int]
    waiting: _containers.RepeatedScalarFieldContainer[int]
    idle: _containers.RepeatedScalarFieldContainer[int]
    queue_ms: _containers.RepeatedScalarFieldContainer[float]
    step_ms: _containers.RepeatedScalarFieldContainer[float]
    slots_total: _containers.RepeatedScalarFieldContainer[int]
    slots_available: _containers.RepeatedScalarFieldContainer[int]
    seconds_since_report: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, instance_ids: _Optional[_Iterable[str]] = ..., node_ids: _Optional[_Iterable[str]] = ..., roles: _Optional[_Iterable[_Union[_common_pb2.Role, str]]] = ..., ready: _Optional[_Iterable[bool]] = ..., loads: _Optional[_Iterable[float]] = ..., running: _Optional[_Iterable[int]] = ..., waiting: _Optional[_Iterable[int]] = ..., idle: _Optional[_Iterable[int]] = ..., queue_ms: _Optional[_Iterable[float]] = ..., step_ms: _Optional[_Iterable[float]] = ..., slots_total: _Optional[_Iterable[int]] = ..., slots_available: _Optional[_Iterable[int]] = ..., seconds_since_report: _Optional[_Iterable[float]] = ...) -> None: ...

class AttemptTable(_message.Message):
    __slots__ = ("attempts",)
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedCompositeFieldContainer[ObservedAttempt]
    def __init__(self, attempts: _Optional[_Iterable[_Union[ObservedAttempt, _Mapping]]] = ...) -> None: ...

class ObservedAttempt(_message.Message):
    __slots__ = ("attempt_id", "request_id", "tenant", "gateway_id", "prefill_id", "decode_id", "phase", "num_tokens", "idle", "placed_at", "first_token_at", "prediction")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    PLACED_AT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_AT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    request_id: str
    tenant: str
    gateway_id: str
    prefill_id: str
    decode_id: str
    phase: _conductor_pb2.Phase
    num_tokens: int
    idle: bool
    placed_at: float
    first_token_at: float
    prediction: _conductor_pb2.Prediction
    def __init__(self, attempt_id: _Optional[str] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., gateway_id: _Optional[str] = ..., prefill_id: _Optional[str] = ..., decode_id: _Optional[str] = ..., phase: _Optional[_Union[_conductor_pb2.Phase, str]] = ..., num_tokens: _Optional[int] = ..., idle: _Optional[bool] = ..., placed_at: _Optional[float] = ..., first_token_at: _Optional[float] = ..., prediction: _Optional[_Union[_conductor_pb2.Prediction, _Mapping]] = ...) -> None: ...

class StoreTable(_message.Message):
    __slots__ = ("node_ids", "dram_blocks", "ssd_blocks")
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SSD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    dram_blocks: _containers.RepeatedScalarFieldContainer[int]
    ssd_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, node_ids: _Optional[_Iterable[str]] = ..., dram_blocks: _Optional[_Iterable[int]] = ..., ssd_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefixTable(_message.Message):
    __slots__ = ("prefixes",)
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[ObservedPrefix]
    def __init__(self, prefixes: _Optional[_Iterable[_Union[ObservedPrefix, _Mapping]]] = ...) -> None: ...

class ObservedPrefix(_message.Message):
    __slots__ = ("key", "tenant", "blocks", "asks", "num_holders", "num_whole", "node_ids", "held", "held_in_dram")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOLDERS_FIELD_NUMBER: _ClassVar[int]
    NUM_WHOLE_FIELD_NUMBER: _ClassVar[int]
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HELD_IN_DRAM_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    tenant: str
    blocks: int
    asks: float
    num_holders: int
    num_whole: int
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    held: _containers.RepeatedScalarFieldContainer[int]
    held_in_dram: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[bytes] = ..., tenant: _Optional[str] = ..., blocks: _Optional[int] = ..., asks: _Optional[float] = ..., num_holders: _Optional[int] = ..., num_whole: _Optional[int] = ..., node_ids: _Optional[_Iterable[str]] = ..., held: _Optional[_Iterable[int]] = ..., held_in_dram: _Optional[_Iterable[int]] = ...) -> None: ...

class DecisionTable(_message.Message):
    __slots__ = ("decisions",)
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[ObservedDecision]
    def __init__(self, decisions: _Optional[_Iterable[_Union[ObservedDecision, _Mapping]]] = ...) -> None: ...

class ObservedDecision(_message.Message):
    __slots__ = ("attempt_id", "request_id", "tenant", "gateway_id", "decided_at", "num_tokens", "idle", "prediction", "prefill_id", "decode_id", "branch", "local_blocks", "source_id", "source_blocks", "waits", "reason", "message", "retry_after_s", "phase", "first_token_at", "ended_at", "ttft_ms", "queue_ms", "fetch_ms", "prefill_ms", "cached_tokens", "output_tokens", "tbt_ms")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    DECIDED_AT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_ID_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    LOCAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    FETCH_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TBT_MS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    request_id: str
    tenant: str
    gateway_id: str
    decided_at: float
    num_tokens: int
    idle: bool
    prediction: _conductor_pb2.Prediction
    prefill_id: str
    decode_id: str
    branch: str
    local_blocks: int
    source_id: str
    source_blocks: int
    waits: bool
    reason: _conductor_pb2.Reason
    message: str
    retry_after_s: float
    phase: _conductor_pb2.Phase
    first_token_at: float
    ended_at: float
    ttft_ms: float
    queue_ms: float
    fetch_ms: float
    prefill_ms: float
    cached_tokens: int
    output_tokens: int
    tbt_ms: float
    def __init__(self, attempt_id: _Optional[str] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., gateway_id: _Optional[str] = ..., decided_at: _Optional[float] = ..., num_tokens: _Optional[int] = ..., idle: _Optional[bool] = ..., prediction: _Optional[_Union[_conductor_pb2.Prediction, _Mapping]] = ..., prefill_id: _Optional[str] = ..., decode_id: _Optional[str] = ..., branch: _Optional[str] = ..., local_blocks: _Optional[int] = ..., source_id: _Optional[str] = ..., source_blocks: _Optional[int] = ..., waits: _Optional[bool] = ..., reason: _Optional[_Union[_conductor_pb2.Reason, str]] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., phase: _Optional[_Union[_conductor_pb2.Phase, str]] = ..., first_token_at: _Optional[float] = ..., ended_at: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., fetch_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., tbt_ms: _Optional[float] = ...) -> None: ...

class HistoryTable(_message.Message):
    __slots__ = ("buckets",)
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedCompositeFieldContainer[TimeBucket]
    def __init__(self, buckets: _Optional[_Iterable[_Union[TimeBucket, _Mapping]]] = ...) -> None: ...

class TimeBucket(_message.Message):
    __slots__ = ("number", "placed", "refused", "finished", "failed", "prompt_tokens", "cached_tokens", "output_tokens", "first_tokens", "in_time", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "tbt_p50_ms", "tbt_p90_ms", "tbt_p99_ms", "prefill_load", "decode_load", "attempts")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IN_TIME_FIELD_NUMBER: _ClassVar[int]
    TTFT_P50_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_P90_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_P99_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_P50_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_P90_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_P99_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOAD_FIELD_NUMBER: _ClassVar[int]
    DECODE_LOAD_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    number: int
    placed: int
    refused: int
    finished: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_tokens: int
    in_time: int
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tbt_p50_ms: float
    tbt_p90_ms: float
    tbt_p99_ms: float
    prefill_load: float
    decode_load: float
    attempts: int
    def __init__(self, number: _Optional[int] = ..., placed: _Optional[int] = ..., refused: _Optional[int] = ..., finished: _Optional[int] = ..., failed: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., first_tokens: _Optional[int] = ..., in_time: _Optional[int] = ..., ttft_p50_ms: _Optional[float] = ..., ttft_p90_ms: _Optional[float] = ..., ttft_p99_ms: _Optional[float] = ..., tbt_p50_ms: _Optional[float] = ..., tbt_p90_ms: _Optional[float] = ..., tbt_p99_ms: _Optional[float] = ..., prefill_load: _Optional[float] = ..., decode_load: _Optional[float] = ..., attempts: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("decisions", "now")
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[ExplainedDecision]
    now: float
    def __init__(self, decisions: _Optional[_Iterable[_Union[ExplainedDecision, _Mapping]]] = ..., now: _Optional[float] = ...) -> None: ...

class ExplainedDecision(_message.Message):
    __slots__ = ("decision", "ttft_slo_ms", "tbt_slo_ms", "policy", "admission", "num_prefills", "num_decodes", "prefills", "decodes", "inlines")
    DECISION_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODES_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_FIELD_NUMBER: _ClassVar[int]
    DECODES_FIELD_NUMBER: _ClassVar[int]
    INLINES_FIELD_NUMBER: _ClassVar[int]
    decision: ObservedDecision
    ttft_slo_ms: float
    tbt_slo_ms: float
    policy: str
    admission: str
    num_prefills: int
    num_decodes: int
    prefills: _containers.RepeatedCompositeFieldContainer[_conductor_pb2.Estimate]
    decodes: _containers.RepeatedCompositeFieldContainer[_conductor_pb2.Estimate]
    inlines: _containers.RepeatedCompositeFieldContainer[_conductor_pb2.Estimate]
    def __init__(self, decision: _Optional[_Union[ObservedDecision, _Mapping]] = ..., ttft_slo_ms: _Optional[float] = ..., tbt_slo_ms: _Optional[float] = ..., policy: _Optional[str] = ..., admission: _Optional[str] = ..., num_prefills: _Optional[int] = ..., num_decodes: _Optional[int] = ..., prefills: _Optional[_Iterable[_Union[_conductor_pb2.Estimate, _Mapping]]] = ..., decodes: _Optional[_Iterable[_Union[_conductor_pb2.Estimate, _Mapping]]] = ..., inlines: _Optional[_Iterable[_Union[_conductor_pb2.Estimate, _Mapping]]] = ...) -> None: ...
