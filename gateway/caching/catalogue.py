"""Context caches in Valkey: their records, contents, tags and meters, what they take of a tenant's budget, and when each is looked at next.
All that outlives gateways is here.

Whoever looks at one claims it for a time, and looks again sooner or later: a claim that is not given back comes to nothing by itself.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis.asyncio as redis

from gateway.caching.context import CacheId, ContextCache, Kept, Meter, Status, cache_from, cache_json
from gateway.records import Order, Records
from springtide.blocks import PackedKeys, packed
from springtide.errors import Unavailable
from springtide.ids import BlockKey
from springtide.valkey import UNREACHABLE

KEEP_ENDED_S = 24 * 3600.0
"""How long a cache that has ended can still be extended."""
_LOOK_S = 60.0
"""For its keeper to see the end of one that marks have made."""
_PARTS = ("content", "keys", "meter")
"""What is kept of a cache beside its record."""

# KEYS: due. ARGV: now, claimed until, how many at most.
_CLAIM = """
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[3])
for _, name in ipairs(found) do redis.call('ZADD', KEYS[1], ARGV[2], name) end
return found
"""
# KEYS: due. ARGV: name, the time until which it was claimed, the time to write ('': none, it is not due any more). 0: not ours any more.
_PUT_BACK = """
local until_ = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not until_ or tonumber(until_) ~= tonumber(ARGV[2]) then return 0 end
if ARGV[3] == '' then redis.call('ZREM', KEYS[1], ARGV[1]) else redis.call('ZADD', KEYS[1], ARGV[3], ARGV[1]) end
return 1
"""
# KEYS: due, what was last seen. ARGV: now, what is seen now. Everything is due when the two differ.
_STORES_CHANGED = """
if redis.call('GET', KEYS[2]) == ARGV[2] then return 0 end
redis.call('SET', KEYS[2], ARGV[2])
local names = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. ARGV[1], '+inf')
for _, name in ipairs(names) do redis.call('ZADD', KEYS[1], ARGV[1], name) end
return #names
"""
# KEYS: the tenant's budget, a hash of 'TOKENS UNTIL' by cache. ARGV: now, cache, its tokens, its end, the budget.
# Returns -1 when it is granted, else when the next of the tenant's caches ends.
_SPEND = """
local now, taken, next_end = tonumber(ARGV[1]), 0, math.huge
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
    local tokens, until_ = string.match(all[i + 1], '^(%S+) (%S+)$')
    if tonumber(until_) <= now then
        redis.call('HDEL', KEYS[1], all[i])
    elseif all[i] ~= ARGV[2] then
        taken = taken + tonumber(tokens)
        next_end = math.min(next_end, tonumber(until_))
    end
end
if taken + tonumber(ARGV[3]) > tonumber(ARGV[5]) then return {taken, next_end == math.huge and '0' or string.format('%.3f', next_end)} end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3] .. ' ' .. ARGV[4])
return {-1, '0'}
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """A cache that is ours to look at, until then."""

    tenant: str
    cache_id: CacheId
    until: float


@dataclass(frozen=True, slots=True)
class OverBudget:
    """A tenant's caches take so many tokens already; the next of them ends then."""

    taken_tokens: int
    next_end: float


@dataclass(frozen=True, slots=True)
class Tag:
    """A name that a tenant has given to a cache, and may give to another."""

    tag: str
    cache_id: CacheId
    created_at: float


