"""What the front end remembers beyond its own life: records of one kind in Valkey/Redis, each of an owner, listed in the order in which
they were made, some of which expire."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import redis.asyncio as redis

from springtide.errors import InvalidRequest, Unavailable
from springtide.valkey import asked, text_of

Order = Literal["asc", "desc"]
_MOST_TRIES = 16
_AT_ONCE = 100

# What follows keeps an owner's books: the index (KEYS[1], a sorted set of ids), the bytes (KEYS[2], a hash from ids to bytes, '' being all
# of them together) and the ends (KEYS[3], a sorted set of the ids of those that expire, by when, in milliseconds). The records' keys begin
# with ARGV[1], those of their parts with the further KEYS. Books last as long as any record in them, parts as long as their record.
# `do_also` does the commands in ARGV from the n-th on, each after the number of its words.
_BOOKS = """
local prefix, index, bytes, ends = ARGV[1], KEYS[1], KEYS[2], KEYS[3]
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local function all_bytes() return tonumber(redis.call('HGET', bytes, '')) or 0 end
local function bytes_of(id) return tonumber(redis.call('HGET', bytes, id)) or 0 end
local function forget(id)
  redis.call('DEL', prefix .. id)
  for i = 4, #KEYS do redis.call('DEL', KEYS[i] .. id) end
  redis.call('ZREM', index, id)
  redis.call('ZREM', ends, id)
  redis.call('HINCRBY', bytes, '', 0 - bytes_of(id))
  redis.call('HDEL', bytes, id)
