"""The authority of a cluster: who believes what it has signed, while one key takes the place of another, and after."""

from __future__ import annotations

import asyncio
import datetime
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

from deploy.ca.authority import Authority, authority_in, fingerprint_of, key_pem, new_request
from deploy.ca.identity import Identity, issue_to
from deploy.cli import app
from springtide.errors import ConfigError, InvalidRequest

ADDRESSES = ("127.0.0.1", "localhost")
NOW = datetime.datetime.now(datetime.UTC)
HOUR = datetime.timedelta(hours=1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "ca", "springtide")


def test_an_authority_made_elsewhere_is_named_by_what_it_signs_as_it_names_its_key(tmp_path: Path) -> None:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "made elsewhere")])
    by_another_hash = x509.SubjectKeyIdentifier(b"0123456789abcdefghij")
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    builder = builder.not_valid_before(NOW).not_valid_after(NOW + datetime.timedelta(days=1))
    own = builder.add_extension(by_another_hash, critical=False).sign(key, hashes.SHA256())
    (tmp_path / "authority.pem").write_bytes(key_pem(key) + own.public_bytes(serialization.Encoding.PEM))
    signed = x509.load_pem_x509_certificate(Authority.open(tmp_path).issue("a-node", new_request(ADDRESSES)[1]))
    named = signed.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    assert named.key_identifier == by_another_hash.digest


def issued(authority: Authority, directory: Path, name: str = "a-node", addresses: tuple[str, ...] = ADDRESSES) -> Identity:
    identity = Identity(directory)
    issue_to(identity, authority, name, addresses)
    return identity


async def shake_hands(server: Identity, client: Identity, name: str = "127.0.0.1") -> None:
    """Over TLS with certificates on both sides, as processes of the cluster do. Raises ssl.SSLError, or ConnectionError."""
    there, here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    there.verify_mode = ssl.CERT_REQUIRED
    for context, identity in ((there, server), (here, client)):
        context.load_cert_chain(identity.certificate, identity.key)
        context.load_verify_locations(identity.authorities)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"welcome\n")
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=there)
    async with listening:
        host, port = listening.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(host, port, ssl=here, server_hostname=name)
        try:
            if await reader.readline() != b"welcome\n":
                raise ConnectionError("refused")
        finally:
            writer.close()


async def test_what_it_has_signed_is_good_on_both_sides_and_for_its_addresses_only(authority: Authority, tmp_path: Path) -> None:
    one, other = issued(authority, tmp_path / "one"), issued(authority, tmp_path / "other", addresses=("192.0.2.1",))
    await shake_hands(one, other)
    with pytest.raises(ssl.SSLError):
        await shake_hands(other, one)
    assert one.is_there(ADDRESSES, authority.bundle, NOW) and not one.is_there(("192.0.2.1",), authority.bundle, NOW)


async def test_what_another_authority_has_signed_is_refused_on_both_sides(authority: Authority, tmp_path: Path) -> None:
    stranger = issued(Authority.create(tmp_path / "other-ca", "springtide"), tmp_path / "stranger")
    ours = issued(authority, tmp_path / "ours")
    half_ours = issued(authority, tmp_path / "half-ours")
    half_ours.certificate.write_bytes(stranger.certificate.read_bytes())
    half_ours.key.write_bytes(stranger.key.read_bytes())
    for server, client in ((ours, half_ours), (half_ours, ours), (ours, stranger)):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await shake_hands(server, client)


async def test_while_it_rotates_everybody_believes_everybody_in_whatever_order_they_learn_of_it(
    authority: Authority, tmp_path: Path
) -> None:
    generations = [issued(authority, tmp_path / "0")]
    for number in (1, 2):
        authority = authority.rotate()
        generations.append(issued(Authority.open(authority.directory), tmp_path / str(number)))
    for server in generations:
        for client in generations:
            await shake_hands(server, client)


async def test_after_it_was_retired_an_older_key_is_worth_nothing(authority: Authority, tmp_path: Path) -> None:
    old = issued(authority, tmp_path / "old")
    new = issued(authority.rotate().retire(), tmp_path / "new")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await shake_hands(new, old)
    assert Authority.open(authority.directory).vouches_for(old.certificate.read_bytes()) is None
    assert Authority.open(authority.directory).vouches_for(new.certificate.read_bytes()) is not None


def test_certificates_are_to_be_renewed_when_a_third_of_their_life_is_left_or_the_authority_is_another(
    authority: Authority, tmp_path: Path
) -> None:
    identity = issued(authority, tmp_path / "node")
    assert identity.is_there(ADDRESSES, authority.bundle, NOW + datetime.timedelta(days=59))
    assert not identity.is_there(ADDRESSES, authority.bundle, NOW + datetime.timedelta(days=61))
    assert not identity.is_there(ADDRESSES, authority.rotate().bundle, NOW)


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[datetime.timedelta], None]:
    """Forward, or back, of what an authority goes by. OpenSSL's stays the machine's, as elsewhere."""

    def set_clock(step: datetime.timedelta) -> None:
        monkeypatch.setattr("deploy.ca.authority._now", lambda: datetime.datetime.now(datetime.UTC) + step)

    return set_clock


