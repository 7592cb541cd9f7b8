"""Batches as they are remembered, and who looks after each: records, the list of those that are open, and leases, in Valkey."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import redis.asyncio as redis

from gateway.accounts.allowance import Caller
from gateway.batches.batch import Batch
from gateway.batches.files import Files
from gateway.records import Records
from springtide.clock import Clock
from springtide.errors import InvalidRequest, Overloaded
from springtide.ids import new_id
from springtide.valkey import asked

MOST_OPEN = 100
"""Batches of a tenant that are not over."""
MOST_KNOWN = 10_000
"""Batches of a tenant: beyond, those that ended first are forgotten."""
KEPT_S = 30 * 24 * 3600.0
"""How long a batch is known after its end."""
LEASE_S = 10.0
_SAFE_SHARE = 0.9
"""Of a lease, what its holder counts on: clocks go at different speeds."""
_RETRY_S = 30.0
_ANY_NUMBER = 1 << 53

# KEYS: the open batches, the tenant's. ARGV: batch, its entry, how many the tenant may have. Whether it is open.
_OPEN = """
if redis.call('HLEN', KEYS[2]) >= tonumber(ARGV[3]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], 0)
return 1
"""
_CLOSE = "for _, key in ipairs(KEYS) do redis.call('HDEL', key, ARGV[1]) end"

# KEYS: the tenant's open batches. ARGV: batch, its lines, how many all may have. Counts them and returns -1, or where they are too many
# counts nothing and returns how many the others have.
_COUNT_LINES = """
local all, others = redis.call('HGETALL', KEYS[1]), 0
for i = 1, #all, 2 do
  if all[i] ~= ARGV[1] then others = others + tonumber(all[i + 1]) end
end
if others + tonumber(ARGV[2]) > tonumber(ARGV[3]) then return others end
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
return -1
"""

# KEYS: the lease. ARGV: whose it is to be, milliseconds. Extends it if it is ours.
_RENEW = "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('PEXPIRE', KEYS[1], ARGV[2]) or 0"
_RELEASE = "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1]) or 0"


class BatchNotThere(InvalidRequest):
    """There is no such batch, or it is another tenant's."""

    http_status = 404


class BatchIsOver(InvalidRequest):
    http_status = 409


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch that is not over."""

    batch_id: str
    tenant: str
    made_at: float


@dataclass(slots=True)
class Lease:
    """The right to look after a batch."""

    batch: OpenBatch
    until: float
    """On this process's clock: earlier than others may have it."""


