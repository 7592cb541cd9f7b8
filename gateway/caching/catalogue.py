"""Context caches in Valkey: their records, contents, tags and meters, and what they take of a tenant's budget. With the agenda, all that
outlives gateways.

What a tenant has is bounded in number, ended ones included. A cache's record, what it takes of the budget, and that it is to be looked at
are written in one step: whatever fails, all of it is there or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import redis.asyncio as redis

from gateway.caching.agenda import Agenda, Errand
from gateway.caching.context import CacheId, ContextCache, Kept, Meter, Status, cache_from, cache_json
from gateway.records import Command, Order, Records
from springtide.blocks import PackedKeys, packed
from springtide.ids import BlockKey, Incarnation, NodeId
from springtide.valkey import asked, exactly, text_of

KEEP_ENDED_S = 24 * 3600.0
"""How long a cache that has ended can still be extended."""
MAX_TTL_S = 30 * 24 * 3600.0
MOST_CACHES, MOST_MARKS, MOST_TAGS = 1000, 10_000, 1000
"""Of a tenant. Caches that have ended count, and make room for new ones: first those that ended first."""
_LOOK_S = 60.0
"""For its keeper to see the end of one that marks have made."""
_MAKING_S = 30.0
"""What is taken of a budget for a cache that is not written down by then comes back."""
RECENT_USES = 64
"""Of a cache, by store: of more together, each counts half."""
_PARTS = ("content", "keys", "meter", "uses")
"""What is kept of a cache beside its record."""

# KEYS: the tenant's budget, a hash of 'TOKENS UNTIL KEY' by cache. ARGV: now, cache, its tokens, until when it counts, its API key, the
# budgets of the tenant and of the key, how many there may be whose ids begin as its does, milliseconds for which all is kept, and the ids
# that it counts in the place of. Returns -1 when it is granted, else what the tenant's others take, and the key's of these, how many they
# are, and when the next of them ends. What counts for longer already goes on doing so.
_SPEND = """
local now, taken, of_key, count, next_end, kind = tonumber(ARGV[1]), 0, 0, 0, math.huge, string.sub(ARGV[2], 1, 5)
local all, until_, instead_of = redis.call('HGETALL', KEYS[1]), ARGV[4], {}
for i = 10, #ARGV do instead_of[ARGV[i]] = true end
for i = 1, #all, 2 do
  local tokens, ends, key = string.match(all[i + 1], '^(%S+) (%S+) (.*)$')
  if tonumber(ends) <= now then
    redis.call('HDEL', KEYS[1], all[i])
  elseif all[i] == ARGV[2] then
    if tonumber(ends) > tonumber(until_) then until_ = ends end
  elseif not instead_of[all[i]] then
    taken = taken + tonumber(tokens)
    of_key = of_key + (key == ARGV[5] and tonumber(tokens) or 0)
    count = count + (string.sub(all[i], 1, 5) == kind and 1 or 0)
    next_end = math.min(next_end, tonumber(ends))
  end
end
local more = tonumber(ARGV[3])
if taken + more > tonumber(ARGV[6]) or of_key + more > tonumber(ARGV[7]) or count >= tonumber(ARGV[8]) then
  return {taken, of_key, count, next_end == math.huge and '0' or string.format('%.3f', next_end)}
end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3] .. ' ' .. until_ .. ' ' .. ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[9])
return {-1, 0, 0, '0'}
"""


@dataclass(frozen=True, slots=True)
class Budget:
    """What caches may have together."""

    tokens: int
    """All of a tenant."""
    of_key: int | None = None
    """Those that were made with one of its API keys. None: as many as the tenant's."""


