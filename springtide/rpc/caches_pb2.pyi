from springtide.rpc import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CacheStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_STATUS_UNSPECIFIED: _ClassVar[CacheStatus]
    CACHE_STATUS_PENDING: _ClassVar[CacheStatus]
    CACHE_STATUS_READY: _ClassVar[CacheStatus]
    CACHE_STATUS_ERROR: _ClassVar[CacheStatus]
    CACHE_STATUS_INACTIVE: _ClassVar[CacheStatus]
CACHE_STATUS_UNSPECIFIED: CacheStatus
CACHE_STATUS_PENDING: CacheStatus
CACHE_STATUS_READY: CacheStatus
CACHE_STATUS_ERROR: CacheStatus
CACHE_STATUS_INACTIVE: CacheStatus

class ContextCache(_message.Message):
    __slots__ = ("cache_id", "status", "error", "tokens", "created_at", "expires_at", "name", "metadata", "replicas", "replicas_held", "calls", "saved_tokens")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_HELD_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    SAVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    status: CacheStatus
    error: str
    tokens: int
    created_at: float
    expires_at: float
    name: str
    metadata: _containers.ScalarMap[str, str]
    replicas: int
    replicas_held: int
    calls: int
    saved_tokens: int
    def __init__(self, cache_id: _Optional[str] = ..., status: _Optional[_Union[CacheStatus, str]] = ..., error: _Optional[str] = ..., tokens: _Optional[int] = ..., created_at: _Optional[float] = ..., expires_at: _Optional[float] = ..., name: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., replicas: _Optional[int] = ..., replicas_held: _Optional[int] = ..., calls: _Optional[int] = ..., saved_tokens: _Optional[int] = ...) -> None: ...

class CreateCacheRequest(_message.Message):
    __slots__ = ("model", "chat", "ttl_s", "replicas", "name", "metadata", "tenant")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    model: str
    chat: _inference_pb2.ChatPrompt
    ttl_s: float
    replicas: int
    name: str
    metadata: _containers.ScalarMap[str, str]
    tenant: str
    def __init__(self, model: _Optional[str] = ..., chat: _Optional[_Union[_inference_pb2.ChatPrompt, _Mapping]] = ..., ttl_s: _Optional[float] = ..., replicas: _Optional[int] = ..., name: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., tenant: _Optional[str] = ...) -> None: ...

class CacheName(_message.Message):
    __slots__ = ("cache_id", "tenant")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    tenant: str
    def __init__(self, cache_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ListCachesRequest(_message.Message):
    __slots__ = ("after", "limit", "tenant")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    after: str
    limit: int
    tenant: str
    def __init__(self, after: _Optional[str] = ..., limit: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class ListCachesReply(_message.Message):
    __slots__ = ("caches", "more")
    CACHES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    caches: _containers.RepeatedCompositeFieldContainer[ContextCache]
    more: bool
    def __init__(self, caches: _Optional[_Iterable[_Union[ContextCache, _Mapping]]] = ..., more: _Optional[bool] = ...) -> None: ...

class ExtendCacheRequest(_message.Message):
    __slots__ = ("cache_id", "ttl_s", "tenant")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    ttl_s: float
    tenant: str
    def __init__(self, cache_id: _Optional[str] = ..., ttl_s: _Optional[float] = ..., tenant: _Optional[str] = ...) -> None: ...

class DeleteCacheReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
