from springtide.rpc import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_TTFT: _ClassVar[Reason]
    REASON_TBT: _ClassVar[Reason]
    REASON_NO_PREFILL: _ClassVar[Reason]
    REASON_NO_DECODE: _ClassVar[Reason]
    REASON_TOO_LARGE: _ClassVar[Reason]
    REASON_DEADLINE: _ClassVar[Reason]
    REASON_PRIORITY: _ClassVar[Reason]
    REASON_TENANT_SHARE: _ClassVar[Reason]
    REASON_SIZE: _ClassVar[Reason]
    REASON_NOT_IDLE: _ClassVar[Reason]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_PREFILL: _ClassVar[Phase]
    PHASE_DECODE: _ClassVar[Phase]
    PHASE_FINISHED: _ClassVar[Phase]
    PHASE_FAILED: _ClassVar[Phase]
    PHASE_MOVED: _ClassVar[Phase]
REASON_UNSPECIFIED: Reason
REASON_TTFT: Reason
REASON_TBT: Reason
REASON_NO_PREFILL: Reason
REASON_NO_DECODE: Reason
REASON_TOO_LARGE: Reason
REASON_DEADLINE: Reason
REASON_PRIORITY: Reason
REASON_TENANT_SHARE: Reason
REASON_SIZE: Reason
REASON_NOT_IDLE: Reason
PHASE_UNSPECIFIED: Phase
PHASE_PREFILL: Phase
PHASE_DECODE: Phase
PHASE_FINISHED: Phase
PHASE_FAILED: Phase
PHASE_MOVED: Phase

class ScheduleQuestion(_message.Message):
    __slots__ = ("number", "request", "advance", "renew")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ADVANCE_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    number: int
    request: ScheduleRequest
    advance: AdvanceRequest
    renew: RenewRequest
    def __init__(self, number: _Optional[int] = ..., request: _Optional[_Union[ScheduleRequest, _Mapping]] = ..., advance: _Optional[_Union[AdvanceRequest, _Mapping]] = ..., renew: _Optional[_Union[RenewRequest, _Mapping]] = ...) -> None: ...