@dataclass(frozen=True, slots=True)
class OverBudget:
    """A tenant's caches take so many tokens already, or there are so many of the kind; the next of all ends then."""

    taken_tokens: int
    taken_by_key: int
    """Of these, by those that were made with the same API key."""
    count: int
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
        # Those that have ended expire before all others, so no other ever makes room.
        self._caches = Records(client, cluster, "context-cache", most=MOST_CACHES, parts=_PARTS)
        self._marked = Records(client, cluster, "context-cache-mark", parts=_PARTS)
        self._tags = Records(client, cluster, "context-cache-tag", most=MOST_TAGS)
        self._spend = client.register_script(_SPEND)
        self.agenda = Agenda(client, self._prefix)

    # ---- caches ----

    async def add(self, cache: ContextCache, keys: Sequence[BlockKey], content: bytes, now: float) -> bool:
        """False: there is one of its id already. It is looked at at once. `keys` are those of its blocks; `content` is empty for marks'."""
        tenant, cache_id = cache.tenant, cache.cache_id
        parts = {"keys": packed(keys), **({"content": content} if content else {})}
        also = [*(("SET", self._key(part, tenant, cache_id), value) for part, value in parts.items()), *self._kept_up(cache, now)]
        made_at, ttl_s = cache.created_at, _record_ttl_s(cache, now)
        return await self._records(cache_id).create(tenant, cache_id, cache_json(cache), made_at, ttl_s, also=also)

    async def get(self, tenant: str, cache_id: str) -> ContextCache | None:
        """None: there is none, or it is another tenant's."""
        value = await self._records(cache_id).get(tenant, cache_id)
        return None if value is None else cache_from(tenant, value)

    async def marked(self, tenant: str, cache_ids: Sequence[str]) -> list[ContextCache]:
        """Those of these that marks have made and that are still remembered."""
        return [cache_from(tenant, value) for value in await self._marked.get_all(tenant, cache_ids) if value is not None]

    async def content(self, tenant: str, cache_id: str) -> bytes | None:
        return cast("bytes | None", await asked(self._client.get(self._key("content", tenant, cache_id))))

    async def keys(self, tenant: str, cache_id: str) -> Sequence[BlockKey]:
        """Empty when there is none."""
        return PackedKeys(await asked(self._client.get(self._key("keys", tenant, cache_id))) or b"")

    async def page(
        self, tenant: str, wanted: Callable[[ContextCache], bool], *, order: Order, after: str, before: str, limit: int
    ) -> tuple[list[ContextCache], bool]:
        """Up to so many of those that were created by request and are wanted, and whether there are more."""

        def of_record(value: Mapping[str, Any]) -> bool:
            return wanted(cache_from(tenant, value))

        records, more = await self._caches.page(tenant, order=order, after=after, before=before, limit=limit, wanted=of_record)
        return [cache_from(tenant, record.value) for record in records], more

    async def kept(self, most_tenants: int, most_each: int) -> list[ContextCache]:
        """The newest of those that were created by request, of some of the tenants that have any."""
        found: list[ContextCache] = []
        for tenant in await self.agenda.tenants(most_tenants):
            records, _ = await self._caches.page(tenant, limit=most_each)
            found += [cache_from(tenant, record.value) for record in records]
        return found

    async def change(self, tenant: str, cache_id: str, change: Callable[[ContextCache], ContextCache], now: float) -> ContextCache | None:
        """What it is after its owner's `change`, which may be called again. It is looked at at once. None: there is none."""
        return await self._update(tenant, cache_id, change, now, lambda cache: self._kept_up(cache, now))

    async def found(self, tenant: str, cache_id: str, node_id: NodeId, incarnation: Incarnation, now: float) -> None:
        """Notes that all of it is at that store now. While it was pending it is looked at at once, and waits to be computed no more."""

        def change(cache: ContextCache) -> ContextCache:
            pending = cache.kept.status is Status.PENDING
            return cache.with_kept(replace(cache.kept, held={**cache.kept.held, node_id: incarnation})) if pending else cache

        def also(cache: ContextCache) -> Sequence[Command]:
            if cache.kept.status is not Status.PENDING:
                return ()
            return [*self.agenda.waking(tenant, cache_id, now), *self.agenda.dropping(tenant, cache_id, Errand.WORK)]

        await self._update(tenant, cache_id, change, now, also)

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
        also = (("HDEL", self._budget_key(tenant), cache_id), *self.agenda.dropping(tenant, cache_id, *Errand))
        return cache if cache is not None and await self._records(cache_id).delete(tenant, cache_id, also=also) else None

    async def _update(
        self,
        tenant: str,
        cache_id: str,
        change: Callable[[ContextCache], ContextCache],
        now: float,
        also: Callable[[ContextCache], Sequence[Command]] = lambda _: (),
    ) -> ContextCache | None:
        value = await self._records(cache_id).update(
            tenant,
            cache_id,
            lambda value: cache_json(change(cache_from(tenant, value))),
            lambda value: _record_ttl_s(cache_from(tenant, value), now),
            lambda value: also(cache_from(tenant, value)),
        )
        return None if value is None else cache_from(tenant, value)

    def _kept_up(self, cache: ContextCache, now: float) -> Sequence[Command]:
        """What goes with a cache's record: it counts until its end, and is looked at."""
        counted = (cache.cache_id, f"{cache.budgeted_tokens} {exactly(cache.expires_at)} {cache.key_id}")
        return [("HSET", self._budget_key(cache.tenant), *counted), *self.agenda.waking(cache.tenant, cache.cache_id, now)]

    # ---- budgets ----

    async def spend(self, cache: ContextCache, budget: Budget, now: float, instead_of: Sequence[str] = ()) -> OverBudget | None:
        """Takes room for the cache in its tenant's and its key's budget, in the place of other caches; None: there is some. It is the
        cache's for as long as it takes to write this down, and from then on until it ends. Taken again it counts once."""
        until, most = now + _MAKING_S, MOST_MARKS if cache.marked else MOST_CACHES
        lasts_ms = round((MAX_TTL_S + _MAKING_S) * 1000)
        taking: Command = (exactly(now), cache.cache_id, cache.budgeted_tokens, exactly(until), cache.key_id)
        of_key = budget.tokens if budget.of_key is None else budget.of_key
        args: Command = (*taking, budget.tokens, of_key, most, lasts_ms, *instead_of)
        taken, taken_by_key, count, next_end = await asked(self._spend(keys=[self._budget_key(cache.tenant)], args=args))
        return None if int(taken) < 0 else OverBudget(int(taken), int(taken_by_key), int(count), float(next_end))

    async def ending_by(self, tenant: str, cache_ids: Sequence[str], end: float) -> list[str]:
        """Those of these caches that count against the tenant's budget and end by then."""
        if not cache_ids:
            return []
        entries = await asked(self._client.hmget(self._budget_key(tenant), list(cache_ids)))
        found = zip(cache_ids, entries, strict=True)
        return [cache_id for cache_id, entry in found if entry is not None and float(text_of(entry).split()[1]) <= end]

    # ---- meters ----

    async def meter(self, tenant: str, cache_id: str) -> Meter:
        counts = await asked(self._client.hgetall(self._key("meter", tenant, cache_id)))
        return Meter(**{text_of(name): int(count) for name, count in counts.items()})

    async def count(self, cache: ContextCache, **counts: int) -> None:
        """Adds to its meter: Meter's fields."""
        await self._records(cache.cache_id).count(cache.tenant, cache.cache_id, "meter", counts)

    async def uses(self, tenant: str, cache_id: str) -> Mapping[NodeId, int]:
        """How often it has been used of late at each store."""
        counts = await asked(self._client.hgetall(self._key("uses", tenant, cache_id)))
        return {NodeId(text_of(node_id)): int(count) for node_id, count in counts.items()}

    async def count_use(self, tenant: str, cache_id: str, node_id: NodeId) -> None:
        await self._records(cache_id).count(tenant, cache_id, "uses", {node_id: 1}, RECENT_USES)

    async def forget_uses(self, tenant: str, cache_id: str, node_id: NodeId) -> None:
        """Those at that store."""
        await asked(self._client.hdel(self._key("uses", tenant, cache_id), node_id))

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

    async def wake(self, tenant: str, cache_id: CacheId, now: float) -> None:
        """It is to be looked at at once, even if somebody looks at it already."""
        async with self._client.pipeline(transaction=True) as pipeline:
            for command in self.agenda.waking(tenant, cache_id, now):
                pipeline.execute_command(*command)
            await asked(pipeline.execute())

    # ---- where it is ----

    def _records(self, cache_id: str) -> Records:
        return self._marked if cache_id.startswith(MARK_PREFIX) else self._caches

    def _key(self, part: str, tenant: str, cache_id: str) -> str:
        return self._records(cache_id).part_key(part, tenant, cache_id)

    def _budget_key(self, tenant: str) -> str:
        return f"{self._prefix}-budget:{tenant}"


MARK_PREFIX = "mark-"
"""Of the ids of caches that marks have made; others begin otherwise."""


def _record_ttl_s(cache: ContextCache, now: float) -> float:
    return max(0.0, cache.expires_at - now) + (_LOOK_S if cache.marked else KEEP_ENDED_S)
