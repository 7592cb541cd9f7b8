"""The nonces of a server: made without being remembered, so that nobody who asks for many takes away those of others."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

from messenger.rdma.wire import NONCE_BYTES

LIFETIME_S = 60.0
_TIME = struct.Struct("<d")
_BODY_BYTES = NONCE_BYTES + _TIME.size


class Nonces:
    """Of one process. Times are in seconds, of any clock that goes on."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._used: dict[bytes, float] = {}
        """When; the oldest first."""

    def make(self, now: float) -> bytes:
        return self._sign(secrets.token_bytes(NONCE_BYTES) + _TIME.pack(now))

    def use(self, nonce: bytes, now: float) -> bool:
        """Whether it was made here within LIFETIME_S and is used for the first time. To be asked about nonces that came with a valid proof:
        those are what is remembered, until they are too old."""
        if not hmac.compare_digest(nonce, self._sign(nonce[:_BODY_BYTES])):
            return False
        while self._used and now - next(iter(self._used.values())) > LIFETIME_S:
            del self._used[next(iter(self._used))]
        (made,) = _TIME.unpack_from(nonce, NONCE_BYTES)
        if now - made > LIFETIME_S or nonce in self._used:
            return False
        self._used[nonce] = now
        return True

    def _sign(self, body: bytes) -> bytes:
        return body + hmac.digest(self._key, body, hashlib.sha256)
