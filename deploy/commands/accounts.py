"""`springtide keys`, `tenants` and `usage`: the register of API keys and tenants, and what was used, in the cluster's Valkey."""

from __future__ import annotations

import asyncio
import csv
import datetime
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.commands.locate import Where, locate
from deploy.commands.store import parse_ttl
from gateway.accounts.allowance import KEY_PREFIX, LIMITS, MAX_NAME_LENGTH, Allowance, ApiKey, digest_of, new_key, new_key_id, shown_end
from gateway.accounts.register import Register
from gateway.accounts.usage import Counts, DayUsage, UsageBook, today
from springtide.errors import ConfigError
from springtide.valkey import ValkeyClient

T = TypeVar("T")
_DEFAULT_DAYS = 30
_MAX_DAYS = 4000
COUNTS = tuple(field.name for field in fields(Counts))
_GROUPS: dict[str, Callable[[DayUsage], str]] = {
    "tenant": lambda usage: usage.row.tenant,
    "day": lambda usage: usage.day.isoformat(),
    "key": lambda usage: usage.row.key_id,
    "model": lambda usage: usage.row.model,
    "endpoint": lambda usage: usage.row.endpoint,
}
"""What usage can be shown by."""


@dataclass(frozen=True, slots=True)
class _Books:
    """What this cluster's Valkey has of accounts."""

    register: Register
    usage: UsageBook


def create_key(where: Where, tenant: str, name: str, allowance: Allowance, expires: str | None, as_json: bool, *, operator: bool) -> None:
    """Prints the key and, as it is all that there is to see of it later, its id."""
    for what, text in (("TENANT", tenant), ("--name", name)):
        if len(text) > MAX_NAME_LENGTH or (what == "TENANT" and not text):
            raise ConfigError(f"{what}: a name may have {MAX_NAME_LENGTH} characters and must have one, not {len(text)}")
    key, now = new_key(), time.time()
    expires_at = None if expires is None else now + parse_ttl(expires, "--expires")
    record = ApiKey(new_key_id(), tenant, name, shown_end(key), now, expires_at, None, allowance, operator)
    _run(where, lambda books: books.register.add_key(digest_of(key), record))
    if as_json:
        print(json.dumps({"key": key, **_shown(record)}, indent=2))
        return
    Console(stderr=True).print(f"{record.key_id} of {escape(tenant)}; the key is shown this once:", highlight=False)
    print(key)


def list_keys(where: Where, tenant: str | None, everything: bool, as_json: bool) -> None:
    now = time.time()
    found = sorted(_run(where, lambda books: books.register.keys()).values(), key=lambda key: key.made_at)
    wanted = [key for key in found if tenant in (None, key.tenant) and (everything or key.usable(now))]
    if as_json:
        print(json.dumps([_shown(key) for key in wanted], indent=2))
        return
    table = _table("id", "tenant", "name", "ends", "made", "state", "may have")
    for key in wanted:
        cells = (key.key_id, key.tenant, key.name, f"…{key.ends_with}", _date(key.made_at), _state(key, now), _may(key))
        table.add_row(*map(escape, cells))
    Console().print(table)


def revoke_key(where: Where, named: str) -> None:
    """`named`: its id, or the key. Raises UnknownKey."""
    name = digest_of(named) if named.startswith(KEY_PREFIX) else named
    key = _run(where, lambda books: books.register.revoke(name, time.time()))
    Console().print(f"{key.key_id} of {escape(key.tenant)} is revoked", highlight=False)


def set_tenant(where: Where, tenant: str, allowance: Allowance) -> None:
    if not 1 <= len(tenant) <= MAX_NAME_LENGTH:
        raise ConfigError(f"TENANT: a name has 1 to {MAX_NAME_LENGTH} characters, not {len(tenant)}")
    _run(where, lambda books: books.register.set_tenant(tenant, allowance))
    Console().print(f"{escape(tenant)}: {_limits(allowance) or 'no limits'}", highlight=False)


