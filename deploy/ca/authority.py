"""The certificate authority of a cluster: a key in a directory, what it signs, and how another key takes its place.

An authority that follows another is signed by that one, too. A certificate comes with these links, so whoever believes the old authority
believes what the new one has signed, and whoever was told of both believes either: machines may learn of it in any order.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import ipaddress
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from springtide.config import replace_private
from springtide.errors import ConfigError, InvalidRequest

AUTHORITY_LIFE = datetime.timedelta(days=3650)
CERTIFICATE_LIFE = datetime.timedelta(days=90)
_CLOCKS_DIFFER = datetime.timedelta(minutes=5)
"""Certificates are good from so long before they were made."""
_FILE, _PUBLIC_FILE, _REVOKED_FILE = "authority.pem", "ca.crt", "revoked.json"
_MACHINES = "springtide machines"
"""The organizational unit in the certificates of machines that were let in, and in no other's."""


@dataclass(frozen=True, slots=True)
class _Signer:
    """A key, and a name for it."""

    key: ec.EllipticCurvePrivateKey
    name: x509.Name
    key_id: x509.SubjectKeyIdentifier
    """As its own certificate has it: whoever made that may have hashed the key in another way, and what it signs must name it alike."""

    @classmethod
    def new(cls, cluster: str) -> _Signer:
        key = ec.generate_private_key(ec.SECP256R1())
        # Each has a name of its own, by which a certificate tells which of them has signed it.
        name = f"{cluster} authority {fingerprint_of(key.public_key())[:8]}"
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[-64:])])
        return cls(key, subject, x509.SubjectKeyIdentifier.from_public_key(key.public_key()))

    def sign(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, until: datetime.datetime, *extensions: x509.ExtensionType
    ) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_now() - _CLOCKS_DIFFER)
            .not_valid_after(until)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self.key_id), critical=False)
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints | x509.KeyUsage))
        return builder.sign(self.key, hashes.SHA256())

    def vouch_for(self, other: _Signer) -> x509.Certificate:
        """A certificate that the other one is an authority; of itself: that it is one."""
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        until = _now() + AUTHORITY_LIFE
        return self.sign(other.name, other.key.public_key(), until, x509.BasicConstraints(ca=True, path_length=None), usage)


