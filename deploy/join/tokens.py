"""Join tokens: made by an operator, shown once by a machine that joins, worth nothing after a while."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from dataclasses import dataclass

from springtide.credentials import Credentials
from springtide.errors import ConfigError, Unauthenticated
from springtide.valkey import ValkeyClient, asked, bytes_of

_TOKEN = re.compile(r"(?P<token_id>[0-9a-f]{8})\.(?P<secret>[0-9a-f]{32})\.(?P<fingerprint>[0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Token:
    """What an operator passes on, written `ID.SECRET.FINGERPRINT`."""

    token_id: str
    secret: str
    fingerprint: str
    """Of the authority of the cluster that it is for: who joins knows by it whom to believe."""

    @classmethod
    def parse(cls, text: str) -> Token:
        """Raises ConfigError, without showing what was given."""
        match = _TOKEN.fullmatch(text.strip())
        if match is None:
            raise ConfigError("--token: this is no join token, which `springtide token create` prints at the head")
        return cls(**match.groupdict())

    def __str__(self) -> str:
        return f"{self.token_id}.{self.secret}.{self.fingerprint}"


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What is kept of a token: not its secret. Times in seconds since 1970."""

    token_id: str
    digest: str
    expires_at: float


class TokenBook:
    """The tokens of a cluster, in its Valkey. Each is signed with its end: whoever else writes there makes none, and prolongs none."""

    def __init__(self, client: ValkeyClient, cluster: str, credentials: Credentials) -> None:
        self._client = client
        self._prefix = f"{cluster}:join-token:"
        self._credentials = credentials

    async def create(self, fingerprint: str, ttl_s: float, now: float) -> Token:
        token = Token(secrets.token_hex(4), secrets.token_hex(16), fingerprint)
        said = json.dumps({"token_id": token.token_id, "digest": _digest(token.secret), "expires_at": now + ttl_s}).encode()
        record = self._credentials.signature(said).encode() + b"\n" + said
        await asked(self._client.set(self._prefix + token.token_id, record, px=max(1, round(ttl_s * 1000))))
        return token

    async def check(self, token: Token, now: float) -> None:
        """Raises Unauthenticated for a token that is not one of this cluster's, or not any more; Unavailable."""
        record = self._read(await asked(self._client.get(self._prefix + token.token_id)))
        if record is None or record.token_id != token.token_id or not hmac.compare_digest(record.digest, _digest(token.secret)):
            raise Unauthenticated("the token is unknown here: it has expired, was revoked, or is another cluster's", code="unknown_token")
        if now >= record.expires_at:
            raise Unauthenticated("the token has expired: `springtide token create` makes another", code="expired_token")

    async def all(self) -> list[TokenRecord]:
        """Those that hold, the first to end first. Raises Unavailable."""
        records = [self._read(await asked(self._client.get(key))) for key in await asked(self._keys())]
        return sorted((record for record in records if record is not None), key=lambda record: record.expires_at)

    async def revoke(self, token_id: str) -> bool:
        """Whether there was such a token."""
        return bool(await asked(self._client.delete(self._prefix + token_id)))

    async def _keys(self) -> list[bytes | str]:
        return [key async for key in self._client.scan_iter(match=self._prefix + "*")]

    def _read(self, record: bytes | str | None) -> TokenRecord | None:
        """None for what is nobody's of the cluster."""
        signature, _, said = bytes_of(record).partition(b"\n")
        if not said or not self._credentials.vouches_for(said, signature):
            return None
        return TokenRecord(**json.loads(said))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
