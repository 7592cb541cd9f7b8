"""What the front end remembers beyond its own life: records of one kind in Valkey/Redis, each of an owner, listed in the order in which
they were made, some of which expire."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import redis.asyncio as redis

from springtide.errors import InvalidRequest, Unavailable
from springtide.valkey import UNREACHABLE

Order = Literal["asc", "desc"]
_MOST_TRIES = 16
_AT_ONCE = 100

# What follows keeps an owner's books: the index (KEYS[1], a sorted set of ids) and the sizes (KEYS[2], a hash from ids to bytes, '' being
# all of them together). The records' keys begin with `prefix`.
_FORGET = """
local function forget(id)
  redis.call('DEL', prefix .. id)
  redis.call('ZREM', KEYS[1], id)
  redis.call('HINCRBY', KEYS[2], '', -(tonumber(redis.call('HGET', KEYS[2], id)) or 0))
  redis.call('HDEL', KEYS[2], id)
end
"""

# ARGV: prefix, id, the value, time made, milliseconds to live (0: for ever), the value it must have now ('': there must be none; '*':
# whatever it has), bytes that the owner may have (0: any). Returns 1, 0 when it has another value, or -1 when it is larger than all may be.
_PUT = f"""
local prefix, id, value, budget = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[7])
{_FORGET}
local key = prefix .. id
local now = redis.call('GET', key)
if ARGV[6] == '' and now then return 0 end
if ARGV[6] ~= '' and ARGV[6] ~= '*' and now ~= ARGV[6] then return 0 end
if budget > 0 and #value > budget then return -1 end
if ARGV[5] == '0' then redis.call('SET', key, value) else redis.call('SET', key, value, 'PX', ARGV[5]) end
redis.call('ZADD', KEYS[1], 'NX', ARGV[4], id)
local total = redis.call('HINCRBY', KEYS[2], '', #value - (tonumber(redis.call('HGET', KEYS[2], id)) or 0))
redis.call('HSET', KEYS[2], id, #value)
for i = 1, 4 do
  local oldest = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  if redis.call('EXISTS', prefix .. oldest) == 1 then break end
  forget(oldest)
end
while budget > 0 and tonumber(redis.call('HGET', KEYS[2], '')) > budget do
  local oldest = redis.call('ZRANGE', KEYS[1], 0, 1)
  forget(oldest[1] == id and oldest[2] or oldest[1])
end
return 1
"""

# ARGV: prefix, ids. Returns how many there were.
_DELETE = f"""
local prefix, there = ARGV[1], 0
{_FORGET}
for i = 2, #ARGV do
  there = there + redis.call('EXISTS', prefix .. ARGV[i])
  forget(ARGV[i])
end
return there
"""

# ARGV: prefix, milliseconds to live, the place in the index, ids.
_REFRESH = """
for i = 4, #ARGV do
  if redis.call('PEXPIRE', ARGV[1] .. ARGV[i], ARGV[2]) == 1 then redis.call('ZADD', KEYS[1], 'XX', ARGV[3], ARGV[i]) end
end
"""


class RecordTooLarge(InvalidRequest):
    """A record larger than all of its owner's may be together."""

    http_status = 413


@dataclass(frozen=True, slots=True)
class Record:
    """A record as it is now."""

    record_id: str
    value: dict[str, Any]


class Records:
    """Records of one kind, as JSON objects. Whatever Valkey fails with becomes Unavailable."""

    def __init__(self, client: redis.Redis, cluster: str, kind: str, most_bytes: int = 0) -> None:
        """`most_bytes` of JSON an owner may have: beyond, the oldest records make room for new ones. 0: any number."""
        self._client = client
        self._prefix = f"{cluster}:{kind}"
        self._most_bytes = most_bytes
        self._put = client.register_script(_PUT)
        self._delete = client.register_script(_DELETE)
        self._refresh = client.register_script(_REFRESH)

    async def create(self, owner: str, record_id: str, value: dict[str, Any], made_at: float, ttl_s: float | None = None) -> bool:
        """False: there is one of this id already. `made_at` (seconds) is its place in lists. Raises RecordTooLarge."""
        return await self._write(owner, record_id, value, made_at, ttl_s, expected="")

    async def get(self, owner: str, record_id: str) -> dict[str, Any] | None:
        """None: there is none, or no more, or it is another owner's."""
        raw = await self._raw(owner, record_id)
        return None if raw is None else json.loads(raw)

    async def get_all(self, owner: str, record_ids: Sequence[str]) -> list[dict[str, Any] | None]:
        """`get` of each."""
        try:
            found = await self._client.mget([self._key(owner, record_id) for record_id in record_ids]) if record_ids else []
        except UNREACHABLE as error:
            raise _unreachable(error) from None
        return [None if raw is None else json.loads(raw) for raw in found]

    async def refresh(self, owner: str, record_ids: Sequence[str], made_at: float, ttl_s: float) -> None:
        """Has those that there are live for `ttl_s` from now, and as long as others that were made at `made_at`."""
        try:
            await self._refresh(keys=[self._index(owner)], args=[self._key(owner, ""), round(ttl_s * 1000), made_at, *record_ids])
        except UNREACHABLE as error:
            raise _unreachable(error) from None

    async def update(
        self,
        owner: str,
        record_id: str,
        change: Callable[[dict[str, Any]], dict[str, Any] | None],
        ttl_s: float | Callable[[dict[str, Any]], float] | None = None,
    ) -> dict[str, Any] | None:
        """What it is after `change`, which may be called again when another process was quicker, and whose None leaves it as it is. None:
        there is none. `ttl_s`, which may follow from what it is then, counts from now; None: for ever."""
        for _ in range(_MOST_TRIES):
            raw = await self._raw(owner, record_id)
            if raw is None:
                return None
            changed = change(json.loads(raw))
            if changed is None:
                return dict(json.loads(raw))
            if await self._write(owner, record_id, changed, 0.0, ttl_s(changed) if callable(ttl_s) else ttl_s, expected=raw):
                return changed
        raise Unavailable(f"{record_id} is changed by many at once; try again", code="conflict")

    async def delete(self, owner: str, record_id: str) -> bool:
        """Whether there was one."""
        try:
            return bool(await self._forget(owner, record_id))
        except UNREACHABLE as error:
            raise _unreachable(error) from None

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
            await self._forget(owner, *gone)
        return found, False

    async def _forget(self, owner: str, *record_ids: str) -> int:
        return int(await self._delete(keys=self._books(owner), args=[self._key(owner, ""), *record_ids]))

    async def _raw(self, owner: str, record_id: str) -> str | None:
        try:
            raw = await self._client.get(self._key(owner, record_id))
        except UNREACHABLE as error:
            raise _unreachable(error) from None
        return raw.decode() if isinstance(raw, bytes) else raw

    async def _write(self, owner: str, record_id: str, value: dict[str, Any], made_at: float, ttl_s: float | None, expected: str) -> bool:
        lifetime_ms = 0 if ttl_s is None else max(1, round(ttl_s * 1000))
        raw = json.dumps(value, separators=(",", ":"))
        args: list[str | int | float] = [self._key(owner, ""), record_id, raw, made_at, lifetime_ms, expected, self._most_bytes]
        try:
            outcome = int(await self._put(keys=self._books(owner), args=args))
        except UNREACHABLE as error:
            raise _unreachable(error) from None
        if outcome < 0:
            raise RecordTooLarge(f"{record_id} has {len(raw)} bytes, and all of {owner!r} may have {self._most_bytes}", code="too_large")
        return outcome == 1

    def _key(self, owner: str, record_id: str) -> str:
        return f"{self._prefix}:{len(owner)}:{owner}:{record_id}"

    def _index(self, owner: str) -> str:
        return f"{self._prefix}-of:{owner}"

    def _books(self, owner: str) -> list[str]:
        return [self._index(owner), f"{self._prefix}-bytes-of:{owner}"]


def _unreachable(error: Exception) -> Unavailable:
    return Unavailable(f"Valkey cannot be asked: {error}", code="records_unreachable")