@dataclass(frozen=True, slots=True)
class Authority:
    """An authority as it is in its directory now. What changes it writes the file anew, in one step."""

    directory: Path
    signer: _Signer
    roots: tuple[x509.Certificate, ...]
    """Of the authorities that are believed, the present one first."""
    links: tuple[x509.Certificate, ...]
    """The present one signed by the one before, that one by the one before it, and so on."""

    @classmethod
    def create(cls, directory: Path, cluster: str) -> Authority:
        """A new one. Raises ConfigError where there is one already, or none can be written."""
        if (directory / _FILE).exists():
            raise ConfigError(f"{directory} has a certificate authority already: `springtide ca rotate` replaces it")
        signer = _Signer.new(cluster)
        authority = cls(directory, signer, (signer.vouch_for(signer),), ())
        authority._write()
        return authority

    @classmethod
    def open(cls, directory: Path) -> Authority:
        """The one that is there. Raises ConfigError."""
        path = directory / _FILE
        try:
            text = path.read_bytes()
            key = serialization.load_pem_private_key(text, None)
            certificates = x509.load_pem_x509_certificates(text)
        except OSError as error:
            raise ConfigError(f"cannot read the certificate authority {path}: {error.strerror}; `springtide ca init` makes one") from None
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"{path} is no certificate authority: {error}") from None
        roots = tuple(each for each in certificates if each.issuer == each.subject)
        if not roots or not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != roots[0].public_key():
            raise ConfigError(f"{path} is no certificate authority: its first certificate is not of its key")
        links = tuple(each for each in certificates if each.issuer != each.subject)
        return cls(directory, _Signer(key, roots[0].subject, _key_id(roots[0])), roots, links)

    @property
    def bundle(self) -> bytes:
        """PEM: the authorities that are believed, the present one first."""
        return b"".join(map(_pem, self.roots))

    @property
    def fingerprint(self) -> str:
        """Of the present one."""
        return fingerprint_of(self.roots[0].public_key())

    def issue(self, name: str, request: bytes, life: datetime.timedelta = CERTIFICATE_LIFE, *, machine: bool = False) -> bytes:
        """PEM: a certificate chain for who has made the request (PEM), to be called `name`, with the addresses that are asked for.
        `machine`: of one that was let in, and by this certificate may come back and have it renewed. Raises InvalidRequest."""
        key, addresses = _asked(request)
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        both_sides = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        no_authority = x509.BasicConstraints(ca=False, path_length=None)
        until = min(_now() + life, self.roots[0].not_valid_after_utc)
        unit = [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, _MACHINES)] if machine else []
        subject = x509.Name([*unit, x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        signed = self.signer.sign(subject, key, until, no_authority, usage, both_sides, addresses)
        return b"".join(map(_pem, (signed, *self.links)))

    def vouches_for(self, chain: bytes) -> x509.Certificate | None:
        """The first certificate of the chain (PEM), where one of the authorities that are believed has signed it and it is good now."""
        try:
            own = x509.load_pem_x509_certificates(chain)[0]
        except (ValueError, IndexError):
            return None
        for root in self.roots:
            try:
                own.verify_directly_issued_by(root)
            except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
                continue
            good = own.not_valid_before_utc <= _now() <= own.not_valid_after_utc and not is_revoked(own, revoked(self.directory))
            return own if good else None
        return None

    def revoke(self, name: str) -> None:
        """What was made for a machine of this name until now is worth nothing to the head any more; what is made for another from here on
        is. Raises ConfigError."""
        path = self.directory / _REVOKED_FILE
        with writing(path):
            replace_private(path, json.dumps({**revoked(self.directory), name: _now().timestamp()}))

    def rotate(self) -> Authority:
        """Another key takes the place of the present one, which is believed until `retire`. Raises ConfigError."""
        signer = _Signer.new(name_of(self.roots[0]).rpartition(" authority")[0])
        links = (self.signer.vouch_for(signer), *self.links)
        following = Authority(self.directory, signer, (signer.vouch_for(signer), *self.roots), links)
        following._write()
        return following

    def retire(self) -> Authority:
        """None but the present one is believed any more. Raises ConfigError."""
        alone = Authority(self.directory, self.signer, self.roots[:1], ())
        alone._write()
        return alone

    def _write(self) -> None:
        certificates = b"".join(map(_pem, (*self.roots, *self.links)))
        with writing(self.directory):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_private(self.directory / _FILE, (key_pem(self.signer.key) + certificates).decode())
            (self.directory / _PUBLIC_FILE).write_bytes(self.bundle)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What cannot be written there is a ConfigError that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def revoked(directory: Path) -> dict[str, float]:
    """The names that `Authority.revoke` was told there, each with the time, in seconds since 1970. Raises ConfigError."""
    path = directory / _REVOKED_FILE
    try:
        return {str(name): float(at) for name, at in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no list of revoked machines, which `springtide ca revoke` writes: {error}") from None


def is_revoked(certificate: x509.Certificate, names: Mapping[str, float]) -> bool:
    """Whether it was made before its name was revoked. `names`: as `revoked` returns them."""
    at = names.get(name_of(certificate))
    return at is not None and (certificate.not_valid_before_utc + _CLOCKS_DIFFER).timestamp() <= at


def new_request(addresses: Sequence[str]) -> tuple[bytes, bytes]:
    """A new key, and a certificate request for it with these IP addresses and host names. Both PEM. Raises ConfigError for what is none of
    them."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([_general_name(address) for address in addresses])
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).add_extension(names, critical=False)
    return key_pem(key), request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def authority_in(bundle: bytes, fingerprint: str) -> bytes | None:
    """PEM: the certificate in a bundle whose key has this fingerprint."""
    try:
        certificates = x509.load_pem_x509_certificates(bundle)
    except ValueError:
        return None
    return next((_pem(each) for each in certificates if fingerprint_of(each.public_key()) == fingerprint), None)


def _key_id(certificate: x509.Certificate) -> x509.SubjectKeyIdentifier:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        return x509.SubjectKeyIdentifier.from_public_key(certificate.public_key())


def first_fingerprint(bundle: bytes) -> str:
    """Of the first authority of a bundle: the one that signs now. Raises ValueError for what is none."""
    return fingerprint_of(x509.load_pem_x509_certificates(bundle)[0].public_key())


def name_of(certificate: x509.Certificate) -> str:
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def is_machines(certificate: x509.Certificate) -> bool:
    """Whether it is of a machine that was let in."""
    return any(unit.value == _MACHINES for unit in certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME))


def addresses_in(certificate: x509.Certificate) -> frozenset[str]:
    """The IP addresses and host names that it is good for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    return frozenset(_texts(names))


def addresses_asked_for(request: bytes) -> frozenset[str]:
    """Those that a certificate request (PEM) names. Raises InvalidRequest."""
    return frozenset(_texts(_asked(request)[1]))


def _asked(request: bytes) -> tuple[ec.EllipticCurvePublicKey, x509.SubjectAlternativeName]:
    """The key and the addresses of a certificate request (PEM). Raises InvalidRequest."""
    try:
        asked = x509.load_pem_x509_csr(request)
        addresses = asked.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        key, signed = asked.public_key(), asked.is_signature_valid
    except (ValueError, UnsupportedAlgorithm, x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise InvalidRequest(f"this is no certificate request with addresses: {error}", param="request") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not signed:
        raise InvalidRequest("a certificate request must be signed with the elliptic curve key that it is for", param="request")
    other = next((each for each in addresses if not isinstance(each, x509.IPAddress | x509.DNSName)), None)
    if other is not None:
        raise InvalidRequest(f"a certificate is for IP addresses and host names, not for {other!r}", param="request")
    return key, addresses


def _texts(names: x509.SubjectAlternativeName) -> list[str]:
    return [*map(str, names.get_values_for_type(x509.IPAddress)), *names.get_values_for_type(x509.DNSName)]


def fingerprint_of(key: object) -> str:
    """SHA-256 of a public key, 64 hexadecimal digits; as of kubeadm's `--discovery-token-ca-cert-hash`."""
    assert hasattr(key, "public_bytes")
    public: bytes = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(public).hexdigest()


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(address)
    except ValueError:
        raise ConfigError(f"{address!r} is no address for a certificate, which has host names in ASCII (`xn--...`)") from None


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
