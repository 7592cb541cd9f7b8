from springtide.rpc import common_pb2 as _common_pb2
from springtide.rpc import store_pb2 as _store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LayerOrder(_message.Message):
    __slots__ = ("join", "generations")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    join: JoinBundle
    generations: SetGenerations
    def __init__(self, join: _Optional[_Union[JoinBundle, _Mapping]] = ..., generations: _Optional[_Union[SetGenerations, _Mapping]] = ...) -> None: ...

class JoinBundle(_message.Message):
    __slots__ = ("node_id", "incarnation")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class SetGenerations(_message.Message):
    __slots__ = ("slots", "generations")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class LayerReport(_message.Message):
    __slots__ = ("joined", "still_there")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    STILL_THERE_FIELD_NUMBER: _ClassVar[int]
    joined: BundleJoined
    still_there: StillThere
    def __init__(self, joined: _Optional[_Union[BundleJoined, _Mapping]] = ..., still_there: _Optional[_Union[StillThere, _Mapping]] = ...) -> None: ...

class BundleJoined(_message.Message):
    __slots__ = ("node_id", "at", "num_slots", "ssd")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SSD_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    at: _store_pb2.LayersAt
    num_slots: int
    ssd: SsdState
    def __init__(self, node_id: _Optional[str] = ..., at: _Optional[_Union[_store_pb2.LayersAt, _Mapping]] = ..., num_slots: _Optional[int] = ..., ssd: _Optional[_Union[SsdState, _Mapping]] = ...) -> None: ...

class StillThere(_message.Message):
    __slots__ = ("ssd",)
    SSD_FIELD_NUMBER: _ClassVar[int]
    ssd: SsdState
    def __init__(self, ssd: _Optional[_Union[SsdState, _Mapping]] = ...) -> None: ...

class SsdState(_message.Message):
    __slots__ = ("state", "held", "free", "capacity", "retired", "dropped", "first_read_s", "next_read_s", "hanging_s")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    FIRST_READ_S_FIELD_NUMBER: _ClassVar[int]
    NEXT_READ_S_FIELD_NUMBER: _ClassVar[int]
    HANGING_S_FIELD_NUMBER: _ClassVar[int]
    state: str
    held: int
    free: int
    capacity: int
    retired: int
    dropped: _containers.ScalarMap[str, int]
    first_read_s: float
    next_read_s: float
    hanging_s: float
    def __init__(self, state: _Optional[str] = ..., held: _Optional[int] = ..., free: _Optional[int] = ..., capacity: _Optional[int] = ..., retired: _Optional[int] = ..., dropped: _Optional[_Mapping[str, int]] = ..., first_read_s: _Optional[float] = ..., next_read_s: _Optional[float] = ..., hanging_s: _Optional[float] = ...) -> None: ...

class MoveRequest(_message.Message):
    __slots__ = ("move_id", "endpoint", "reads", "local_offsets", "remote_offsets", "lengths", "generations", "timeout_s")
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    move_id: int
    endpoint: str
    reads: bool
    local_offsets: _containers.RepeatedScalarFieldContainer[int]
    remote_offsets: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    timeout_s: float
    def __init__(self, move_id: _Optional[int] = ..., endpoint: _Optional[str] = ..., reads: _Optional[bool] = ..., local_offsets: _Optional[_Iterable[int]] = ..., remote_offsets: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class MoveReply(_message.Message):
    __slots__ = ("num_bytes", "failed", "failure")
    class FailedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    failed: _containers.ScalarMap[int, str]
    failure: _common_pb2.Failure
    def __init__(self, num_bytes: _Optional[int] = ..., failed: _Optional[_Mapping[int, str]] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class CancelMoveRequest(_message.Message):
    __slots__ = ("move_id",)
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    move_id: int
    def __init__(self, move_id: _Optional[int] = ...) -> None: ...

class CancelMoveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("endpoint",)
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    def __init__(self, endpoint: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HasLetGoRequest(_message.Message):
    __slots__ = ("engine", "incarnation")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    engine: str
    incarnation: int
    def __init__(self, engine: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class HasLetGoReply(_message.Message):
    __slots__ = ("has_let_go",)
    HAS_LET_GO_FIELD_NUMBER: _ClassVar[int]
    has_let_go: bool
    def __init__(self, has_let_go: _Optional[bool] = ...) -> None: ...

class ListKeptRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KeptBlocks(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CopyOutRequest(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slots: _Optional[_Iterable[int]] = ...) -> None: ...

class CopyOutReply(_message.Message):
    __slots__ = ("copy_id",)
    COPY_ID_FIELD_NUMBER: _ClassVar[int]
    copy_id: int
    def __init__(self, copy_id: _Optional[int] = ...) -> None: ...

class PutCopiesRequest(_message.Message):
    __slots__ = ("copy_id", "places", "keys", "parents")
    COPY_ID_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    copy_id: int
    places: _containers.RepeatedScalarFieldContainer[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    parents: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, copy_id: _Optional[int] = ..., places: _Optional[_Iterable[int]] = ..., keys: _Optional[_Iterable[bytes]] = ..., parents: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PutCopiesReply(_message.Message):
    __slots__ = ("held", "lacking", "ssd")
    HELD_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    SSD_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedScalarFieldContainer[bool]
    lacking: _containers.RepeatedScalarFieldContainer[bytes]
    ssd: SsdState
    def __init__(self, held: _Optional[_Iterable[bool]] = ..., lacking: _Optional[_Iterable[bytes]] = ..., ssd: _Optional[_Union[SsdState, _Mapping]] = ...) -> None: ...

class GetCopiesRequest(_message.Message):
    __slots__ = ("keys", "slots")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class GetCopiesReply(_message.Message):
    __slots__ = ("failed", "ssd")
    class FailedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SSD_FIELD_NUMBER: _ClassVar[int]
    failed: _containers.ScalarMap[int, str]
    ssd: SsdState
    def __init__(self, failed: _Optional[_Mapping[int, str]] = ..., ssd: _Optional[_Union[SsdState, _Mapping]] = ...) -> None: ...

class RemoveCopiesRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...
