from springtide.rpc import common_pb2 as _common_pb2
from springtide.rpc import store_pb2 as _store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StageOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_OUTCOME_UNSPECIFIED: _ClassVar[StageOutcome]
    STAGE_OUTCOME_DONE: _ClassVar[StageOutcome]
    STAGE_OUTCOME_VOID: _ClassVar[StageOutcome]
    STAGE_OUTCOME_PREFIX_MISSING: _ClassVar[StageOutcome]
    STAGE_OUTCOME_PREFIX_OVERDUE: _ClassVar[StageOutcome]
    STAGE_OUTCOME_FAILED: _ClassVar[StageOutcome]
STAGE_OUTCOME_UNSPECIFIED: StageOutcome
STAGE_OUTCOME_DONE: StageOutcome
STAGE_OUTCOME_VOID: StageOutcome
STAGE_OUTCOME_PREFIX_MISSING: StageOutcome
STAGE_OUTCOME_PREFIX_OVERDUE: StageOutcome
STAGE_OUTCOME_FAILED: StageOutcome

class LoadLayers(_message.Message):
    __slots__ = ("layer_begin", "layer_end", "stages")
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    layer_begin: int
    layer_end: int
    stages: int
    def __init__(self, layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., stages: _Optional[int] = ...) -> None: ...

class LoadLayersReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageOrder(_message.Message):
    __slots__ = ("join", "run", "acquired", "fetch_progress", "fetch_truncated", "attempt_failed", "forget", "slots_given_back")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ACQUIRED_FIELD_NUMBER: _ClassVar[int]
    FETCH_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FETCH_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FAILED_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    SLOTS_GIVEN_BACK_FIELD_NUMBER: _ClassVar[int]
    join: JoinGroup
    run: StagePass
    acquired: _store_pb2.Acquired
    fetch_progress: _store_pb2.FetchProgress
    fetch_truncated: _store_pb2.FetchTruncated
    attempt_failed: _common_pb2.AttemptFailed
    forget: ForgetAttempt
    slots_given_back: SlotsGivenBack
    def __init__(self, join: _Optional[_Union[JoinGroup, _Mapping]] = ..., run: _Optional[_Union[StagePass, _Mapping]] = ..., acquired: _Optional[_Union[_store_pb2.Acquired, _Mapping]] = ..., fetch_progress: _Optional[_Union[_store_pb2.FetchProgress, _Mapping]] = ..., fetch_truncated: _Optional[_Union[_store_pb2.FetchTruncated, _Mapping]] = ..., attempt_failed: _Optional[_Union[_common_pb2.AttemptFailed, _Mapping]] = ..., forget: _Optional[_Union[ForgetAttempt, _Mapping]] = ..., slots_given_back: _Optional[_Union[SlotsGivenBack, _Mapping]] = ...) -> None: ...

class ForgetAttempt(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    def __init__(self, attempt_id: _Optional[str] = ...) -> None: ...

class SlotsGivenBack(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slots: _Optional[_Iterable[int]] = ...) -> None: ...

class JoinGroup(_message.Message):
    __slots__ = ("instance_id", "incarnation", "num_slots", "next_endpoint", "next_device_buffers")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    NEXT_DEVICE_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    incarnation: int
    num_slots: int
    next_endpoint: str
    next_device_buffers: bytes
    def __init__(self, instance_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., num_slots: _Optional[int] = ..., next_endpoint: _Optional[str] = ..., next_device_buffers: _Optional[bytes] = ...) -> None: ...

class StagePass(_message.Message):
    __slots__ = ("pass_id", "rows", "report_layers", "awaits")
    PASS_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    REPORT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    AWAITS_FIELD_NUMBER: _ClassVar[int]
    pass_id: int
    rows: _containers.RepeatedCompositeFieldContainer[StageRow]
    report_layers: _containers.RepeatedScalarFieldContainer[int]
    awaits: str
    def __init__(self, pass_id: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[StageRow, _Mapping]]] = ..., report_layers: _Optional[_Iterable[int]] = ..., awaits: _Optional[str] = ...) -> None: ...

class StageRow(_message.Message):
    __slots__ = ("num_tokens", "start", "slots", "sampling", "scoring")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SCORING_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    start: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    sampling: StageSampling
    scoring: StageScoring
    def __init__(self, num_tokens: _Optional[int] = ..., start: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[StageSampling, _Mapping]] = ..., scoring: _Optional[_Union[StageScoring, _Mapping]] = ...) -> None: ...

class StageScoring(_message.Message):
    __slots__ = ("next_ids", "num_top")
    NEXT_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    next_ids: _containers.RepeatedScalarFieldContainer[int]
    num_top: int
    def __init__(self, next_ids: _Optional[_Iterable[int]] = ..., num_top: _Optional[int] = ...) -> None: ...

class StageSampling(_message.Message):
    __slots__ = ("params", "prompt_ids", "output_ids")
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    params: _common_pb2.SamplingParams
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StageReport(_message.Message):
    __slots__ = ("joined", "layers", "ended")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    joined: GroupJoined
    layers: LayersComputed
    ended: StagePassEnded
    def __init__(self, joined: _Optional[_Union[GroupJoined, _Mapping]] = ..., layers: _Optional[_Union[LayersComputed, _Mapping]] = ..., ended: _Optional[_Union[StagePassEnded, _Mapping]] = ...) -> None: ...

class GroupJoined(_message.Message):
    __slots__ = ("endpoint", "device_buffers")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    device_buffers: bytes
    def __init__(self, endpoint: _Optional[str] = ..., device_buffers: _Optional[bytes] = ...) -> None: ...

class LayersComputed(_message.Message):
    __slots__ = ("pass_id", "layer_end")
    PASS_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    pass_id: int
    layer_end: int
    def __init__(self, pass_id: _Optional[int] = ..., layer_end: _Optional[int] = ...) -> None: ...

class RefusedToken(_message.Message):
    __slots__ = ("place", "failure")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    place: int
    failure: _common_pb2.Failure
    def __init__(self, place: _Optional[int] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class StagePassEnded(_message.Message):
    __slots__ = ("pass_id", "outcome", "message", "tokens", "refused", "busy_ms", "waited_ms", "scores")
    PASS_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    BUSY_MS_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    pass_id: int
    outcome: StageOutcome
    message: str
    tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.SampledToken]
    refused: _containers.RepeatedCompositeFieldContainer[RefusedToken]
    busy_ms: float
    waited_ms: float
    scores: _containers.RepeatedCompositeFieldContainer[_common_pb2.PromptLogprobs]
    def __init__(self, pass_id: _Optional[int] = ..., outcome: _Optional[_Union[StageOutcome, str]] = ..., message: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[_common_pb2.SampledToken, _Mapping]]] = ..., refused: _Optional[_Iterable[_Union[RefusedToken, _Mapping]]] = ..., busy_ms: _Optional[float] = ..., waited_ms: _Optional[float] = ..., scores: _Optional[_Iterable[_Union[_common_pb2.PromptLogprobs, _Mapping]]] = ...) -> None: ...