end
local function forget_expired()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', '(' .. now_ms, 'LIMIT', 0, 100)) do forget(id) end
end
local function keep_books()
  local count = redis.call('ZCARD', index)
  if count == 0 then redis.call('DEL', bytes) return end
  local last = redis.call('ZRANGE', ends, -1, -1, 'WITHSCORES')[2]
  for i = 1, 3 do
    if redis.call('ZCARD', ends) < count then redis.call('PERSIST', KEYS[i]) else redis.call('PEXPIREAT', KEYS[i], last + 1000) end
  end
end
local function do_also(n)
  while ARGV[n] do
    redis.call(unpack(ARGV, n + 1, n + ARGV[n]))
    n = n + 1 + ARGV[n]
  end
end
"""

# ARGV: prefix, id, the value, time made, milliseconds to live (0: for ever), the value it must have now ('': there must be none), its
# bytes, how many records and bytes the owner may have (0: any), and what is to be done with it. Returns 1, 0 when it has another value, -1
# when it is larger than all may be, or -2 when nothing can make room for it.
_PUT = f"""
{_BOOKS}
local id, value, ttl_ms, size = ARGV[2], ARGV[3], tonumber(ARGV[5]), tonumber(ARGV[7])
local most, most_bytes = tonumber(ARGV[8]), tonumber(ARGV[9])
local now = redis.call('GET', prefix .. id) or ''
if now ~= ARGV[6] then return 0 end
if most_bytes > 0 and size > most_bytes then return -1 end
if now == '' then forget(id) end
forget_expired()
local new, more = now == '', size - bytes_of(id)
while new and most > 0 and redis.call('ZCARD', index) >= most or most_bytes > 0 and all_bytes() + more > most_bytes do
  local first = redis.call('ZRANGE', ends, 0, 1)
  local goes = first[1] == id and first[2] or first[1]
  if not goes then return -2 end
  forget(goes)
end
do_also(10)
for i = 4, #KEYS do
  if ttl_ms == 0 then redis.call('PERSIST', KEYS[i] .. id) else redis.call('PEXPIRE', KEYS[i] .. id, ttl_ms) end
end
if ttl_ms == 0 then
  redis.call('SET', prefix .. id, value)
  redis.call('ZREM', ends, id)
else
  redis.call('SET', prefix .. id, value, 'PX', ttl_ms)
  redis.call('ZADD', ends, now_ms + ttl_ms, id)
end
redis.call('ZADD', index, 'NX', ARGV[4], id)
redis.call('HINCRBY', bytes, '', more)
redis.call('HSET', bytes, id, size)
keep_books()
return 1
"""

# ARGV: prefix, id, the key of its place in the index, the milliseconds for which that is kept (0: not), and what is to be done where there
# is one. Returns whether there was.
_DELETE = f"""
{_BOOKS}
local there, place = redis.call('EXISTS', prefix .. ARGV[2]), redis.call('ZSCORE', index, ARGV[2])
if place and tonumber(ARGV[4]) > 0 then redis.call('SET', ARGV[3], place, 'PX', ARGV[4]) end
forget(ARGV[2])
keep_books()
if there == 1 then do_also(5) end
return there
"""

# ARGV: prefix, milliseconds to live, the place in the index, ids.
_REFRESH = f"""
{_BOOKS}
for i = 4, #ARGV do
  if redis.call('PEXPIRE', prefix .. ARGV[i], ARGV[2]) == 1 then
    redis.call('ZADD', index, 'XX', ARGV[3], ARGV[i])
    redis.call('ZADD', ends, now_ms + ARGV[2], ARGV[i])
    for part = 4, #KEYS do redis.call('PEXPIRE', KEYS[part] .. ARGV[i], ARGV[2]) end
  end
end
keep_books()
"""

# KEYS: the record, a part of it. ARGV: the most that all may be together, '' for any; then by turns a field and what is added to it.
_COUNT = """
local lasts_ms = redis.call('PTTL', KEYS[1])
if lasts_ms == -2 then return end
for i = 2, #ARGV, 2 do redis.call('HINCRBY', KEYS[2], ARGV[i], ARGV[i + 1]) end
if ARGV[1] ~= '' then
  local all, sum = redis.call('HGETALL', KEYS[2]), 0
  for i = 2, #all, 2 do sum = sum + tonumber(all[i]) end
  if sum > tonumber(ARGV[1]) then
    for i = 1, #all, 2 do
      local half = math.floor(tonumber(all[i + 1]) / 2)
      if half > 0 then redis.call('HSET', KEYS[2], all[i], half) else redis.call('HDEL', KEYS[2], all[i]) end
    end
  end
end
if lasts_ms > 0 then redis.call('PEXPIRE', KEYS[2], lasts_ms) end
"""


class RecordTooLarge(InvalidRequest):
    """A record larger than all of its owner's may be together."""

    http_status = 413


class RecordsFull(InvalidRequest):
    """An owner has as many records as there may be, none of which ever expires."""

    http_status = 413


class NotListed(InvalidRequest):
    """A page is to begin or end at a record that is not there."""


Command = Sequence[str | int | float | bytes]
"""A command to Valkey, word by word."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record as it is now."""

    record_id: str
    value: dict[str, Any]


class Records:
    """Records of one kind, as JSON objects. Whatever Valkey fails with becomes Unavailable."""

    def __init__(
        self,
        client: redis.Redis,
        cluster: str,
        kind: str,
        *,
        most: int = 0,
        most_bytes: int = 0,
        bytes_of: Callable[[dict[str, Any]], int] | None = None,
        parts: Sequence[str] = (),
        places_s: float = 0.0,
    ) -> None:
        """`most` records, and `most_bytes` of them together, an owner may have: beyond, what expires first makes room for what is new. 0:
        any number. The bytes are those of the JSON, or what `bytes_of` says of a record. `parts` are names of what else there is of each
        (`part_key`), which lasts as long as the record. For `places_s` the place of one that was deleted is remembered: who deletes what
        is on a page goes on from there."""
        self._client = client
        self._kind = kind
        self._prefix = f"{cluster}:{kind}"
        self._most = most
        self._most_bytes = most_bytes
        self._bytes_of = bytes_of
        self._parts = tuple(parts)
        self._places_ms = round(places_s * 1000)
        self._put = client.register_script(_PUT)
        self._delete = client.register_script(_DELETE)
        self._refresh = client.register_script(_REFRESH)
        self._count = client.register_script(_COUNT)

    def part_key(self, part: str, owner: str, record_id: str) -> str:
        """The key of a record's part, whose type is its maker's choice."""
        return f"{self._prefix}-{part}:{len(owner)}:{owner}:{record_id}"

    async def create(
        self,
        owner: str,
        record_id: str,
        value: dict[str, Any],
        made_at: float,
        ttl_s: float | None = None,
        *,
        bounded: bool = True,
        also: Sequence[Command] = (),
    ) -> bool:
        """False: there is one of this id already. `made_at` (seconds) is its place in lists. `also` is done in the same step. Raises
        RecordTooLarge and RecordsFull, unless it is not `bounded`."""
        return await self._write(owner, record_id, value, made_at, ttl_s, expected="", bounded=bounded, also=also)

    async def get(self, owner: str, record_id: str) -> dict[str, Any] | None:
        """None: there is none, or no more, or it is another owner's."""
        raw = await self._raw(owner, record_id)
        return None if raw is None else json.loads(raw)

    async def get_all(self, owner: str, record_ids: Sequence[str]) -> list[dict[str, Any] | None]:
        """`get` of each."""
        raws = await asked(self._client.mget([self._key(owner, record_id) for record_id in record_ids])) if record_ids else []
        return [None if raw is None else json.loads(raw) for raw in raws]

    async def refresh(self, owner: str, record_ids: Sequence[str], made_at: float, ttl_s: float) -> None:
        """Has those that there are live for `ttl_s` from now, and as long as others that were made at `made_at`."""
        await asked(self._refresh(keys=self._books(owner), args=[self._key(owner, ""), round(ttl_s * 1000), made_at, *record_ids]))

    async def update(
        self,
        owner: str,
        record_id: str,
        change: Callable[[dict[str, Any]], dict[str, Any] | None],
        ttl_s: float | Callable[[dict[str, Any]], float | None] | None = None,
        also: Callable[[dict[str, Any]], Sequence[Command]] = lambda _: (),
    ) -> dict[str, Any] | None:
        """What it is after `change`, which may be called again when another process was quicker, and whose None leaves it as it is. None:
        there is none. `ttl_s`, which may follow from what it is then, counts from now; None: for ever. `also`, which follows from what it
        is then too, is done in the same step. Raises RecordTooLarge and RecordsFull."""
        for _ in range(_MOST_TRIES):
            raw = await self._raw(owner, record_id)
            if raw is None:
                return None
            changed = change(json.loads(raw))
            if changed is None:
                return dict(json.loads(raw))
            lasts_s = ttl_s(changed) if callable(ttl_s) else ttl_s
            if await self._write(owner, record_id, changed, 0.0, lasts_s, expected=raw, also=also(changed)):
                return changed
        raise Unavailable(f"{record_id} is changed by many at once; try again", code="conflict")

    async def count(self, owner: str, record_id: str, part: str, counts: Mapping[str, int], most: int | None = None) -> None:
        """Adds to the fields of a part that is a hash of whole numbers. Where there is no record, nothing is counted. When they are more
        than `most` together all are halved, so that what was counted last weighs most, and what is counted no more goes."""
        keys = [self._key(owner, record_id), self.part_key(part, owner, record_id)]
        words = [word for field, count in counts.items() for word in (field, count)]
        await asked(self._count(keys=keys, args=["" if most is None else most, *words]))

    async def delete(self, owner: str, record_id: str, *, also: Sequence[Command] = ()) -> bool:
        """Whether there was one. `also` is done in the same step."""
        place = (self._place_key(owner, record_id), self._places_ms)
        return bool(await asked(self._delete(keys=self._books(owner), args=[self._key(owner, ""), record_id, *place, *_words(also)])))

    async def standing(self, owner: str) -> tuple[int, int]:
        """How many records the owner has, and how many bytes they have together."""
        index, num_bytes, *_ = self._books(owner)
        async with self._client.pipeline(transaction=False) as pipeline:
            pipeline.zcard(index)
            pipeline.hget(num_bytes, "")
            count, together = await asked(pipeline.execute())
        return int(count), int(together or 0)

    async def page(
        self,
        owner: str,
        *,
        order: Order = "desc",
        after: str = "",
        before: str = "",
        limit: int = 20,
        wanted: Callable[[dict[str, Any]], bool] | None = None,
    ) -> tuple[list[Record], bool]:
        """Up to `limit` of the records, or of those that are `wanted`, and whether there are more. `after` and `before` are ids, both
        exclusive, in the order asked for. Raises NotListed when there is none of that id, nor was one lately."""
        found = await asked(self._client.zrange(self._books(owner)[0], 0, -1, withscores=True))
        places = {text_of(name): score for name, score in found}
        low, high = (after, before) if order == "asc" else (before, after)
        params = ("after", "before") if order == "asc" else ("before", "after")
        line = [(place, record_id) for record_id, place in places.items()]
        begin = bisect_right(line, await self._place(owner, places, params[0], low)) if low else 0
        end = bisect_left(line, await self._place(owner, places, params[1], high)) if high else len(line)
        ids = [record_id for _, record_id in line[begin:end]]
        return await self._read(owner, ids if order == "asc" else ids[::-1], limit, wanted)

    async def _place(self, owner: str, places: Mapping[str, float], param: str, record_id: str) -> tuple[float, str]:
        """Where it is in the index, or was: those of the same score are in the order of their ids."""
        place = places.get(record_id)
        if place is None and self._places_ms:
            place = await asked(self._client.get(self._place_key(owner, record_id)))
        if place is None:
            message = f"{param}: there is no {self._kind} {record_id[:100]!r}, or no more, at which a page could begin or end"
            raise NotListed(message, param=param, code="invalid_value")
        return float(place), record_id

    async def _read(
        self, owner: str, ids: Sequence[str], limit: int, wanted: Callable[[dict[str, Any]], bool] | None
    ) -> tuple[list[Record], bool]:
        found: list[Record] = []
        for begin in range(0, len(ids), _AT_ONCE):
            names = ids[begin : begin + _AT_ONCE]
            for record_id, value in zip(names, await self.get_all(owner, names), strict=True):
                # Those that have expired since are still in the index.
                if value is None or (wanted is not None and not wanted(value)):
                    continue
                if len(found) == limit:
                    return found, True
                found.append(Record(record_id, value))
        return found, False

    async def _raw(self, owner: str, record_id: str) -> str | None:
        raw = await asked(self._client.get(self._key(owner, record_id)))
        return None if raw is None else text_of(raw)

    async def _write(
        self,
        owner: str,
        record_id: str,
        value: dict[str, Any],
        made_at: float,
        ttl_s: float | None,
        expected: str,
        *,
        bounded: bool = True,
        also: Sequence[Command] = (),
    ) -> bool:
        lifetime_ms = 0 if ttl_s is None else max(1, round(ttl_s * 1000))
        raw = json.dumps(value, separators=(",", ":"))
        num_bytes = len(raw) if self._bytes_of is None else self._bytes_of(value)
        bounds = (self._most, self._most_bytes) if bounded else (0, 0)
        args: Command = [self._key(owner, ""), record_id, raw, made_at, lifetime_ms, expected, num_bytes, *bounds, *_words(also)]
        outcome = int(await asked(self._put(keys=self._books(owner), args=args)))
        if outcome == -1:
            raise RecordTooLarge(f"{record_id} has {num_bytes} bytes, and all of {owner!r} may have {self._most_bytes}", code="too_large")
        if outcome == -2:
            message = f"{self._kind}: {owner!r} has as many as there may be ({self._most}, or {self._most_bytes} bytes): delete some"
            raise RecordsFull(message, code="too_many")
        return outcome == 1

    def _key(self, owner: str, record_id: str) -> str:
        return f"{self._prefix}:{len(owner)}:{owner}:{record_id}"

    def _place_key(self, owner: str, record_id: str) -> str:
        return self.part_key("place", owner, record_id)

    def _books(self, owner: str) -> list[str]:
        books = [f"{self._prefix}-{book}:{owner}" for book in ("of", "bytes-of", "ends-of")]
        return [*books, *(self.part_key(part, owner, "") for part in self._parts)]


def _words(commands: Sequence[Command]) -> list[str | int | float | bytes]:
    return [word for command in commands for word in (len(command), *command)]
