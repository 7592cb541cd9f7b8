from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class FailureCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_CODE_UNSPECIFIED: _ClassVar[FailureCode]
    FAILURE_CODE_INVALID: _ClassVar[FailureCode]
    FAILURE_CODE_OVERLOADED: _ClassVar[FailureCode]
    FAILURE_CODE_POOL_FULL: _ClassVar[FailureCode]
    FAILURE_CODE_PREEMPTED: _ClassVar[FailureCode]
    FAILURE_CODE_PEER_LOST: _ClassVar[FailureCode]
    FAILURE_CODE_ABORTED: _ClassVar[FailureCode]
    FAILURE_CODE_INTERNAL: _ClassVar[FailureCode]
    FAILURE_CODE_QUOTA_USED: _ClassVar[FailureCode]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FAILURE_CODE_UNSPECIFIED: FailureCode
FAILURE_CODE_INVALID: FailureCode
FAILURE_CODE_OVERLOADED: FailureCode
FAILURE_CODE_POOL_FULL: FailureCode
FAILURE_CODE_PREEMPTED: FailureCode
FAILURE_CODE_PEER_LOST: FailureCode
FAILURE_CODE_ABORTED: FailureCode
FAILURE_CODE_INTERNAL: FailureCode
FAILURE_CODE_QUOTA_USED: FailureCode

class Terms(_message.Message):
    __slots__ = ("priority", "deadline_ms", "idle")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    priority: int
    deadline_ms: float
    idle: bool
    def __init__(self, priority: _Optional[int] = ..., deadline_ms: _Optional[float] = ..., idle: _Optional[bool] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop_token_ids", "max_tokens", "ignore_eos", "logprobs", "logit_bias", "prompt_logprobs", "min_tokens", "allowed_token_ids", "bad_words", "grammar")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    ignore_eos: bool
    logprobs: int
    logit_bias: LogitBias
    prompt_logprobs: int
    min_tokens: int
    allowed_token_ids: TokenIds
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenIds]
    grammar: Grammar
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., logit_bias: _Optional[_Union[LogitBias, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ..., min_tokens: _Optional[int] = ..., allowed_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., bad_words: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("packed",)
    PACKED_FIELD_NUMBER: _ClassVar[int]
    packed: bytes
    def __init__(self, packed: _Optional[bytes] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("source",)
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    source: str
    def __init__(self, source: _Optional[str] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_ids", "biases")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    biases: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., biases: _Optional[bytes] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("token_id", "logprob", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("logprobs", "ranks", "top_ids", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: FailureCode
    message: str
    def __init__(self, code: _Optional[_Union[FailureCode, str]] = ..., message: _Optional[str] = ...) -> None: ...

class AttemptFailed(_message.Message):
    __slots__ = ("attempt_id", "failure")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    failure: Failure
    def __init__(self, attempt_id: _Optional[str] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class HandedOver(_message.Message):
    __slots__ = ("attempt_id", "num_bytes", "span_ms", "write_ms")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPAN_MS_FIELD_NUMBER: _ClassVar[int]
    WRITE_MS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    num_bytes: int
    span_ms: float
    write_ms: float
    def __init__(self, attempt_id: _Optional[str] = ..., num_bytes: _Optional[int] = ..., span_ms: _Optional[float] = ..., write_ms: _Optional[float] = ...) -> None: ...

class TokenOutput(_message.Message):
    __slots__ = ("attempt_id", "position", "tokens", "finish", "stop_token")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    position: int
    tokens: _containers.RepeatedCompositeFieldContainer[SampledToken]
    finish: FinishReason
    stop_token: int
    def __init__(self, attempt_id: _Optional[str] = ..., position: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ..., finish: _Optional[_Union[FinishReason, str]] = ..., stop_token: _Optional[int] = ...) -> None: ...

class PrefixSource(_message.Message):
    __slots__ = ("node_id", "store_address", "num_blocks")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    store_address: str
    num_blocks: int
    def __init__(self, node_id: _Optional[str] = ..., store_address: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...
