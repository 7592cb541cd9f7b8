"""Proofs that a side knows the cluster's secret, and what makes each good for once."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import Literal

NONCE_BYTES = 16
LIFETIME_S = 60.0
_TIME = struct.Struct("<d")
_BODY_BYTES = NONCE_BYTES + _TIME.size


def proof_of(secret: bytes | None, role: Literal["offer", "answer"], caller_nonce: bytes, server_nonce: bytes, message: bytes) -> bytes:
    """The proof of one message, empty without a secret. Nonces make it worthless for any other connection, the role for the other
    direction."""
    if secret is None:
        return b""
    parts = (role.encode(), caller_nonce, server_nonce, message)
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.digest(secret, framed, hashlib.sha256)


class Nonces:
    """The nonces of one process: made without being remembered, so that nobody who asks for many takes away those of others. Times are in
    seconds, of any clock that goes on."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._used: dict[bytes, float] = {}
        """When each was used, the oldest first."""

    def make(self, now: float) -> bytes:
        """A new nonce."""
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