async def test_what_an_authority_issues_that_is_an_hour_ahead_is_good_elsewhere_when_it_is_that_late_there(
    authority: Authority, set_clock: Callable[[datetime.timedelta], None], tmp_path: Path
) -> None:
    elsewhere = issued(authority, tmp_path / "elsewhere")
    set_clock(HOUR)
    ahead = issued(authority, tmp_path / "ahead")
    assert authority.vouches_for(ahead.certificate.read_bytes()) is not None
    set_clock(0 * HOUR)
    assert authority.vouches_for(ahead.certificate.read_bytes()) is None
    for server, client in ((elsewhere, ahead), (ahead, elsewhere)):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await shake_hands(server, client)


def test_certificates_are_over_an_hour_early_or_late_and_those_of_the_last_hour_not_valid_yet(
    authority: Authority, set_clock: Callable[[datetime.timedelta], None]
) -> None:
    """docs/chaos.md"""
    _, request = new_request(ADDRESSES)
    set_clock(-24 * HOUR)
    ends_soon, ended = (authority.issue("a-node", request, life) for life in (24.5 * HOUR, 23.5 * HOUR))
    set_clock(0 * HOUR)
    fresh = authority.issue("a-node", request)
    for step, good in ((0, (True, False, True)), (1, (False, False, True)), (-1, (True, True, False))):
        set_clock(step * HOUR)
        assert tuple(authority.vouches_for(chain) is not None for chain in (ends_soon, ended, fresh)) == good, step


def test_a_key_without_its_certificate_is_not_there(authority: Authority, tmp_path: Path) -> None:
    """As when the power went between the two."""
    identity, other = issued(authority, tmp_path / "node"), issued(authority, tmp_path / "other")
    identity.key.write_bytes(other.key.read_bytes())
    assert not identity.is_there(ADDRESSES, authority.bundle, NOW)
    identity.key.unlink()
    assert not identity.is_there(ADDRESSES, authority.bundle, NOW)


def test_a_node_cannot_make_itself_an_authority(authority: Authority) -> None:
    key, request = new_request(ADDRESSES)
    own = x509.load_pem_x509_certificate(authority.issue("a-node", request))
    assert not own.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    with pytest.raises(InvalidRequest, match="no certificate request"):
        authority.issue("a-node", key)


def test_keys_are_this_users_alone(authority: Authority, tmp_path: Path) -> None:
    identity = issued(authority, tmp_path / "node")
    assert stat.S_IMODE((authority.directory / "authority.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE(identity.key.stat().st_mode) == 0o600


def test_an_authority_is_found_by_its_fingerprint(authority: Authority) -> None:
    following = authority.rotate()
    for wanted in (authority, following):
        found = authority_in(following.bundle, wanted.fingerprint)
        assert found is not None and fingerprint_of(x509.load_pem_x509_certificate(found).public_key()) == wanted.fingerprint
    assert authority_in(following.bundle, "0" * 64) is None


def test_wrong_directories_are_named(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has a certificate authority already"):
        Authority.create(authority.directory, "springtide")
    with pytest.raises(ConfigError, match="springtide ca init"):
        Authority.open(tmp_path / "nowhere")
    (authority.directory / "authority.pem").write_text("rubbish")
    with pytest.raises(ConfigError, match="is no certificate authority"):
        Authority.open(authority.directory)


def test_what_cannot_be_written_is_named(authority: Authority, tmp_path: Path) -> None:
    for name in ("authority.pem.tmp", "revoked.json.tmp"):
        (authority.directory / name).mkdir()
    for change in (authority.rotate, authority.retire, lambda: authority.revoke("a-node")):
        with pytest.raises(ConfigError, match=f"{authority.directory}.* cannot be written"):
            change()
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=f"{directory}.* cannot be written"):
            issued(authority, directory)
        with pytest.raises(ConfigError, match=f"{directory}.* cannot be written"):
            Authority.create(directory, "springtide")


def test_a_name_that_no_certificate_can_have_is_named(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'münchen\.example' is no address for a certificate"):
        issued(authority, tmp_path / "one", addresses=("münchen.example",))
    issued(authority, tmp_path / "one", addresses=("xn--mnchen-3ya.example",))


def test_the_command_makes_issues_rotates_and_retires(tmp_path: Path) -> None:
    directory, out = tmp_path / "ca", tmp_path / "prometheus"

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["ca", *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    run("init", str(directory))
    first = Authority.open(directory).fingerprint
    run("issue", "prometheus", "--out", str(out), "--address", "192.0.2.7", "--dir", str(directory))
    assert Identity(out).is_there(("192.0.2.7",), Authority.open(directory).bundle, NOW)
    run("revoke", "a-node", "--dir", str(directory))
    assert "a-node is revoked" in run("show", "--dir", str(directory))
    run("rotate", "--dir", str(directory))
    assert first in run("show", "--dir", str(directory))
    run("retire", "--dir", str(directory))
    assert first not in run("show", "--dir", str(directory))
