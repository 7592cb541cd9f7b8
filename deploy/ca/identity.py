"""Where a machine keeps the key and the certificate of its processes: a directory with the files of a Kubernetes TLS secret."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from deploy.ca.authority import Authority, addresses_in, new_request, writing
from springtide.config import TlsConfig, replace_private


@dataclass(frozen=True, slots=True)
class Identity:
    """The files, whether they are there or not."""

    directory: Path

    @property
    def certificate(self) -> Path:
        return self.directory / "tls.crt"

    @property
    def key(self) -> Path:
        return self.directory / "tls.key"

    @property
    def authorities(self) -> Path:
        return self.directory / "ca.crt"

    @property
    def settings(self) -> TlsConfig:
        return TlsConfig(certificate=self.certificate, key=self.key, ca=self.authorities)

    def install(self, key: bytes, chain: bytes, authorities: bytes) -> None:
        """Writes them, each in one step, and what is believed first: until the last is written, the processes go on with the old ones.
        Raises ConfigError."""
        with writing(self.directory):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path, content in ((self.authorities, authorities), (self.key, key), (self.certificate, chain)):
                replace_private(path, content.decode())

    def is_there(self, addresses: Sequence[str], authorities: bytes, now: datetime.datetime) -> bool:
        """Whether they are, name these addresses, believe these authorities, and need not be renewed yet. A key and another's certificate,
        as a machine that lost its power between the two may find them, are not."""
        try:
            own = x509.load_pem_x509_certificates(self.certificate.read_bytes())[0]
            if own.public_key() != self._private_key().public_key():
                return False
        except (OSError, ValueError, IndexError):
            return False
        fresh = own.not_valid_after_utc - now > (own.not_valid_after_utc - own.not_valid_before_utc) / 3
        return fresh and set(addresses) <= addresses_in(own) and self.authorities.is_file() and self.authorities.read_bytes() == authorities

    def sign(self, said: bytes) -> bytes:
        """The signature of the present key. Raises OSError, ValueError."""
        return self._private_key().sign(said, ec.ECDSA(hashes.SHA256()))

    def _private_key(self) -> ec.EllipticCurvePrivateKey:
        key = serialization.load_pem_private_key(self.key.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key


def issue_to(identity: Identity, authority: Authority, name: str, addresses: Sequence[str]) -> None:
    """Has the authority of this machine make a new key and certificate for it."""
    key, request = new_request(addresses)
    identity.install(key, authority.issue(name, request), authority.bundle)
