from springtide.rpc import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SwitchRoleRequest(_message.Message):
    __slots__ = ("to", "drain_s")
    TO_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    to: _common_pb2.Role
    drain_s: float
    def __init__(self, to: _Optional[_Union[_common_pb2.Role, str]] = ..., drain_s: _Optional[float] = ...) -> None: ...

class SwitchRoleReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillCommand(_message.Message):
    __slots__ = ("start", "abort")
    START_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    start: PrefillStart
    abort: AbortAttempt
    def __init__(self, start: _Optional[_Union[PrefillStart, _Mapping]] = ..., abort: _Optional[_Union[AbortAttempt, _Mapping]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("attempt_id", "request_id", "tenant", "token_ids", "num_prompt_tokens", "params", "namespace", "keys", "block_tokens", "age_s", "traceparent", "idle", "traced")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    TRACED_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    request_id: str
    tenant: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    params: _common_pb2.SamplingParams
    namespace: bytes
    keys: bytes
    block_tokens: int
    age_s: float
    traceparent: str
    idle: bool
    traced: bool
    def __init__(self, attempt_id: _Optional[str] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., block_tokens: _Optional[int] = ..., age_s: _Optional[float] = ..., traceparent: _Optional[str] = ..., idle: _Optional[bool] = ..., traced: _Optional[bool] = ...) -> None: ...

class PrefillStart(_message.Message):
    __slots__ = ("request", "decode_store_address", "decode_store_node_id", "ttft_budget_ms", "sources")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DECODE_STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STORE_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TTFT_BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    request: Request
    decode_store_address: str
    decode_store_node_id: str
    ttft_budget_ms: float
    sources: _containers.RepeatedCompositeFieldContainer[_common_pb2.PrefixSource]
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., decode_store_address: _Optional[str] = ..., decode_store_node_id: _Optional[str] = ..., ttft_budget_ms: _Optional[float] = ..., sources: _Optional[_Iterable[_Union[_common_pb2.PrefixSource, _Mapping]]] = ...) -> None: ...

class AbortAttempt(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    def __init__(self, attempt_id: _Optional[str] = ...) -> None: ...

class PrefillUpdate(_message.Message):
    __slots__ = ("done", "failed", "signs", "handed_over")
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SIGNS_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    done: PrefillDone
    failed: _common_pb2.AttemptFailed
    signs: AttemptSigns
    handed_over: _common_pb2.HandedOver
    def __init__(self, done: _Optional[_Union[PrefillDone, _Mapping]] = ..., failed: _Optional[_Union[_common_pb2.AttemptFailed, _Mapping]] = ..., signs: _Optional[_Union[AttemptSigns, _Mapping]] = ..., handed_over: _Optional[_Union[_common_pb2.HandedOver, _Mapping]] = ...) -> None: ...

class AttemptSigns(_message.Message):
    __slots__ = ("signs",)
    SIGNS_FIELD_NUMBER: _ClassVar[int]
    signs: _containers.RepeatedCompositeFieldContainer[AttemptSign]
    def __init__(self, signs: _Optional[_Iterable[_Union[AttemptSign, _Mapping]]] = ...) -> None: ...

class AttemptSign(_message.Message):
    __slots__ = ("attempt_id", "computed_tokens", "waiting")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    computed_tokens: int
    waiting: bool
    def __init__(self, attempt_id: _Optional[str] = ..., computed_tokens: _Optional[int] = ..., waiting: _Optional[bool] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("output", "cached_tokens", "remote_tokens", "queue_ms", "compute_ms", "fetch_ms", "fetch_wait_ms", "prompt_logprobs", "times", "most_foretold")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    FETCH_MS_FIELD_NUMBER: _ClassVar[int]
    FETCH_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    MOST_FORETOLD_FIELD_NUMBER: _ClassVar[int]
    output: _common_pb2.TokenOutput
    cached_tokens: int
    remote_tokens: int
    queue_ms: float
    compute_ms: float
    fetch_ms: float
    fetch_wait_ms: float
    prompt_logprobs: _common_pb2.PromptLogprobs
    times: PrefillTimes
    most_foretold: int
    def __init__(self, output: _Optional[_Union[_common_pb2.TokenOutput, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., remote_tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., fetch_ms: _Optional[float] = ..., fetch_wait_ms: _Optional[float] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ..., times: _Optional[_Union[PrefillTimes, _Mapping]] = ..., most_foretold: _Optional[int] = ...) -> None: ...

class PrefillTimes(_message.Message):
    __slots__ = ("age_ms", "slots_ms", "fetch_at_ms", "fetch_bytes", "passes", "passes_left_out")
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_MS_FIELD_NUMBER: _ClassVar[int]
    FETCH_AT_MS_FIELD_NUMBER: _ClassVar[int]
    FETCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    PASSES_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    age_ms: float
    slots_ms: float
    fetch_at_ms: float
    fetch_bytes: int
    passes: _containers.RepeatedCompositeFieldContainer[PassTimes]
    passes_left_out: int
    def __init__(self, age_ms: _Optional[float] = ..., slots_ms: _Optional[float] = ..., fetch_at_ms: _Optional[float] = ..., fetch_bytes: _Optional[int] = ..., passes: _Optional[_Iterable[_Union[PassTimes, _Mapping]]] = ..., passes_left_out: _Optional[int] = ...) -> None: ...

class PassTimes(_message.Message):
    __slots__ = ("at_ms", "took_ms", "start", "num_tokens", "others", "waited_ms", "stages")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    TOOK_MS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    at_ms: float
    took_ms: float
    start: int
    num_tokens: int
    others: int
    waited_ms: float
    stages: _containers.RepeatedCompositeFieldContainer[StageTimes]
    def __init__(self, at_ms: _Optional[float] = ..., took_ms: _Optional[float] = ..., start: _Optional[int] = ..., num_tokens: _Optional[int] = ..., others: _Optional[int] = ..., waited_ms: _Optional[float] = ..., stages: _Optional[_Iterable[_Union[StageTimes, _Mapping]]] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("end_ms", "busy_ms", "waited_ms")
    END_MS_FIELD_NUMBER: _ClassVar[int]
    BUSY_MS_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    end_ms: float
    busy_ms: float
    waited_ms: float
    def __init__(self, end_ms: _Optional[float] = ..., busy_ms: _Optional[float] = ..., waited_ms: _Optional[float] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("start", "abort", "foretell")
    START_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    FORETELL_FIELD_NUMBER: _ClassVar[int]
    start: DecodeStart
    abort: AbortAttempt
    foretell: ForetellTokens
    def __init__(self, start: _Optional[_Union[DecodeStart, _Mapping]] = ..., abort: _Optional[_Union[AbortAttempt, _Mapping]] = ..., foretell: _Optional[_Union[ForetellTokens, _Mapping]] = ...) -> None: ...

class ForetellTokens(_message.Message):
    __slots__ = ("attempt_id", "position", "token_ids")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, attempt_id: _Optional[str] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DecodeStart(_message.Message):
    __slots__ = ("request", "tbt_slo_ms", "inlined", "waits", "refusable", "expected_tokens", "ttft_budget_ms", "sources")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TBT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    INLINED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    REFUSABLE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    request: Request
    tbt_slo_ms: float
    inlined: bool
    waits: bool
    refusable: bool
    expected_tokens: float
    ttft_budget_ms: float
    sources: _containers.RepeatedCompositeFieldContainer[_common_pb2.PrefixSource]
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., tbt_slo_ms: _Optional[float] = ..., inlined: _Optional[bool] = ..., waits: _Optional[bool] = ..., refusable: _Optional[bool] = ..., expected_tokens: _Optional[float] = ..., ttft_budget_ms: _Optional[float] = ..., sources: _Optional[_Iterable[_Union[_common_pb2.PrefixSource, _Mapping]]] = ...) -> None: ...

class DecodeUpdate(_message.Message):
    __slots__ = ("outputs", "prefilled", "reserved", "failed", "signs", "times")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SIGNS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenOutput]
    prefilled: _containers.RepeatedCompositeFieldContainer[PrefillDone]
    reserved: _containers.RepeatedScalarFieldContainer[str]
    failed: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptFailed]
    signs: AttemptSigns
    times: _containers.RepeatedCompositeFieldContainer[DecodeTimes]
    def __init__(self, outputs: _Optional[_Iterable[_Union[_common_pb2.TokenOutput, _Mapping]]] = ..., prefilled: _Optional[_Iterable[_Union[PrefillDone, _Mapping]]] = ..., reserved: _Optional[_Iterable[str]] = ..., failed: _Optional[_Iterable[_Union[_common_pb2.AttemptFailed, _Mapping]]] = ..., signs: _Optional[_Union[AttemptSigns, _Mapping]] = ..., times: _Optional[_Iterable[_Union[DecodeTimes, _Mapping]]] = ...) -> None: ...

class DecodeTimes(_message.Message):
    __slots__ = ("attempt_id", "age_ms", "slots_ms", "prompt_ms", "steps", "steps_ms", "longest_step_ms")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_MS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_MS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    age_ms: float
    slots_ms: float
    prompt_ms: float
    steps: int
    steps_ms: float
    longest_step_ms: float
    def __init__(self, attempt_id: _Optional[str] = ..., age_ms: _Optional[float] = ..., slots_ms: _Optional[float] = ..., prompt_ms: _Optional[float] = ..., steps: _Optional[int] = ..., steps_ms: _Optional[float] = ..., longest_step_ms: _Optional[float] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("instance_id", "incarnation", "load", "stalled")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    incarnation: int
    load: Load
    stalled: str
    def __init__(self, instance_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., stalled: _Optional[str] = ...) -> None: ...

class IdleLoad(_message.Message):
    __slots__ = ("running", "tokens", "queue_ms", "slots_held", "slots_promised")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_HELD_FIELD_NUMBER: _ClassVar[int]
    SLOTS_PROMISED_FIELD_NUMBER: _ClassVar[int]
    running: int
    tokens: int
    queue_ms: float
    slots_held: int
    slots_promised: int
    def __init__(self, running: _Optional[int] = ..., tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ..., slots_held: _Optional[int] = ..., slots_promised: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "tokens", "queue_ms", "step_ms", "slots_total", "slots_available", "max_batch", "attempt_ids", "prefill_cost", "decode_cost", "ssd_read_us_per_block", "slots_promised", "idle", "slowed_by")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COST_FIELD_NUMBER: _ClassVar[int]
    DECODE_COST_FIELD_NUMBER: _ClassVar[int]
    SSD_READ_US_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SLOTS_PROMISED_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    SLOWED_BY_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    tokens: int
    queue_ms: float
    step_ms: float
    slots_total: int
    slots_available: int
    max_batch: int
    attempt_ids: _containers.RepeatedScalarFieldContainer[str]
    prefill_cost: PrefillCost
    decode_cost: DecodeCost
    ssd_read_us_per_block: int
    slots_promised: int
    idle: IdleLoad
    slowed_by: float
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ..., step_ms: _Optional[float] = ..., slots_total: _Optional[int] = ..., slots_available: _Optional[int] = ..., max_batch: _Optional[int] = ..., attempt_ids: _Optional[_Iterable[str]] = ..., prefill_cost: _Optional[_Union[PrefillCost, _Mapping]] = ..., decode_cost: _Optional[_Union[DecodeCost, _Mapping]] = ..., ssd_read_us_per_block: _Optional[int] = ..., slots_promised: _Optional[int] = ..., idle: _Optional[_Union[IdleLoad, _Mapping]] = ..., slowed_by: _Optional[float] = ...) -> None: ...

class PrefillCost(_message.Message):
    __slots__ = ("fixed_ms", "per_token_ms", "per_pair_ms", "slowest_share")
    FIXED_MS_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    PER_PAIR_MS_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_SHARE_FIELD_NUMBER: _ClassVar[int]
    fixed_ms: float
    per_token_ms: float
    per_pair_ms: float
    slowest_share: float
    def __init__(self, fixed_ms: _Optional[float] = ..., per_token_ms: _Optional[float] = ..., per_pair_ms: _Optional[float] = ..., slowest_share: _Optional[float] = ...) -> None: ...

class DecodeCost(_message.Message):
    __slots__ = ("fixed_ms", "per_sequence_ms", "per_context_token_ms")
    FIXED_MS_FIELD_NUMBER: _ClassVar[int]
    PER_SEQUENCE_MS_FIELD_NUMBER: _ClassVar[int]
    PER_CONTEXT_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    fixed_ms: float
    per_sequence_ms: float
    per_context_token_ms: float
    def __init__(self, fixed_ms: _Optional[float] = ..., per_sequence_ms: _Optional[float] = ..., per_context_token_ms: _Optional[float] = ...) -> None: ...