def list_tenants(where: Where, as_json: bool) -> None:
    found = _run(where, lambda books: books.register.tenants())
    if as_json:
        print(json.dumps({tenant: asdict(allowance) for tenant, allowance in sorted(found.items())}, indent=2))
        return
    table = _table("tenant", "may have")
    for tenant, allowance in sorted(found.items()):
        table.add_row(escape(tenant), escape(_limits(allowance)))
    Console().print(table)


def show_usage(where: Where, tenant: str | None, days: tuple[datetime.date | None, datetime.date | None], by: str, written: str) -> None:
    """`written`: table, csv or json. Raises ConfigError when the days or what it is to be shown by make no sense."""
    groups = [part.strip() for part in by.split(",")]
    if unknown := [group for group in groups if group not in _GROUPS]:
        raise ConfigError(f"--by: usage is shown by {', '.join(_GROUPS)}, not {unknown[0]!r}")
    last = days[1] or today()
    first = days[0] or last - datetime.timedelta(days=_DEFAULT_DAYS)
    if not 0 <= (last - first).days <= _MAX_DAYS:
        raise ConfigError(f"--from {first} --to {last}: the days must be in order, and {_MAX_DAYS} at most")

    async def read(books: _Books) -> list[DayUsage]:
        return [usage async for usage in books.usage.read(first, last) if tenant in (None, usage.row.tenant)]

    rows = _grouped(_run(where, read), groups)
    if written == "json":
        print(json.dumps(rows, indent=2))
    elif written == "csv":
        writer = csv.DictWriter(sys.stdout, [*groups, "batch", *COUNTS])
        writer.writeheader()
        writer.writerows(rows)
    else:
        table = _table(*groups, "")
        for count in COUNTS:
            table.add_column(count.replace("_", " "), justify="right")
        for row in rows:
            table.add_row(*(escape(row[group]) for group in groups), "batch" if row["batch"] else "", *(str(row[name]) for name in COUNTS))
        Console().print(table)


def _grouped(found: list[DayUsage], groups: list[str]) -> list[dict[str, Any]]:
    sums: dict[tuple[Any, ...], Counts] = {}
    for usage in found:
        place = (*(_GROUPS[group](usage) for group in groups), usage.row.batch)
        sums.setdefault(place, Counts()).add(usage.counts)
    return [{**dict(zip([*groups, "batch"], place, strict=True)), **asdict(counts)} for place, counts in sorted(sums.items())]


def _run(where: Where, command: Callable[[_Books], Awaitable[T]]) -> T:
    async def run() -> T:
        async with _open(where) as books:
            return await command(books)

    return asyncio.run(run())


@asynccontextmanager
async def _open(where: Where) -> AsyncIterator[_Books]:
    """Raises Unavailable when there is no such cluster, or its Valkey does not answer."""
    located = await locate(where)
    async with ValkeyClient.from_url(located.redis_url, socket_timeout=5.0, socket_connect_timeout=5.0) as client:
        yield _Books(Register(client, located.cluster), UsageBook(client, located.cluster))


def _shown(key: ApiKey) -> dict[str, Any]:
    return asdict(key)


def _state(key: ApiKey, now: float) -> str:
    if key.revoked_at is not None:
        return f"revoked {_date(key.revoked_at)}"
    if key.expires_at is None:
        return "usable"
    return f"until {_date(key.expires_at)}" if key.usable(now) else f"expired {_date(key.expires_at)}"


def _may(key: ApiKey) -> str:
    return f"an operator's; {_limits(key.allowance)}" if key.operator else _limits(key.allowance)


def _limits(allowance: Allowance) -> str:
    parts = [f"models {', '.join(allowance.models)}"] if allowance.models else []
    limits: Mapping[str, int | None] = {name: getattr(allowance, name) for name in LIMITS}
    return "; ".join([*parts, *(f"{limit} {name.replace('_', ' ')}" for name, limit in limits.items() if limit is not None)])


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
