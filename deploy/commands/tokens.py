"""`springtide token`: makes, lists and revokes the join tokens of the cluster that runs here."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console

from deploy.ca.authority import first_fingerprint
from deploy.commands.store import parse_ttl
from deploy.join.tokens import TokenBook
from deploy.local.rundir import ClusterRecord, this_machines
from springtide.errors import ConfigError
from springtide.valkey import ValkeyClient

_console = Console(highlight=False, soft_wrap=True)
_notes = Console(highlight=False, soft_wrap=True, stderr=True)


def create(ttl: str, url: str, as_json: bool) -> None:
    """Prints the token alone to standard output, so that it can be put into a variable."""
    record = _found(url)
    fingerprint = first_fingerprint(Path(record.tls["ca"]).read_bytes())
    asyncio.run(_create(fingerprint, parse_ttl(ttl), record, as_json))


def show(url: str) -> None:
    asyncio.run(_show(_found(url)))


def revoke(token_id: str, url: str) -> None:
    """Raises ConfigError where there is no such token."""
    asyncio.run(_revoke(token_id, _found(url)))


async def _create(fingerprint: str, ttl_s: float, record: ClusterRecord, as_json: bool) -> None:
    async with _book(record) as book:
        token = await book.create(fingerprint, ttl_s, time.time())
    if as_json:
        _console.print_json(json.dumps({"token": str(token), "join": record.join_address, "expires_in_s": ttl_s}))
        return
    _console.print(str(token))
    _notes.print(f"It holds for {ttl_s:g} s. On another machine: springtide node --join {record.join_address} --token TOKEN")


async def _show(record: ClusterRecord) -> None:
    async with _book(record) as book:
        tokens = await book.all()
    for token in tokens:
        _console.print(f"{token.token_id}  for {token.expires_at - time.time():.0f} s more")
    if not tokens:
        _console.print("there are none")


async def _revoke(token_id: str, record: ClusterRecord) -> None:
    async with _book(record) as book:
        if not await book.revoke(token_id.partition(".")[0]):
            raise ConfigError(f"there is no token {token_id.partition('.')[0]!r}: `springtide token list` shows those that hold")


@asynccontextmanager
async def _book(record: ClusterRecord) -> AsyncIterator[TokenBook]:
    async with ValkeyClient.from_url(record.redis_url, socket_timeout=5.0, socket_connect_timeout=5.0) as client:
        yield TokenBook(client, record.cluster, record.credentials)


def _found(url: str) -> ClusterRecord:
    """Raises Unavailable, ConfigError where nobody can join."""
    record = this_machines(url, ": tokens are made at a cluster's head; name its --url")
    if not record.join_address:
        raise ConfigError(f"the cluster at {url} is of this machine alone: start it with --address, where other machines reach this one")
    return record
