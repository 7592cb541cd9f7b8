"""What the processes of one cluster know each other by: certificates, a token on every call, and signatures on what they leave where others
could write.

Token and signatures are derived from the cluster's secret, and neither gives it away. Without certificates the token travels in the clear,
so whoever can listen to the network can use it: it keeps out those who can reach a port, not those who can tap a wire. With them it says
that a process is of this cluster, where the certificate may say no more than that it is of the same owner.
"""

from __future__ import annotations

import hmac

from springtide.config import SECRET_VARIABLE, ClusterConfig, is_loopback
from springtide.errors import ConfigError
from springtide.tls import Tls, cluster_tls


class Credentials:
    """The credentials of one cluster. Without a secret (`OPEN`) every call is admitted and every record believed."""

    def __init__(self, secret: bytes | None, cluster: str, tls: Tls | None = None, plaintext_allowed: bool = False) -> None:
        self.tls = tls
        self.plaintext_allowed = plaintext_allowed or secret is None
        """Whether to listen without TLS where other machines could come in."""
        self._token = None if secret is None else _derive(secret, "call", cluster).hex()
        self._signing_key = None if secret is None else _derive(secret, "record", cluster)

    @property
    def token(self) -> str | None:
        """What to show with a call; None: nothing."""
        return self._token

    def check_host(self, host: str) -> None:
        """Raises ConfigError where other machines could come in without TLS, and nobody has allowed that."""
        if self.tls is None and not self.plaintext_allowed and not is_loopback(host):
            raise ConfigError(
                f"tls.certificate: there is none, and processes at {host} would be spoken with in the clear. Set tls.certificate, tls.key "
                "and tls.ca, let `springtide up --address` make them, or set tls.plaintext_allowed to true on a network of your own"
            )

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
    return Credentials(secret_of(config), config.cluster, cluster_tls(config.tls), config.tls.plaintext_allowed)


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


def valkey_password(secret: bytes, cluster: str) -> str:
    """Of the embedded Valkey: a certificate of the cluster's authority, which others may have, too, is not enough to be let in."""
    return _derive(secret, "valkey", cluster).hex()


def _derive(secret: bytes, purpose: str, cluster: str) -> bytes:
    return hmac.digest(secret, f"springtide/{purpose}/{cluster}".encode(), "sha256")
