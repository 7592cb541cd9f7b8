from springtide.rpc import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DRAM: _ClassVar[Tier]
    TIER_SSD: _ClassVar[Tier]

class PinKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PIN_KIND_UNSPECIFIED: _ClassVar[PinKind]
    PIN_KIND_SOFT: _ClassVar[PinKind]
    PIN_KIND_HARD: _ClassVar[PinKind]
TIER_UNSPECIFIED: Tier
TIER_DRAM: Tier
TIER_SSD: Tier
PIN_KIND_UNSPECIFIED: PinKind
PIN_KIND_SOFT: PinKind
PIN_KIND_HARD: PinKind

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("node_id", "incarnation", "endpoint", "layers")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    endpoint: str
    layers: _containers.RepeatedCompositeFieldContainer[LayersAt]
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., endpoint: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[LayersAt, _Mapping]]] = ...) -> None: ...

class LayersAt(_message.Message):
    __slots__ = ("layer_begin", "layer_end", "endpoint")
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    layer_begin: int
    layer_end: int
    endpoint: str
    def __init__(self, layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., endpoint: _Optional[str] = ...) -> None: ...

class WatchStoreRequest(_message.Message):
    __slots__ = ("watcher",)
    WATCHER_FIELD_NUMBER: _ClassVar[int]
    watcher: str
    def __init__(self, watcher: _Optional[str] = ...) -> None: ...

class StoreEvent(_message.Message):
    __slots__ = ("snapshot", "stored", "removed", "still_here")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    STILL_HERE_FIELD_NUMBER: _ClassVar[int]
    snapshot: SnapshotPart
    stored: BlocksStored
    removed: BlocksRemoved
    still_here: StillHere
    def __init__(self, snapshot: _Optional[_Union[SnapshotPart, _Mapping]] = ..., stored: _Optional[_Union[BlocksStored, _Mapping]] = ..., removed: _Optional[_Union[BlocksRemoved, _Mapping]] = ..., still_here: _Optional[_Union[StillHere, _Mapping]] = ...) -> None: ...

class StillHere(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class SnapshotPart(_message.Message):
    __slots__ = ("node_id", "incarnation", "sequence", "keys", "tier", "complete")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    sequence: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    tier: Tier
    complete: bool
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., tier: _Optional[_Union[Tier, str]] = ..., complete: _Optional[bool] = ...) -> None: ...

class BlocksStored(_message.Message):
    __slots__ = ("node_id", "incarnation", "sequence", "keys", "tier")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    sequence: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    tier: Tier
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...

