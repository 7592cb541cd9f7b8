"""What an engine asks of its node's store and what it hears back: the `Engine` stream of `proto/springtide/v1/store.proto` as frozen
dataclasses, so that the cores (and a simulator) decide over plain values. The fields and their meaning are the schema's."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from springtide.rpc import common_pb2, store_pb2

# ---- orders: engine to store ----


@dataclass(frozen=True, slots=True)
class Acquire:
    attempt_id: str
    keys: tuple[bytes, ...]
    num_blocks: int
    max_reused_blocks: int
    sources: tuple[common_pb2.PrefixSource, ...] = ()
    tenant: str = ""
    recompute_us_per_block: int | None = None
    leave_available: int = 0
    leave_in_quota: int = 0


@dataclass(frozen=True, slots=True)
class Reserve:
    attempt_id: str
    keys: tuple[bytes, ...]
    num_blocks: int
    tenant: str = ""
    leave_available: int = 0
    leave_in_quota: int = 0


@dataclass(frozen=True, slots=True)
class Grow:
    attempt_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Commit:
    attempt_id: str
    first_block: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class OpenHandOver:
    attempt_id: str
    address: str
    node_id: str


@dataclass(frozen=True, slots=True)
class Push:
    attempt_id: str
    layer_begin: int
    layer_end: int
    block_begin: int
    block_end: int


@dataclass(frozen=True, slots=True)
class Seal:
    attempt_id: str
    first_token: int


@dataclass(frozen=True, slots=True)
class Release:
    """The last order for an attempt: from here on its slots belong to the store again."""

    attempt_id: str
    finish_hand_over: bool = False


Order = Acquire | Reserve | Grow | Commit | OpenHandOver | Push | Seal | Release

# ---- notices: store to engine ----


@dataclass(frozen=True, slots=True)
class Acquired:
    attempt_id: str
    slots: tuple[int, ...]
    local_blocks: int
    remote_blocks: int


@dataclass(frozen=True, slots=True)
class FetchProgress:
    attempt_id: str
    layers_ready: int


@dataclass(frozen=True, slots=True)
class FetchTruncated:
    attempt_id: str
    valid_blocks: int


@dataclass(frozen=True, slots=True)
class Reserved:
    attempt_id: str
    slots: tuple[int, ...]
    present_blocks: int


@dataclass(frozen=True, slots=True)
class Ingested:
    attempt_id: str
    first_token: int


@dataclass(frozen=True, slots=True)
class Grown:
    attempt_id: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HandedOver:
    attempt_id: str
    num_bytes: int
    span_ms: float = 0.0
    write_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class HandOverFailed:
    attempt_id: str
    failure: common_pb2.Failure


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    attempt_id: str
    failure: common_pb2.Failure


@dataclass(frozen=True, slots=True)
class StoreLoad:
    slots_free: int
    slots_available: int
    ssd_read_us_per_block: int = 0


NO_ROOM = frozenset({common_pb2.FAILURE_CODE_POOL_FULL, common_pb2.FAILURE_CODE_QUOTA_USED})
"""Failures of an order for slots that may well be met later."""

Notice = Acquired | FetchProgress | FetchTruncated | Reserved | Ingested | Grown | HandedOver | HandOverFailed | AttemptFailed | StoreLoad

# ---- the connection itself ----


@dataclass(frozen=True, slots=True)
class StoreUp:
    """Connected to a store with an empty account for this engine."""

    num_slots: int
    """Of one attempt at most."""
    pages: int | None = None
    """So many blocks a step or a pass may have at once; None: as many as there are."""


@dataclass(frozen=True, slots=True)
class StoreLost:
    """The stream to the store broke: every slot is gone."""

    reason: str


_COMMAND_FIELDS: dict[type[Any], str] = {
    Acquire: "acquire",
    Reserve: "reserve",
    Grow: "grow",
    Commit: "commit",
    OpenHandOver: "open_hand_over",
    Push: "push",
    Seal: "seal",
    Release: "release",
}
_NOTICES: dict[str, type[Any]] = {
    "acquired": Acquired,
    "fetch_progress": FetchProgress,
    "fetch_truncated": FetchTruncated,
    "reserved": Reserved,
    "ingested": Ingested,
    "grown": Grown,
    "handed_over": HandedOver,
    "hand_over_failed": HandOverFailed,
    "attempt_failed": AttemptFailed,
    "load": StoreLoad,
}


def to_command(order: Order) -> store_pb2.EngineCommand:
    message_type = getattr(store_pb2, type(order).__name__)
    message = message_type(**{field.name: getattr(order, field.name) for field in fields(order)})
    return store_pb2.EngineCommand(**{_COMMAND_FIELDS[type(order)]: message})


def from_notice(notice: store_pb2.StoreNotice) -> Notice | None:
    """None for the hello, which the connection itself takes, and for notices that this version does not know."""
    name = notice.WhichOneof("notice")
    notice_type = _NOTICES.get(name) if name else None
    if name is None or notice_type is None:
        return None
    message = getattr(notice, name)
    values = {field.name: getattr(message, field.name) for field in fields(notice_type)}
    if "slots" in values:
        values["slots"] = tuple(values["slots"])
    notice_value: Notice = notice_type(**values)
    return notice_value
