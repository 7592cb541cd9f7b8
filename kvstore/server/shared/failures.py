"""The errors on their way through gRPC: from the tree to a status or a Failure, and back."""

from __future__ import annotations

import grpc
import grpc.aio

from kvstore.core.pins import NothingHeld, PinLimit, UnknownPin
from kvstore.core.results import TransferCancelled, UnknownAttempt
from kvstore.core.tenants import QuotaExceeded
from messenger.base import TransferTimeout
from springtide.errors import InvalidRequest, PeerLost, PoolFull, SpringtideError, StaleHandle
from springtide.protocol.outputs import Failure, FailureCode

_STATUS: tuple[tuple[type[SpringtideError], grpc.StatusCode], ...] = (
    (UnknownAttempt, grpc.StatusCode.NOT_FOUND),
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (PoolFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (QuotaExceeded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (PinLimit, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NothingHeld, grpc.StatusCode.NOT_FOUND),
    (UnknownPin, grpc.StatusCode.NOT_FOUND),
    (PeerLost, grpc.StatusCode.UNAVAILABLE),
    (TransferTimeout, grpc.StatusCode.DEADLINE_EXCEEDED),
)
_FAILURE: tuple[tuple[type[SpringtideError], FailureCode], ...] = (
    (UnknownAttempt, FailureCode.ABORTED),
    (TransferCancelled, FailureCode.ABORTED),
    (InvalidRequest, FailureCode.INVALID),
    (PoolFull, FailureCode.POOL_FULL),
    (QuotaExceeded, FailureCode.QUOTA_USED),
    (PeerLost, FailureCode.PEER_LOST),
    (TransferTimeout, FailureCode.PEER_LOST),
    (StaleHandle, FailureCode.PEER_LOST),
)


def status_of(error: SpringtideError) -> grpc.StatusCode:
    """The status with which a call ends."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def failure_of(error: SpringtideError) -> Failure:
    """The failure that an engine is told."""
    code = next((code for kind, code in _FAILURE if isinstance(error, kind)), FailureCode.INTERNAL)
    return Failure(code, error.message)


def error_of(error: grpc.aio.AioRpcError, what: str) -> SpringtideError:
    """The error of a peer of which `what` was asked. A status that says nothing of the peer's own means that the peer is lost."""
    message = f"{what}: {error.details()}"
    status = error.code()
    for kind, known in _STATUS:
        if status == known:
            return kind(message)
    if status is grpc.StatusCode.CANCELLED:
        return PeerLost(message)
    return SpringtideError(message)