class BlocksRemoved(_message.Message):
    __slots__ = ("node_id", "incarnation", "sequence", "keys", "tier")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    sequence: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    tier: Tier
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("reader", "keys", "tenant")
    READER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    reader: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    tenant: str
    def __init__(self, reader: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ..., tenant: _Optional[str] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("lease_id", "incarnation", "slots", "generations", "ttl_ms", "tenant")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    incarnation: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    ttl_ms: int
    tenant: str
    def __init__(self, lease_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., ttl_ms: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RenewLeaseReply(_message.Message):
    __slots__ = ("lost",)
    LOST_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lost: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class ReleaseLeaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Writer(_message.Message):
    __slots__ = ("node_id", "incarnation", "address", "beside")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    address: str
    beside: _containers.RepeatedCompositeFieldContainer[StoreIncarnation]
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., beside: _Optional[_Iterable[_Union[StoreIncarnation, _Mapping]]] = ...) -> None: ...

class StoreIncarnation(_message.Message):
    __slots__ = ("node_id", "incarnation")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class OpenIngestRequest(_message.Message):
    __slots__ = ("attempt_id", "writer")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    writer: Writer
    def __init__(self, attempt_id: _Optional[str] = ..., writer: _Optional[_Union[Writer, _Mapping]] = ...) -> None: ...

class OpenIngestReply(_message.Message):
    __slots__ = ("incarnation", "slots", "generations", "present_blocks")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    present_blocks: int
    def __init__(self, incarnation: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., present_blocks: _Optional[int] = ...) -> None: ...

class CloseIngestRequest(_message.Message):
    __slots__ = ("attempt_id", "writer")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    writer: Writer
    def __init__(self, attempt_id: _Optional[str] = ..., writer: _Optional[_Union[Writer, _Mapping]] = ...) -> None: ...

class CloseIngestReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CancelHandOverRequest(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    def __init__(self, attempt_id: _Optional[str] = ...) -> None: ...

class CancelHandOverReply(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    def __init__(self, incarnation: _Optional[int] = ...) -> None: ...

class IngestNotice(_message.Message):
    __slots__ = ("unit", "seal")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    unit: IngestUnit
    seal: IngestSeal
    def __init__(self, unit: _Optional[_Union[IngestUnit, _Mapping]] = ..., seal: _Optional[_Union[IngestSeal, _Mapping]] = ...) -> None: ...

class Unit(_message.Message):
    __slots__ = ("layer_begin", "layer_end", "block_begin", "block_end")
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BEGIN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_END_FIELD_NUMBER: _ClassVar[int]
    layer_begin: int
    layer_end: int
    block_begin: int
    block_end: int
    def __init__(self, layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., block_begin: _Optional[int] = ..., block_end: _Optional[int] = ...) -> None: ...

class IngestUnit(_message.Message):
    __slots__ = ("attempt_id", "unit")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    unit: Unit
    def __init__(self, attempt_id: _Optional[str] = ..., unit: _Optional[_Union[Unit, _Mapping]] = ...) -> None: ...

class IngestSeal(_message.Message):
    __slots__ = ("attempt_id", "first_token")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    first_token: int
    def __init__(self, attempt_id: _Optional[str] = ..., first_token: _Optional[int] = ...) -> None: ...

class ReplicateRequest(_message.Message):
    __slots__ = ("keys", "sources")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    sources: _containers.RepeatedCompositeFieldContainer[_common_pb2.PrefixSource]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., sources: _Optional[_Iterable[_Union[_common_pb2.PrefixSource, _Mapping]]] = ...) -> None: ...

class ReplicateReply(_message.Message):
    __slots__ = ("blocks", "fetched_blocks")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    fetched_blocks: int
    def __init__(self, blocks: _Optional[int] = ..., fetched_blocks: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("pin_id", "keys", "kind", "ttl_ms")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    kind: PinKind
    ttl_ms: int
    def __init__(self, pin_id: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ..., kind: _Optional[_Union[PinKind, str]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class RenewPinRequest(_message.Message):
    __slots__ = ("pin_id", "ttl_ms")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    ttl_ms: int
    def __init__(self, pin_id: _Optional[str] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("pin_id",)
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    def __init__(self, pin_id: _Optional[str] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("pin",)
    PIN_FIELD_NUMBER: _ClassVar[int]
    pin: PinInfo
    def __init__(self, pin: _Optional[_Union[PinInfo, _Mapping]] = ...) -> None: ...

class PinInfo(_message.Message):
    __slots__ = ("pin_id", "kind", "blocks", "ttl_ms", "tenant")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    kind: PinKind
    blocks: int
    ttl_ms: int
    tenant: str
    def __init__(self, pin_id: _Optional[str] = ..., kind: _Optional[_Union[PinKind, str]] = ..., blocks: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPinsReply(_message.Message):
    __slots__ = ("pins",)
    PINS_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[PinInfo]
    def __init__(self, pins: _Optional[_Iterable[_Union[PinInfo, _Mapping]]] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("key_prefix", "limit", "keys")
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    key_prefix: str
    limit: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, key_prefix: _Optional[str] = ..., limit: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ListBlocksReply(_message.Message):
    __slots__ = ("chains", "total", "bytes_per_block", "block_tokens")
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    chains: _containers.RepeatedCompositeFieldContainer[BlockChain]
    total: int
    bytes_per_block: int
    block_tokens: int
    def __init__(self, chains: _Optional[_Iterable[_Union[BlockChain, _Mapping]]] = ..., total: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., block_tokens: _Optional[int] = ...) -> None: ...

class BlockChain(_message.Message):
    __slots__ = ("key", "blocks", "own_blocks", "children", "references", "pin", "tenant")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    blocks: int
    own_blocks: int
    children: int
    references: int
    pin: PinKind
    tenant: str
    def __init__(self, key: _Optional[bytes] = ..., blocks: _Optional[int] = ..., own_blocks: _Optional[int] = ..., children: _Optional[int] = ..., references: _Optional[int] = ..., pin: _Optional[_Union[PinKind, str]] = ..., tenant: _Optional[str] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("keys", "all")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    all: bool
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., all: _Optional[bool] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("blocks", "kept_blocks", "ssd_blocks")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SSD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    kept_blocks: int
    ssd_blocks: int
    def __init__(self, blocks: _Optional[int] = ..., kept_blocks: _Optional[int] = ..., ssd_blocks: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("ssd",)
    SSD_FIELD_NUMBER: _ClassVar[int]
    ssd: bool
    def __init__(self, ssd: _Optional[bool] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("slots", "blocks", "elapsed_ms", "problem", "ssd_blocks")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_MS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    SSD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    slots: int
    blocks: int
    elapsed_ms: float
    problem: str
    ssd_blocks: int
    def __init__(self, slots: _Optional[int] = ..., blocks: _Optional[int] = ..., elapsed_ms: _Optional[float] = ..., problem: _Optional[str] = ..., ssd_blocks: _Optional[int] = ...) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("tenant", "slots", "slots_cached", "quota_slots")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_CACHED_FIELD_NUMBER: _ClassVar[int]
    QUOTA_SLOTS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    slots: int
    slots_cached: int
    quota_slots: int
    def __init__(self, tenant: _Optional[str] = ..., slots: _Optional[int] = ..., slots_cached: _Optional[int] = ..., quota_slots: _Optional[int] = ...) -> None: ...

class SsdStat(_message.Message):
    __slots__ = ("state", "blocks", "free_blocks", "capacity_blocks", "dropped", "missed", "read_us_per_block", "direct")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    READ_US_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    state: str
    blocks: int
    free_blocks: int
    capacity_blocks: int
    dropped: _containers.ScalarMap[str, int]
    missed: int
    read_us_per_block: int
    direct: bool
    def __init__(self, state: _Optional[str] = ..., blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., capacity_blocks: _Optional[int] = ..., dropped: _Optional[_Mapping[str, int]] = ..., missed: _Optional[int] = ..., read_us_per_block: _Optional[int] = ..., direct: _Optional[bool] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatReply(_message.Message):
    __slots__ = ("node_id", "incarnation", "slots_total", "slots_free", "slots_cached", "slots_in_use", "slots_quarantined", "lookups_blocks", "hits_blocks", "bytes_read", "bytes_written", "bytes_per_slot", "leases", "pins", "blocks_hard_pinned", "blocks_soft_pinned", "hard_pin_limit", "sequence", "tenants", "watchers", "watchers_cut_off", "ssd", "slots_free_or_spare")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FREE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_CACHED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HITS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SLOT_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HARD_PINNED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SOFT_PINNED_FIELD_NUMBER: _ClassVar[int]
    HARD_PIN_LIMIT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    WATCHERS_FIELD_NUMBER: _ClassVar[int]
    WATCHERS_CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    SSD_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FREE_OR_SPARE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    slots_total: int
    slots_free: int
    slots_cached: int
    slots_in_use: int
    slots_quarantined: int
    lookups_blocks: int
    hits_blocks: int
    bytes_read: int
    bytes_written: int
    bytes_per_slot: int
    leases: int
    pins: int
    blocks_hard_pinned: int
    blocks_soft_pinned: int
    hard_pin_limit: int
    sequence: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUsage]
    watchers: int
    watchers_cut_off: int
    ssd: SsdStat
    slots_free_or_spare: int
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., slots_total: _Optional[int] = ..., slots_free: _Optional[int] = ..., slots_cached: _Optional[int] = ..., slots_in_use: _Optional[int] = ..., slots_quarantined: _Optional[int] = ..., lookups_blocks: _Optional[int] = ..., hits_blocks: _Optional[int] = ..., bytes_read: _Optional[int] = ..., bytes_written: _Optional[int] = ..., bytes_per_slot: _Optional[int] = ..., leases: _Optional[int] = ..., pins: _Optional[int] = ..., blocks_hard_pinned: _Optional[int] = ..., blocks_soft_pinned: _Optional[int] = ..., hard_pin_limit: _Optional[int] = ..., sequence: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantUsage, _Mapping]]] = ..., watchers: _Optional[int] = ..., watchers_cut_off: _Optional[int] = ..., ssd: _Optional[_Union[SsdStat, _Mapping]] = ..., slots_free_or_spare: _Optional[int] = ...) -> None: ...

class EngineCommand(_message.Message):
    __slots__ = ("hello", "acquire", "reserve", "grow", "commit", "open_hand_over", "push", "seal", "release")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    GROW_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    OPEN_HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    hello: EngineHello
    acquire: Acquire
    reserve: Reserve
    grow: Grow
    commit: Commit
    open_hand_over: OpenHandOver
    push: Push
    seal: Seal
    release: Release
    def __init__(self, hello: _Optional[_Union[EngineHello, _Mapping]] = ..., acquire: _Optional[_Union[Acquire, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., grow: _Optional[_Union[Grow, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., open_hand_over: _Optional[_Union[OpenHandOver, _Mapping]] = ..., push: _Optional[_Union[Push, _Mapping]] = ..., seal: _Optional[_Union[Seal, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ...) -> None: ...

class EngineHello(_message.Message):
    __slots__ = ("instance_id", "incarnation")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    incarnation: int
    def __init__(self, instance_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Acquire(_message.Message):
    __slots__ = ("attempt_id", "keys", "num_blocks", "max_reused_blocks", "sources", "tenant", "recompute_us_per_block", "leave_available", "leave_in_quota")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_REUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_US_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    LEAVE_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_IN_QUOTA_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    num_blocks: int
    max_reused_blocks: int
    sources: _containers.RepeatedCompositeFieldContainer[_common_pb2.PrefixSource]
    tenant: str
    recompute_us_per_block: int
    leave_available: int
    leave_in_quota: int
    def __init__(self, attempt_id: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ..., num_blocks: _Optional[int] = ..., max_reused_blocks: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[_common_pb2.PrefixSource, _Mapping]]] = ..., tenant: _Optional[str] = ..., recompute_us_per_block: _Optional[int] = ..., leave_available: _Optional[int] = ..., leave_in_quota: _Optional[int] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("attempt_id", "keys", "num_blocks", "tenant", "leave_available", "leave_in_quota")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_IN_QUOTA_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    num_blocks: int
    tenant: str
    leave_available: int
    leave_in_quota: int
    def __init__(self, attempt_id: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ..., num_blocks: _Optional[int] = ..., tenant: _Optional[str] = ..., leave_available: _Optional[int] = ..., leave_in_quota: _Optional[int] = ...) -> None: ...

class Grow(_message.Message):
    __slots__ = ("attempt_id", "num_blocks")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    num_blocks: int
    def __init__(self, attempt_id: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("attempt_id", "first_block", "keys")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    first_block: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, attempt_id: _Optional[str] = ..., first_block: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class OpenHandOver(_message.Message):
    __slots__ = ("attempt_id", "address", "node_id")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    address: str
    node_id: str
    def __init__(self, attempt_id: _Optional[str] = ..., address: _Optional[str] = ..., node_id: _Optional[str] = ...) -> None: ...

class Push(_message.Message):
    __slots__ = ("attempt_id", "layer_begin", "layer_end", "block_begin", "block_end")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BEGIN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_END_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    layer_begin: int
    layer_end: int
    block_begin: int
    block_end: int
    def __init__(self, attempt_id: _Optional[str] = ..., layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., block_begin: _Optional[int] = ..., block_end: _Optional[int] = ...) -> None: ...

class Seal(_message.Message):
    __slots__ = ("attempt_id", "first_token")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    first_token: int
    def __init__(self, attempt_id: _Optional[str] = ..., first_token: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("attempt_id", "finish_hand_over")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    finish_hand_over: bool
    def __init__(self, attempt_id: _Optional[str] = ..., finish_hand_over: _Optional[bool] = ...) -> None: ...

class StoreNotice(_message.Message):
    __slots__ = ("hello", "acquired", "fetch_progress", "fetch_truncated", "reserved", "ingested", "grown", "handed_over", "hand_over_failed", "attempt_failed", "load")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACQUIRED_FIELD_NUMBER: _ClassVar[int]
    FETCH_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FETCH_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    INGESTED_FIELD_NUMBER: _ClassVar[int]
    GROWN_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_FAILED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FAILED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    hello: StoreHello
    acquired: Acquired
    fetch_progress: FetchProgress
    fetch_truncated: FetchTruncated
    reserved: Reserved
    ingested: Ingested
    grown: Grown
    handed_over: _common_pb2.HandedOver
    hand_over_failed: HandOverFailed
    attempt_failed: _common_pb2.AttemptFailed
    load: StoreLoad
    def __init__(self, hello: _Optional[_Union[StoreHello, _Mapping]] = ..., acquired: _Optional[_Union[Acquired, _Mapping]] = ..., fetch_progress: _Optional[_Union[FetchProgress, _Mapping]] = ..., fetch_truncated: _Optional[_Union[FetchTruncated, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., ingested: _Optional[_Union[Ingested, _Mapping]] = ..., grown: _Optional[_Union[Grown, _Mapping]] = ..., handed_over: _Optional[_Union[_common_pb2.HandedOver, _Mapping]] = ..., hand_over_failed: _Optional[_Union[HandOverFailed, _Mapping]] = ..., attempt_failed: _Optional[_Union[_common_pb2.AttemptFailed, _Mapping]] = ..., load: _Optional[_Union[StoreLoad, _Mapping]] = ...) -> None: ...

class StoreHello(_message.Message):
    __slots__ = ("node_id", "incarnation", "num_slots", "address")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    num_slots: int
    address: str
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., num_slots: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class Acquired(_message.Message):
    __slots__ = ("attempt_id", "slots", "local_blocks", "remote_blocks")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    slots: _containers.RepeatedScalarFieldContainer[int]
    local_blocks: int
    remote_blocks: int
    def __init__(self, attempt_id: _Optional[str] = ..., slots: _Optional[_Iterable[int]] = ..., local_blocks: _Optional[int] = ..., remote_blocks: _Optional[int] = ...) -> None: ...

class FetchProgress(_message.Message):
    __slots__ = ("attempt_id", "layers_ready")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_READY_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    layers_ready: int
    def __init__(self, attempt_id: _Optional[str] = ..., layers_ready: _Optional[int] = ...) -> None: ...

class FetchTruncated(_message.Message):
    __slots__ = ("attempt_id", "valid_blocks")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    VALID_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    valid_blocks: int
    def __init__(self, attempt_id: _Optional[str] = ..., valid_blocks: _Optional[int] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("attempt_id", "slots", "present_blocks")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    slots: _containers.RepeatedScalarFieldContainer[int]
    present_blocks: int
    def __init__(self, attempt_id: _Optional[str] = ..., slots: _Optional[_Iterable[int]] = ..., present_blocks: _Optional[int] = ...) -> None: ...

class Ingested(_message.Message):
    __slots__ = ("attempt_id", "first_token")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    first_token: int
    def __init__(self, attempt_id: _Optional[str] = ..., first_token: _Optional[int] = ...) -> None: ...

class Grown(_message.Message):
    __slots__ = ("attempt_id", "slots")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, attempt_id: _Optional[str] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class HandOverFailed(_message.Message):
    __slots__ = ("attempt_id", "failure")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    failure: _common_pb2.Failure
    def __init__(self, attempt_id: _Optional[str] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class StoreLoad(_message.Message):
    __slots__ = ("slots_free", "slots_available", "ssd_read_us_per_block")
    SLOTS_FREE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    SSD_READ_US_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    slots_free: int
    slots_available: int
    ssd_read_us_per_block: int
    def __init__(self, slots_free: _Optional[int] = ..., slots_available: _Optional[int] = ..., ssd_read_us_per_block: _Optional[int] = ...) -> None: ...