class Catalogue:
    """The context caches of a cluster. Times are Unix seconds. Whatever Valkey fails with becomes Unavailable."""

    def __init__(self, client: redis.Redis, cluster: str) -> None:
        self._client = client
        self._prefix = f"{cluster}:context-cache"
        self._caches = Records(client, cluster, "context-cache")
        self._marked = Records(client, cluster, "context-cache-mark")
        self._tags = Records(client, cluster, "context-cache-tag")
        self._due = f"{self._prefix}-due"
        self._claim = client.register_script(_CLAIM)
        self._put_back = client.register_script(_PUT_BACK)
        self._stores_changed = client.register_script(_STORES_CHANGED)
        self._spend = client.register_script(_SPEND)

    # ---- caches ----

    async def add(self, cache: ContextCache, keys: Sequence[BlockKey], content: bytes, now: float) -> bool:
        """False: there is one of its id already. It is due at once. `keys` are those of its blocks; `content` is empty for marks'."""
        ttl_ms = max(1, round(_record_ttl_s(cache, now) * 1000))
        async with self._client.pipeline(transaction=False) as pipeline:
            pipeline.set(self._key("keys", cache.tenant, cache.cache_id), packed(keys), px=ttl_ms)
            if content:
                pipeline.set(self._key("content", cache.tenant, cache.cache_id), content, px=ttl_ms)
            await _asked(pipeline.execute())
        added = await self._records(cache.cache_id).create(cache.tenant, cache.cache_id, cache_json(cache), cache.created_at, ttl_ms / 1000)
        if added:
            await self.wake(cache.tenant, cache.cache_id, now)
        return added

    async def get(self, tenant: str, cache_id: str) -> ContextCache | None:
        """None: there is none, or it is another tenant's."""
        value = await self._records(cache_id).get(tenant, cache_id)
        return None if value is None else cache_from(tenant, value)

    async def content(self, tenant: str, cache_id: str) -> bytes | None:
        return cast("bytes | None", await _asked(self._client.get(self._key("content", tenant, cache_id))))

    async def keys(self, tenant: str, cache_id: str) -> Sequence[BlockKey]:
        """Empty when there is none."""
        return PackedKeys(await _asked(self._client.get(self._key("keys", tenant, cache_id))) or b"")

    async def page(self, tenant: str, *, order: Order, after: str, before: str, limit: int) -> tuple[list[ContextCache], bool]:
        """Up to so many of those that were created by request, and whether there are more."""
        records, more = await self._caches.page(tenant, order=order, after=after, before=before, limit=limit)
        return [cache_from(tenant, record.value) for record in records], more

    async def change(self, tenant: str, cache_id: str, change: Callable[[ContextCache], ContextCache], now: float) -> ContextCache | None:
        """What it is after its owner's `change`, which may be called again. It is due at once. None: there is none."""
        changed = await self._update(tenant, cache_id, change, now)
        if changed is not None:
            ttl_ms = max(1, round(_record_ttl_s(changed, now) * 1000))
            async with self._client.pipeline(transaction=False) as pipeline:
                for part in _PARTS:
                    pipeline.pexpire(self._key(part, tenant, cache_id), ttl_ms)
                await _asked(pipeline.execute())
            await self.wake(tenant, CacheId(cache_id), now)
        return changed

    async def keep(self, tenant: str, cache_id: CacheId, kept: Kept, now: float) -> ContextCache | None:
        """Writes down what its keeper has found out. None: there is none any more."""

        def change(cache: ContextCache) -> ContextCache:
            # Extended meanwhile: it has not ended.
            stale = kept.status is Status.INACTIVE and not cache.marked and not cache.expired(now)
            return cache if stale else cache.with_kept(kept)

        return await self._update(tenant, cache_id, change, now)

    async def remove(self, tenant: str, cache_id: str) -> ContextCache | None:
        """What it was. None: there is none."""
        cache = await self.get(tenant, cache_id)
        if cache is None or not await self._records(cache_id).delete(tenant, cache_id):
            return None
        async with self._client.pipeline(transaction=False) as pipeline:
            pipeline.delete(*(self._key(part, tenant, cache_id) for part in _PARTS))
            pipeline.hdel(self._budget_key(tenant), cache_id)
            pipeline.zrem(self._due, _name(tenant, cache_id))
            await _asked(pipeline.execute())
        return cache

    async def _update(self, tenant: str, cache_id: str, change: Callable[[ContextCache], ContextCache], now: float) -> ContextCache | None:
        value = await self._records(cache_id).update(
            tenant,
            cache_id,
            lambda value: cache_json(change(cache_from(tenant, value))),
            lambda value: _record_ttl_s(cache_from(tenant, value), now),
        )
        return None if value is None else cache_from(tenant, value)

    # ---- budgets ----

    async def spend(self, cache: ContextCache, budget_tokens: int, now: float) -> OverBudget | None:
        """Counts the cache against its tenant's budget until it ends; None: there is room for it. Counting it again counts once."""
        answer = await _asked(
            self._spend(
                keys=[self._budget_key(cache.tenant)],
                args=[_number(now), cache.cache_id, cache.budgeted_tokens, _number(cache.expires_at), budget_tokens],
            )
        )
        taken, next_end = int(answer[0]), float(answer[1])
        return None if taken < 0 else OverBudget(taken, next_end)

    async def ending_by(self, tenant: str, cache_ids: Sequence[str], end: float) -> list[str]:
        """Those of these caches that count against the tenant's budget and end by then."""
        if not cache_ids:
            return []
        entries = await _asked(self._client.hmget(self._budget_key(tenant), list(cache_ids)))
        found = zip(cache_ids, entries, strict=True)
        return [cache_id for cache_id, entry in found if entry is not None and float(_text(entry).split()[1]) <= end]

    # ---- meters ----

    async def meter(self, tenant: str, cache_id: str) -> Meter:
        counts = await _asked(self._client.hgetall(self._key("meter", tenant, cache_id)))
        return Meter(**{_text(name): int(count) for name, count in counts.items()})

    async def count(self, cache: ContextCache, now: float, **counts: int) -> None:
        """Adds to its meter: Meter's fields."""
        key = self._key("meter", cache.tenant, cache.cache_id)
        async with self._client.pipeline(transaction=False) as pipeline:
            for name, count in counts.items():
                pipeline.hincrby(key, name, count)
            pipeline.pexpire(key, max(1, round(_record_ttl_s(cache, now) * 1000)))
            await _asked(pipeline.execute())

    # ---- tags ----

    async def tag(self, tenant: str, tag: Tag) -> None:
        """Names a cache, in place of what the name was for."""
        value = {"cache_id": tag.cache_id, "created_at": tag.created_at}
        if not await self._tags.create(tenant, tag.tag, value, tag.created_at):
            await self._tags.update(tenant, tag.tag, lambda _: value)

    async def tagged(self, tenant: str, tag: str) -> Tag | None:
        value = await self._tags.get(tenant, tag)
        return None if value is None else Tag(tag, CacheId(value["cache_id"]), value["created_at"])

    async def tags(self, tenant: str, *, order: Order, after: str, before: str, limit: int) -> tuple[list[Tag], bool]:
        records, more = await self._tags.page(tenant, order=order, after=after, before=before, limit=limit)
        return [Tag(record.record_id, CacheId(record.value["cache_id"]), record.value["created_at"]) for record in records], more

    async def untag(self, tenant: str, tag: str) -> bool:
        """Whether there was one."""
        return await self._tags.delete(tenant, tag)

    # ---- who looks when ----

    async def wake(self, tenant: str, cache_id: CacheId, now: float) -> None:
        """It is to be looked at at once, even if somebody looks at it already."""
        await _asked(self._client.zadd(self._due, {_name(tenant, cache_id): now}))

    async def claim(self, now: float, until: float, most: int) -> list[Claim]:
        """Claims those that are due, up to so many."""
        names = await _asked(self._claim(keys=[self._due], args=[_number(now), _number(until), most]))
        return [Claim(tenant, CacheId(cache_id), until) for tenant, cache_id in map(json.loads, names)]

    async def renew(self, claim: Claim, until: float) -> Claim | None:
        """None: it is not ours any more, or somebody wants it to be looked at anew."""
        return Claim(claim.tenant, claim.cache_id, until) if await self._back(claim, _number(until)) else None

    async def put_back(self, claim: Claim, due_at: float | None) -> None:
        """Gives up the claim. None: nothing is due any more."""
        await self._back(claim, "" if due_at is None else _number(due_at))

    async def stores_changed(self, stores: str, now: float) -> int:
        """Says which stores there are, in a word that is the same when they are. Where the word is another than the last one said, by
        whichever gateway, every cache is due at once; returns how many that are."""
        return int(await _asked(self._stores_changed(keys=[self._due, f"{self._prefix}-stores"], args=[_number(now), stores])))

    async def _back(self, claim: Claim, due_at: str) -> bool:
        name = _name(claim.tenant, claim.cache_id)
        return bool(await _asked(self._put_back(keys=[self._due], args=[name, _number(claim.until), due_at])))

    # ---- where it is ----

    def _records(self, cache_id: str) -> Records:
        return self._marked if cache_id.startswith(MARK_PREFIX) else self._caches

    def _key(self, part: str, tenant: str, cache_id: str) -> str:
        return f"{self._prefix}-{part}:{len(tenant)}:{tenant}:{cache_id}"

    def _budget_key(self, tenant: str) -> str:
        return f"{self._prefix}-budget:{tenant}"


MARK_PREFIX = "mark-"
"""Of the ids of caches that marks have made; others begin otherwise."""


async def _asked(command: Awaitable[Any]) -> Any:
    try:
        return await command
    except UNREACHABLE as error:
        raise Unavailable(f"Valkey cannot be asked: {error}", code="records_unreachable") from None


def _record_ttl_s(cache: ContextCache, now: float) -> float:
    return max(0.0, cache.expires_at - now) + (_LOOK_S if cache.marked else KEEP_ENDED_S)


def _name(tenant: str, cache_id: str) -> str:
    return json.dumps([tenant, cache_id])


def _number(value: float) -> str:
    return format(value, ".17g")


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
