"""`springtide ca`: makes, shows and replaces the authority of a cluster."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from deploy.ca.authority import Authority, fingerprint_of, name_of, revoked
from deploy.ca.identity import Identity, issue_to
from deploy.local.rundir import this_machines
from springtide.errors import ConfigError

_console = Console(highlight=False, soft_wrap=True)


def init(directory: Path, cluster: str) -> None:
    """Raises ConfigError where there is one already."""
    authority = Authority.create(directory, cluster)
    _console.print(f"made an authority in {directory}: sha256:{authority.fingerprint}")


def show(directory: Path | None, url: str) -> None:
    authority = _open(directory, url)
    _console.print(f"{authority.directory}")
    for root in authority.roots:
        until = root.not_valid_after_utc.date()
        role = "signs" if root is authority.roots[0] else "is believed"
        _console.print(f"  {name_of(root)} {role}, until {until}: sha256:{fingerprint_of(root.public_key())}")
    for name, at in sorted(revoked(authority.directory).items()):
        _console.print(f"  {name} is revoked, as it was at {datetime.datetime.fromtimestamp(at, datetime.UTC):%Y-%m-%d %H:%M} UTC")


def issue(name: str, addresses: Sequence[str], out: Path, directory: Path | None, url: str) -> None:
    issue_to(Identity(out), _open(directory, url), name, addresses or [name])
    _console.print(f"wrote tls.crt, tls.key and ca.crt to {out}")


def revoke(name: str, directory: Path | None, url: str) -> None:
    _open(directory, url).revoke(name)
    _console.print(
        f"{name} is shut out of the head: what was signed for it until now is not renewed. Other processes believe that until "
        "`springtide ca rotate` and, once every other machine has followed, `springtide ca retire`"
    )


def rotate(directory: Path | None, url: str) -> None:
    before = _open(directory, url)
    following = before.rotate()
    _console.print(
        f"sha256:{following.fingerprint} signs from now on; sha256:{before.fingerprint} is believed until `springtide ca retire`, which is "
        "for when every machine has followed. Tokens made before go on to their ends"
    )


def retire(directory: Path | None, url: str) -> None:
    authority = _open(directory, url).retire()
    _console.print(f"sha256:{authority.fingerprint} alone is believed from now on")


def _open(directory: Path | None, url: str) -> Authority:
    """The authority that is meant. Raises Unavailable, ConfigError."""
    if directory is not None:
        return Authority.open(directory)
    record = this_machines(url, "; name the authority's --dir")
    if not record.ca_dir:
        raise ConfigError(f"the cluster at {url} has no authority of its own: it speaks in the clear, or has been given certificates")
    return Authority.open(Path(record.ca_dir))
