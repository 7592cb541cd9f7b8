"""What the processes of one cluster know each other by: a token on every call, and signatures on what they leave where others could write.

Both are derived from the cluster's secret, and neither gives it away. The token travels in the clear, so whoever can listen to the network
can use it: it keeps out those who can reach a port, not those who can tap a wire.
"""

from __future__ import annotations

import hmac

from springtide.config import SECRET_VARIABLE, ClusterConfig
from springtide.errors import ConfigError


class Credentials:
    """The credentials of one cluster. Without a secret (`OPEN`) every call is admitted and every record believed."""

    def __init__(self, secret: bytes | None, cluster: str) -> None:
        self._token = None if secret is None else _derive(secret, "call", cluster).hex()
        self._signing_key = None if secret is None else _derive(secret, "record", cluster)

    @property
    def token(self) -> str | None:
        """What to show with a call; None: nothing."""
        return self._token

    @property
    def signs(self) -> bool:
        """Whether what is unsigned is nobody's."""
        return self._signing_key is not None

    def admits(self, token: str | bytes) -> bool:
        """Whether who shows this is of the cluster. Takes as long whatever is wrong with it."""
        return self._token is None or hmac.compare_digest(token.encode() if isinstance(token, str) else token, self._token.encode())

    def signature(self, said: bytes) -> str:
        """64 hexadecimal digits; empty without a secret."""
        return "" if self._signing_key is None else hmac.digest(self._signing_key, said, "sha256").hex()

    def vouches_for(self, said: bytes, signature: bytes) -> bool:
        """Whether somebody of the cluster has signed exactly this."""
        return self._signing_key is None or hmac.compare_digest(signature, self.signature(said).encode())


OPEN = Credentials(None, "")


def credentials_of(config: ClusterConfig) -> Credentials:
    """Raises ConfigError where nobody has decided to do without a secret."""
    return Credentials(secret_of(config), config.cluster)


def secret_of(config: ClusterConfig) -> bytes | None:
    """The cluster's secret; None where it was decided to do without. Raises ConfigError where nobody has decided."""
    if config.cluster_secret is not None:
        return config.cluster_secret.get_secret_value().encode()
    if not config.kv.open_to_strangers:
        raise ConfigError(
            "cluster_secret: there is none, and whoever reaches a port could read and write the pool and give orders to every node. Set "
            f"{SECRET_VARIABLE} to the same 16 characters or more for every process, or kv.open_to_strangers to true"
        )
    return None


def _derive(secret: bytes, purpose: str, cluster: str) -> bytes:
    return hmac.digest(secret, f"springtide/{purpose}/{cluster}".encode(), "sha256")
