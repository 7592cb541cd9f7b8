"""What the front end remembers beyond its own life: records of one kind in Valkey/Redis, each of an owner, listed in the order in which
they were made, some of which expire."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import redis.asyncio as redis

from springtide.errors import Unavailable
from springtide.membership import UNREACHABLE

Order = Literal["asc", "desc"]
_MOST_TRIES = 16
_AT_ONCE = 100

# KEYS: the record, its owner's index. ARGV: the value, id, time made, milliseconds to live (0: for ever), the value it must have now
# ('': there must be none; '*': whatever it has).
_PUT = """
local now = redis.call('GET', KEYS[1])
if ARGV[5] == '' and now then return 0 end
if ARGV[5] ~= '' and ARGV[5] ~= '*' and now ~= ARGV[5] then return 0 end
if ARGV[4] == '0' then redis.call('SET', KEYS[1], ARGV[1]) else redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[4]) end
redis.call('ZADD', KEYS[2], 'NX', ARGV[3], ARGV[2])
return 1
"""


@dataclass(frozen=True, slots=True)
class Record:
    """A record as it is now."""

    record_id: str
    value: dict[str, Any]


class Records:
    """Records of one kind, as JSON objects. Whatever Valkey fails with becomes Unavailable."""

    def __init__(self, client: redis.Redis, cluster: str, kind: str) -> None:
        self._client = client
        self._prefix = f"{cluster}:{kind}"
        self._put = client.register_script(_PUT)

    async def create(self, owner: str, record_id: str, value: dict[str, Any], made_at: float, ttl_s: float | None = None) -> bool:
        """False: there is one of this id already. `made_at` (seconds) is its place in lists."""
        return await self._write(owner, record_id, value, made_at, ttl_s, expected="")

    async def get(self, owner: str, record_id: str) -> dict[str, Any] | None:
        """None: there is none, or no more, or it is another owner's."""
        raw = await self._raw(owner, record_id)
        return None if raw is None else json.loads(raw)

    async def update(
        self, owner: str, record_id: str, change: Callable[[dict[str, Any]], dict[str, Any] | None], ttl_s: float | None = None
    ) -> dict[str, Any] | None:
        """What it is after `change`, which may be called again when another process was quicker, and whose None leaves it as it is. None:
        there is none. `ttl_s` counts from now; None: for ever."""
        for _ in range(_MOST_TRIES):
            raw = await self._raw(owner, record_id)
            if raw is None:
                return None
            changed = change(json.loads(raw))
            if changed is None:
                return dict(json.loads(raw))
            if await self._write(owner, record_id, changed, 0.0, ttl_s, expected=raw):
                return changed
        raise Unavailable(f"{record_id} is changed by many at once; try again", code="conflict")

    async def delete(self, owner: str, record_id: str) -> bool:
        """Whether there was one."""
        try:
            deleted = await self._client.delete(self._key(owner, record_id))
            await self._client.zrem(self._index(owner), record_id)
        except UNREACHABLE as error:
            raise _unreachable(error) from None
        return bool(deleted)

    async def page(
        self, owner: str, *, order: Order = "desc", after: str = "", before: str = "", limit: int = 20
    ) -> tuple[list[Record], bool]:
        """Up to `limit` records, and whether there are more. `after` and `before` are ids, both exclusive, in the order asked for."""
        try:
            names = await self._client.zrange(self._index(owner), 0, -1, desc=order == "desc")
            ids = [name.decode() if isinstance(name, bytes) else str(name) for name in names]
            begin = ids.index(after) + 1 if after in ids else 0
            end = ids.index(before) if before in ids else len(ids)
            return await self._read(owner, ids[begin:end], limit)
        except UNREACHABLE as error:
            raise _unreachable(error) from None

    async def _read(self, owner: str, ids: Sequence[str], limit: int) -> tuple[list[Record], bool]:
        found: list[Record] = []
        gone: list[str] = []
        for begin in range(0, len(ids), _AT_ONCE):
            wanted = ids[begin : begin + _AT_ONCE]
            values = await self._client.mget([self._key(owner, record_id) for record_id in wanted])
            for record_id, raw in zip(wanted, values, strict=True):
                if raw is None:
                    gone.append(record_id)
                elif len(found) < limit:
                    found.append(Record(record_id, json.loads(raw)))
                else:
                    return found, True
        if gone:
            await self._client.zrem(self._index(owner), *gone)
        return found, False

    async def _raw(self, owner: str, record_id: str) -> str | None:
        try:
            raw = await self._client.get(self._key(owner, record_id))
        except UNREACHABLE as error:
            raise _unreachable(error) from None
        return raw.decode() if isinstance(raw, bytes) else raw

    async def _write(self, owner: str, record_id: str, value: dict[str, Any], made_at: float, ttl_s: float | None, expected: str) -> bool:
        lifetime_ms = 0 if ttl_s is None else max(1, round(ttl_s * 1000))
        raw = json.dumps(value, separators=(",", ":"))
        try:
            return bool(
                await self._put(
                    keys=[self._key(owner, record_id), self._index(owner)], args=[raw, record_id, made_at, lifetime_ms, expected]
                )
            )
        except UNREACHABLE as error:
            raise _unreachable(error) from None

    def _key(self, owner: str, record_id: str) -> str:
        return f"{self._prefix}:{len(owner)}:{owner}:{record_id}"

    def _index(self, owner: str) -> str:
        return f"{self._prefix}-of:{owner}"


def _unreachable(error: Exception) -> Unavailable:
    return Unavailable(f"Valkey cannot be asked: {error}", code="records_unreachable")
