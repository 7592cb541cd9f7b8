"""What is to be done for which context cache, and when, in Valkey: of all gateways whoever is first claims it for a time. Tenants take
turns, so that none waits for all that another has to be done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import redis.asyncio as redis

from gateway.caching.context import CacheId
from gateway.records import Command
from springtide.valkey import asked, exactly, text_of


class Errand(StrEnum):
    """What is to be done for a cache next."""

    LOOK = "look"
    """Its pins are renewed, which shows who holds it. Takes moments."""
    WORK = "work"
    """It is computed, or copied. Takes as long as it takes."""


# Of each errand there is a list of each tenant (a sorted set of caches by when it is due); the tenants by when the first of their list is
# due, which may be said too early and is never said too late; and the tenants by when they last had a turn. All keys begin with KEYS[1].
_LISTS = """
local function list(errand, tenant) return KEYS[1] .. '-' .. errand .. ':' .. tenant end
local function tenants(errand) return KEYS[1] .. '-' .. errand end
local function turns(errand) return KEYS[1] .. '-' .. errand .. '-turns' end
local function settle(errand, tenant)
  local first = redis.call('ZRANGE', list(errand, tenant), 0, 0, 'WITHSCORES')
  if first[1] then
    redis.call('ZADD', tenants(errand), first[2], tenant)
  else
    redis.call('ZREM', tenants(errand), tenant)
    redis.call('ZREM', turns(errand), tenant)
  end