class BatchDesk:
    """All tenants' batches."""

    def __init__(self, client: redis.Redis, cluster: str, directory: Path, files: Files, holder: str, clock: Clock) -> None:
        """`directory`, which all gateways share, has a directory for each open batch. `holder` is this gateway's name in leases."""
        self._client = client
        self._records = Records(client, cluster, "batch", most=MOST_KNOWN)
        self._all_open = f"{cluster}:batches-open"
        """A hash: batch id -> [made at, tenant]. Of each tenant's there is another one: batch id -> lines."""
        self._lease_prefix = f"{cluster}:batch-lease:"
        self._directory = directory
        self._files = files
        self._holder = holder
        self._clock = clock
        self._open = client.register_script(_OPEN)
        self._close = client.register_script(_CLOSE)
        self._count_lines = client.register_script(_COUNT_LINES)
        self._renew = client.register_script(_RENEW)
        self._release = client.register_script(_RELEASE)
        self.changed = asyncio.Event()
        """Set when a batch was made here: who looks after them need not wait for its next look."""

    def directory(self, batch_id: str) -> Path:
        """Of an open batch: its input and its results."""
        return self._directory / batch_id

    def input(self, batch_id: str) -> Path:
        return self.directory(batch_id) / "input.jsonl"

    # ---- for clients ----

    async def create(
        self,
        caller: Caller,
        endpoint: str,
        input_file_id: str,
        window: str,
        window_s: int,
        metadata: dict[str, str] | None,
        now: float,
    ) -> Batch:
        """A new batch. Raises FileNotThere, FileTooLarge when the tenant's files leave no room for its output, and Overloaded when the
        tenant has too many that are not over."""
        tenant = caller.tenant
        stored = await self._files.get(tenant, input_file_id)
        await self._files.room(tenant)
        batch = Batch(new_id("batch"), tenant, endpoint, stored.file_id, window, int(now), int(now) + window_s, metadata)
        of_key = caller.of_key.batch_tokens_per_minute or 0
        batch = replace(batch, key_id=caller.key_id, most_lines=caller.batch_lines or 0, tokens_per_minute=of_key)
        # In this order: one that is listed and not there is dropped from the list in time, one that is not listed would never be run.
        arguments: list[str | int] = [batch.batch_id, json.dumps([now, tenant]), MOST_OPEN]
        if not await asked(self._open(keys=[self._all_open, self._open_of(tenant)], args=arguments)):
            message = f"{MOST_OPEN} batches of this tenant are not over yet, as many as there may be"
            raise Overloaded(message, retry_after_s=_RETRY_S, reason="too_many_batches")
        await self._files.link(stored.file_id, self.input(batch.batch_id))
        await self._records.create(tenant, batch.batch_id, batch.to_record(), made_at=now)
        self.changed.set()
        return batch

    async def get(self, tenant: str, batch_id: str) -> Batch:
        """Raises BatchNotThere."""
        record = await self._records.get(tenant, batch_id)
        if record is None:
            raise self._not_there(batch_id)
        return Batch.from_record(record)

    async def page(self, tenant: str, *, after: str, limit: int) -> tuple[list[Batch], bool]:
        """Up to `limit` of the tenant's batches, the latest first, and whether there are more."""
        records, more = await self._records.page(tenant, after=after, limit=limit)
        return [Batch.from_record(record.value) for record in records], more

    async def cancel(self, tenant: str, batch_id: str, now: int) -> Batch:
        """Raises BatchNotThere, and BatchIsOver when there is nothing left to cancel."""
        batch = await self.change(tenant, batch_id, lambda batch: batch.cancelling(now))
        if batch is None:
            raise self._not_there(batch_id)
        if not batch.cancelling_at:
            raise BatchIsOver(f"batch {batch_id!r} is {batch.status}: there is nothing to cancel", code="batch_is_over")
        self.changed.set()
        return batch

    # ---- for who looks after them ----

    async def change(self, tenant: str, batch_id: str, change: Callable[[Batch], Batch | None]) -> Batch | None:
        """What it is after `change`, whose None leaves it as it is. None: there is none."""

        def changed(record: dict[str, Any]) -> dict[str, Any] | None:
            batch = change(Batch.from_record(record))
            return None if batch is None else batch.to_record()

        def kept_s(record: dict[str, Any]) -> float | None:
            return KEPT_S if Batch.from_record(record).status.over else None

        record = await self._records.update(tenant, batch_id, changed, kept_s)
        return None if record is None else Batch.from_record(record)

    async def open(self) -> list[OpenBatch]:
        """All batches that are not over, of whichever tenant, the oldest first."""
        entries = await asked(self._client.hgetall(self._all_open))
        found = [
            OpenBatch(batch_id.decode(), tenant, made_at) for batch_id, raw in entries.items() for made_at, tenant in [json.loads(raw)]
        ]
        return sorted(found, key=lambda batch: (batch.made_at, batch.batch_id))

    async def count_lines(self, batch: Batch, lines: int) -> int | None:
        """Counts the lines of one that is open against what its tenant may have. None: they fit; else how many its others have."""
        arguments: list[str | int] = [batch.batch_id, lines, batch.most_lines or _ANY_NUMBER]
        others = int(await asked(self._count_lines(keys=[self._open_of(batch.tenant)], args=arguments)))
        return None if others < 0 else others

    async def closed(self, batch: OpenBatch) -> None:
        """The batch is over: it is in no list any more."""
        await asked(self._close(keys=[self._all_open, self._open_of(batch.tenant)], args=[batch.batch_id]))

    async def claim(self, batch: OpenBatch) -> Lease | None:
        """The right to look after it, unless somebody has it."""
        asked_at = self._clock.now()
        taken = await asked(self._client.set(self._lease_key(batch.batch_id), self._holder, nx=True, px=round(LEASE_S * 1000)))
        return Lease(batch, asked_at + _SAFE_SHARE * LEASE_S) if taken else None

    async def renew(self, lease: Lease) -> bool:
        """Whether it is still ours, then for another time. Raises Unavailable."""
        asked_at = self._clock.now()
        arguments: list[str | int] = [self._holder, round(LEASE_S * 1000)]
        ours = await asked(self._renew(keys=[self._lease_key(lease.batch.batch_id)], args=arguments))
        if ours:
            lease.until = asked_at + _SAFE_SHARE * LEASE_S
        return bool(ours)

    async def release(self, lease: Lease) -> None:
        await asked(self._release(keys=[self._lease_key(lease.batch.batch_id)], args=[self._holder]))

    def _open_of(self, tenant: str) -> str:
        return f"{self._all_open}-of:{tenant}"

    def _lease_key(self, batch_id: str) -> str:
        return self._lease_prefix + batch_id

    @staticmethod
    def _not_there(batch_id: str) -> BatchNotThere:
        return BatchNotThere(f"there is no batch {batch_id!r}", param="batch_id", code="batch_not_found")