class ScheduleAnswer(_message.Message):
    __slots__ = ("number", "reply", "refusal", "advanced", "renewed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ADVANCED_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    number: int
    reply: ScheduleReply
    refusal: str
    advanced: AdvanceReply
    renewed: RenewReply
    def __init__(self, number: _Optional[int] = ..., reply: _Optional[_Union[ScheduleReply, _Mapping]] = ..., refusal: _Optional[str] = ..., advanced: _Optional[_Union[AdvanceReply, _Mapping]] = ..., renewed: _Optional[_Union[RenewReply, _Mapping]] = ...) -> None: ...

class GetScheduleAddressRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScheduleAddress(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class ScheduleRequest(_message.Message):
    __slots__ = ("attempt_id", "request_id", "gateway_id", "block_keys", "num_tokens", "max_new_tokens", "min_new_tokens", "accepted", "avoid", "ttft_slo_ms", "tbt_slo_ms", "tenant", "terms", "debug", "epoch", "whole_prompt", "successor_of", "output_tokens")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    AVOID_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    DEBUG_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WHOLE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SUCCESSOR_OF_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    request_id: str
    gateway_id: str
    block_keys: bytes
    num_tokens: int
    max_new_tokens: int
    min_new_tokens: int
    accepted: bool
    avoid: _containers.RepeatedScalarFieldContainer[str]
    ttft_slo_ms: float
    tbt_slo_ms: float
    tenant: str
    terms: _common_pb2.Terms
    debug: bool
    epoch: int
    whole_prompt: bool
    successor_of: str
    output_tokens: int
    def __init__(self, attempt_id: _Optional[str] = ..., request_id: _Optional[str] = ..., gateway_id: _Optional[str] = ..., block_keys: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., accepted: _Optional[bool] = ..., avoid: _Optional[_Iterable[str]] = ..., ttft_slo_ms: _Optional[float] = ..., tbt_slo_ms: _Optional[float] = ..., tenant: _Optional[str] = ..., terms: _Optional[_Union[_common_pb2.Terms, _Mapping]] = ..., debug: _Optional[bool] = ..., epoch: _Optional[int] = ..., whole_prompt: _Optional[bool] = ..., successor_of: _Optional[str] = ..., output_tokens: _Optional[int] = ...) -> None: ...

class ScheduleReply(_message.Message):
    __slots__ = ("assignment", "rejection", "not_leader", "estimates", "epoch")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    NOT_LEADER_FIELD_NUMBER: _ClassVar[int]
    ESTIMATES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    rejection: Rejection
    not_leader: NotLeader
    estimates: _containers.RepeatedCompositeFieldContainer[Estimate]
    epoch: int
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., rejection: _Optional[_Union[Rejection, _Mapping]] = ..., not_leader: _Optional[_Union[NotLeader, _Mapping]] = ..., estimates: _Optional[_Iterable[_Union[Estimate, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class NotLeader(_message.Message):
    __slots__ = ("leader_address", "epoch")
    LEADER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    leader_address: str
    epoch: int
    def __init__(self, leader_address: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class InstanceRef(_message.Message):
    __slots__ = ("instance_id", "role", "address", "node_id", "store_address")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    role: _common_pb2.Role
    address: str
    node_id: str
    store_address: str
    def __init__(self, instance_id: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., address: _Optional[str] = ..., node_id: _Optional[str] = ..., store_address: _Optional[str] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("attempt_id", "prefill", "decode", "local_blocks", "sources", "predicted_ttft_ms", "predicted_tbt_ms", "ttft_slo_ms", "tbt_slo_ms", "prediction", "waits", "refusable")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TBT_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    REFUSABLE_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    prefill: InstanceRef
    decode: InstanceRef
    local_blocks: int
    sources: _containers.RepeatedCompositeFieldContainer[_common_pb2.PrefixSource]
    predicted_ttft_ms: float
    predicted_tbt_ms: float
    ttft_slo_ms: float
    tbt_slo_ms: float
    prediction: Prediction
    waits: bool
    refusable: bool
    def __init__(self, attempt_id: _Optional[str] = ..., prefill: _Optional[_Union[InstanceRef, _Mapping]] = ..., decode: _Optional[_Union[InstanceRef, _Mapping]] = ..., local_blocks: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[_common_pb2.PrefixSource, _Mapping]]] = ..., predicted_ttft_ms: _Optional[float] = ..., predicted_tbt_ms: _Optional[float] = ..., ttft_slo_ms: _Optional[float] = ..., tbt_slo_ms: _Optional[float] = ..., prediction: _Optional[_Union[Prediction, _Mapping]] = ..., waits: _Optional[bool] = ..., refusable: _Optional[bool] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("ttft_ms", "queue_ms", "transfer_ms", "prefill_ms", "tbt_ms", "output_tokens", "ahead_ms")
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_MS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_MS_FIELD_NUMBER: _ClassVar[int]
    ttft_ms: float
    queue_ms: float
    transfer_ms: float
    prefill_ms: float
    tbt_ms: float
    output_tokens: float
    ahead_ms: float
    def __init__(self, ttft_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., tbt_ms: _Optional[float] = ..., output_tokens: _Optional[float] = ..., ahead_ms: _Optional[float] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("reason", "message", "retry_after_s")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    reason: Reason
    message: str
    retry_after_s: float
    def __init__(self, reason: _Optional[_Union[Reason, str]] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Estimate(_message.Message):
    __slots__ = ("instance_id", "prefix_blocks", "queue_ms", "transfer_ms", "prefill_ms", "ttft_ms", "tbt_ms", "note")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_MS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    prefix_blocks: int
    queue_ms: float
    transfer_ms: float
    prefill_ms: float
    ttft_ms: float
    tbt_ms: float
    note: str
    def __init__(self, instance_id: _Optional[str] = ..., prefix_blocks: _Optional[int] = ..., queue_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., tbt_ms: _Optional[float] = ..., note: _Optional[str] = ...) -> None: ...

class AdvanceRequest(_message.Message):
    __slots__ = ("gateway_id", "reports")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    reports: _containers.RepeatedCompositeFieldContainer[AttemptReport]
    def __init__(self, gateway_id: _Optional[str] = ..., reports: _Optional[_Iterable[_Union[AttemptReport, _Mapping]]] = ...) -> None: ...

class AttemptReport(_message.Message):
    __slots__ = ("progress", "placed")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    progress: Progress
    placed: LiveAttempt
    def __init__(self, progress: _Optional[_Union[Progress, _Mapping]] = ..., placed: _Optional[_Union[LiveAttempt, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("attempt_id", "phase", "cached_tokens", "output_tokens", "ttft_ms", "remote_tokens", "fetch_ms", "queue_ms", "compute_ms")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCH_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    phase: Phase
    cached_tokens: int
    output_tokens: int
    ttft_ms: float
    remote_tokens: int
    fetch_ms: float
    queue_ms: float
    compute_ms: float
    def __init__(self, attempt_id: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., ttft_ms: _Optional[float] = ..., remote_tokens: _Optional[int] = ..., fetch_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ...) -> None: ...

class AdvanceReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LiveAttempt(_message.Message):
    __slots__ = ("attempt_id", "prefill_id", "decode_id", "phase", "num_tokens", "cached_tokens", "tenant", "max_new_tokens", "prediction", "idle", "output_tokens", "successor_of")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUCCESSOR_OF_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    prefill_id: str
    decode_id: str
    phase: Phase
    num_tokens: int
    cached_tokens: int
    tenant: str
    max_new_tokens: int
    prediction: Prediction
    idle: bool
    output_tokens: int
    successor_of: str
    def __init__(self, attempt_id: _Optional[str] = ..., prefill_id: _Optional[str] = ..., decode_id: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ..., num_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., tenant: _Optional[str] = ..., max_new_tokens: _Optional[int] = ..., prediction: _Optional[_Union[Prediction, _Mapping]] = ..., idle: _Optional[bool] = ..., output_tokens: _Optional[int] = ..., successor_of: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("gateway_id", "attempts")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    attempts: _containers.RepeatedCompositeFieldContainer[LiveAttempt]
    def __init__(self, gateway_id: _Optional[str] = ..., attempts: _Optional[_Iterable[_Union[LiveAttempt, _Mapping]]] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchOrdersRequest(_message.Message):
    __slots__ = ("gateway_id",)
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    def __init__(self, gateway_id: _Optional[str] = ...) -> None: ...

class GatewayOrders(_message.Message):
    __slots__ = ("hung", "moves")
    HUNG_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    hung: _containers.RepeatedCompositeFieldContainer[InstanceRef]
    moves: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, hung: _Optional[_Iterable[_Union[InstanceRef, _Mapping]]] = ..., moves: _Optional[_Iterable[str]] = ...) -> None: ...

class MoveAttemptsRequest(_message.Message):
    __slots__ = ("instance_id", "most")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    most: int
    def __init__(self, instance_id: _Optional[str] = ..., most: _Optional[int] = ...) -> None: ...

class MoveAttemptsReply(_message.Message):
    __slots__ = ("attempts",)
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    attempts: int
    def __init__(self, attempts: _Optional[int] = ...) -> None: ...

class GetClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InstanceStatus(_message.Message):
    __slots__ = ("instance", "ready", "incarnation", "running", "waiting", "queue_ms", "step_ms", "slots_total", "slots_available", "cached_blocks", "seconds_since_report", "idle")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_REPORT_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    instance: InstanceRef
    ready: bool
    incarnation: int
    running: int
    waiting: int
    queue_ms: float
    step_ms: float
    slots_total: int
    slots_available: int
    cached_blocks: int
    seconds_since_report: float
    idle: int
    def __init__(self, instance: _Optional[_Union[InstanceRef, _Mapping]] = ..., ready: _Optional[bool] = ..., incarnation: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., queue_ms: _Optional[float] = ..., step_ms: _Optional[float] = ..., slots_total: _Optional[int] = ..., slots_available: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., seconds_since_report: _Optional[float] = ..., idle: _Optional[int] = ...) -> None: ...

class PredictionErrors(_message.Message):
    __slots__ = ("quantity", "count", "median_error", "p90_error", "bias")
    QUANTITY_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_ERROR_FIELD_NUMBER: _ClassVar[int]
    P90_ERROR_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    quantity: str
    count: int
    median_error: float
    p90_error: float
    bias: float
    def __init__(self, quantity: _Optional[str] = ..., count: _Optional[int] = ..., median_error: _Optional[float] = ..., p90_error: _Optional[float] = ..., bias: _Optional[float] = ...) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("model", "instances", "requests_scheduled", "requests_rejected", "prompt_tokens", "cached_tokens", "attempts_live", "index_blocks", "rejections_by_reason", "ready", "leads", "epoch", "leader_address", "predictions", "prefill_load", "decode_load", "prefill_work", "decode_work", "wanted_prefill", "switching_instance_id")
    class RejectionsByReasonEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_REJECTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_LIVE_FIELD_NUMBER: _ClassVar[int]
    INDEX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_BY_REASON_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEADER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOAD_FIELD_NUMBER: _ClassVar[int]
    DECODE_LOAD_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORK_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORK_FIELD_NUMBER: _ClassVar[int]
    WANTED_PREFILL_FIELD_NUMBER: _ClassVar[int]
    SWITCHING_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    instances: _containers.RepeatedCompositeFieldContainer[InstanceStatus]
    requests_scheduled: int
    requests_rejected: int
    prompt_tokens: int
    cached_tokens: int
    attempts_live: int
    index_blocks: int
    rejections_by_reason: _containers.ScalarMap[str, int]
    ready: bool
    leads: bool
    epoch: int
    leader_address: str
    predictions: _containers.RepeatedCompositeFieldContainer[PredictionErrors]
    prefill_load: float
    decode_load: float
    prefill_work: float
    decode_work: float
    wanted_prefill: int
    switching_instance_id: str
    def __init__(self, model: _Optional[str] = ..., instances: _Optional[_Iterable[_Union[InstanceStatus, _Mapping]]] = ..., requests_scheduled: _Optional[int] = ..., requests_rejected: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., attempts_live: _Optional[int] = ..., index_blocks: _Optional[int] = ..., rejections_by_reason: _Optional[_Mapping[str, int]] = ..., ready: _Optional[bool] = ..., leads: _Optional[bool] = ..., epoch: _Optional[int] = ..., leader_address: _Optional[str] = ..., predictions: _Optional[_Iterable[_Union[PredictionErrors, _Mapping]]] = ..., prefill_load: _Optional[float] = ..., decode_load: _Optional[float] = ..., prefill_work: _Optional[float] = ..., decode_work: _Optional[float] = ..., wanted_prefill: _Optional[int] = ..., switching_instance_id: _Optional[str] = ...) -> None: ...