end
"""
# ARGV: errand, now, claimed until, how many at most, how many a tenant may have, and alternately a tenant and how many it has. Each round
# of the tenants gives one to each, and begins with whose turn is longest ago.
_CLAIM = f"""
{_LISTS}
local errand, now, most, most_each = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4]), tonumber(ARGV[5])
local held, turn, found = {{}}, {{}}, {{}}
for i = 6, #ARGV, 2 do held[ARGV[i]] = tonumber(ARGV[i + 1]) end
local due = redis.call('ZRANGEBYSCORE', tenants(errand), '-inf', now)
for _, tenant in ipairs(due) do turn[tenant] = tonumber(redis.call('ZSCORE', turns(errand), tenant)) or 0 end
table.sort(due, function(one, other) return turn[one] < turn[other] or turn[one] == turn[other] and one < other end)
repeat
  local more = false
  for _, tenant in ipairs(due) do
    if #found == most then break end
    if (held[tenant] or 0) < most_each then
      local cache = redis.call('ZRANGEBYSCORE', list(errand, tenant), '-inf', now, 'LIMIT', 0, 1)[1]
      if cache then
        redis.call('ZADD', list(errand, tenant), ARGV[3], cache)
        redis.call('ZADD', turns(errand), now, tenant)
        held[tenant] = (held[tenant] or 0) + 1
        found[#found + 1] = {{tenant, cache}}
        more = true
      end
    end
  end
until not more
for _, tenant in ipairs(due) do settle(errand, tenant) end
return found
"""
# ARGV: errand, tenant, cache, the time until which it was claimed, and the times of the next look and the next work ('': none is due),
# unless there is an earlier one, or one that is claimed. 0: not ours any more.
_MOVE = f"""
{_LISTS}
local errand, tenant, cache = ARGV[1], ARGV[2], ARGV[3]
if tonumber(redis.call('ZSCORE', list(errand, tenant), cache)) ~= tonumber(ARGV[4]) then return 0 end
redis.call('ZREM', list(errand, tenant), cache)
if ARGV[5] ~= '' then redis.call('ZADD', list('look', tenant), 'LT', ARGV[5], cache) end
if ARGV[6] ~= '' then redis.call('ZADD', list('work', tenant), 'NX', ARGV[6], cache) end
settle('look', tenant)
settle('work', tenant)
return 1
"""
# KEYS: also what was last seen. ARGV: errand, now, what is seen now. All of it is due when the two differ.
_STORES_CHANGED = f"""
{_LISTS}
local errand, now, count = ARGV[1], tonumber(ARGV[2]), 0
if redis.call('GET', KEYS[2]) == ARGV[3] then return 0 end
redis.call('SET', KEYS[2], ARGV[3])
for _, tenant in ipairs(redis.call('ZRANGE', tenants(errand), 0, -1)) do
  for _, cache in ipairs(redis.call('ZRANGEBYSCORE', list(errand, tenant), '(' .. ARGV[2], '+inf')) do
    redis.call('ZADD', list(errand, tenant), now, cache)
    count = count + 1
  end
  settle(errand, tenant)
end
return count
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """An errand for a cache that is ours until then."""

    errand: Errand
    tenant: str
    cache_id: CacheId
    until: float


class Agenda:
    """The errands for all context caches of a cluster. Times are Unix seconds. Whatever Valkey fails with becomes Unavailable."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._claim = client.register_script(_CLAIM)
        self._move = client.register_script(_MOVE)
        self._stores_changed = client.register_script(_STORES_CHANGED)

    def waking(self, tenant: str, cache_id: str, now: float) -> Sequence[Command]:
        """By which it is looked at at once, even if somebody looks at it already."""
        list_, tenants = self._list(Errand.LOOK, tenant), f"{self._prefix}-{Errand.LOOK}"
        return (("ZADD", list_, exactly(now), cache_id), ("ZADD", tenants, "LT", exactly(now), tenant))

    def dropping(self, tenant: str, cache_id: str, *errands: Errand) -> Sequence[Command]:
        """By which these errands come to nothing, claimed or not."""
        return [("ZREM", self._list(errand, tenant), cache_id) for errand in errands]

    async def claim(self, errand: Errand, now: float, until: float, most: int, most_each: int, held: Mapping[str, int]) -> list[Claim]:
        """Claims up to `most` that are due, in turns by tenant: so many that none has more than `most_each` with those that are `held`."""
        words = [word for tenant, count in held.items() for word in (tenant, count)]
        found = await asked(self._claim(keys=[self._prefix], args=[errand, exactly(now), exactly(until), most, most_each, *words]))
        return [Claim(errand, text_of(tenant), CacheId(text_of(cache_id)), until) for tenant, cache_id in found]

    async def renew(self, claim: Claim, until: float) -> Claim | None:
        """None: it is not ours any more, or somebody wants it to be done anew."""
        looks = claim.errand is Errand.LOOK
        moved = await self._moved(claim, until if looks else None, None if looks else until)
        return replace(claim, until=until) if moved else None

    async def put_back(self, claim: Claim, look_at: float | None, work_at: float | None = None) -> None:
        """Gives up the claim. It is to be looked at, and worked at, then; None: it is not."""
        await self._moved(claim, look_at, work_at)

    async def stores_changed(self, stores: str, now: float) -> int:
        """Says which stores there are, in a word that is the same when they are. Where the word is another than the last one said, by
        whichever gateway, every cache is looked at at once; returns how many that are."""
        keys, args = [self._prefix, f"{self._prefix}-stores"], [Errand.LOOK, exactly(now), stores]
        return int(await asked(self._stores_changed(keys=keys, args=args)))

    async def tenants(self, at_most: int) -> list[str]:
        """Some of those whose caches are looked at."""
        return [text_of(tenant) for tenant in await asked(self._client.zrange(f"{self._prefix}-{Errand.LOOK}", 0, at_most - 1))]

    async def _moved(self, claim: Claim, *due_at: float | None) -> bool:
        due = ["" if at is None else exactly(at) for at in due_at]
        args = [claim.errand, claim.tenant, claim.cache_id, exactly(claim.until), *due]
        return bool(await asked(self._move(keys=[self._prefix], args=args)))

    def _list(self, errand: Errand, tenant: str) -> str:
        return f"{self._prefix}-{errand}:{tenant}"
