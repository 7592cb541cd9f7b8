"""The leader's lease in Valkey/Redis: taken, extended and given up by scripts, so that each is one step for everybody else."""

from __future__ import annotations

import logging

import redis.asyncio as redis

from conductor.server.candidate import Answer, Claim, Free, Granted, Held, Leader
from springtide.cancellation import heeds_cancellation
from springtide.membership import UNREACHABLE

logger = logging.getLogger(__name__)

_LONGEST_ANSWER_S = 1.0

# KEYS: the lease (a hash that expires; without a token it is vacant), the epoch of the last leadership (which stays).
# ARGV: our token (none: who only looks), member id, address, lease in ms, floor, whether to take, whether we lead.
_CLAIM = """
local lease, last_epoch = KEYS[1], KEYS[2]
local token, floor, take, leads = ARGV[1], tonumber(ARGV[5]), ARGV[6] == '1', ARGV[7] == '1'
local last = tonumber(redis.call('GET', last_epoch) or '0')
local held = redis.call('HMGET', lease, 'token', 'epoch', 'member_id', 'address')
local ours, vacant = token ~= '' and held[1] == token, held[1] == ''
if not held[1] and token ~= '' and last < floor and not leads then
    redis.call('SET', last_epoch, string.format('%.0f', floor))
    redis.call('HSET', lease, 'token', '')
    redis.call('PEXPIRE', lease, ARGV[4])
    vacant = true
    held[1] = ''
end
if held[1] and not ours and not (vacant and leads) then
    return {'held', held[2] or '0', held[3] or '', held[4] or '', redis.call('PTTL', lease)}
end
if not held[1] and not take then
    return {'free'}
end
local epoch = ours and tonumber(held[2]) or 0
if epoch < math.max(floor, 1) then
    epoch = math.max(last, floor) + 1
end
local written = string.format('%.0f', epoch)
redis.call('SET', last_epoch, written)
redis.call('HSET', lease, 'token', token, 'epoch', written, 'member_id', ARGV[2], 'address', ARGV[3])
redis.call('PEXPIRE', lease, ARGV[4])
return {'granted', written}
"""

_RELEASE = """
if redis.call('HGET', KEYS[1], 'token') == ARGV[1] then
    redis.call('DEL', KEYS[1])
end
"""


class LeaderLease:
    """`token` tells this holder from every other, its own earlier runs included; who only looks needs none."""

    def __init__(self, url: str, cluster: str, lease_s: float, token: str = "", member_id: str = "", address: str = "") -> None:
        # An answer that comes after the lease it speaks of is of no use to its holder.
        timeout_s = min(_LONGEST_ANSWER_S, lease_s / 4)
        self._redis = redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, decode_responses=True)
        self._keys = [f"{cluster}:leader", f"{cluster}:leader:epoch"]
        self._holder = [token, member_id, address, str(int(lease_s * 1000))]
        self._token = token
        self._claim = self._redis.register_script(_CLAIM)
        self._release = self._redis.register_script(_RELEASE)

    @heeds_cancellation
    async def claim(self, claim: Claim) -> Answer | None:
        """None when Valkey cannot be asked just now: the claim may have been granted all the same."""
        arguments = [*self._holder, str(claim.floor), str(int(claim.take)), str(int(claim.leads))]
        try:
            answer = await self._claim(keys=self._keys, args=arguments)
        except UNREACHABLE as error:
            logger.debug("the leader's lease cannot be asked for: %s", error)
            return None
        match answer:
            case ["granted", epoch]:
                return Granted(int(epoch))
            case ["held", epoch, member_id, address, left_ms]:
                leader = Leader(member_id, address, int(epoch)) if address else None
                return Held(leader, max(0.0, left_ms / 1000))
            case ["free"]:
                return Free()
            case other:
                raise AssertionError(f"the script of the leader's lease answers {other!r}")

    async def read(self) -> Leader | None:
        """Who holds it; None when nobody does or Valkey cannot be asked."""
        answer = await self.claim(Claim(floor=0, take=False, leads=False))
        return answer.leader if isinstance(answer, Held) else None

    async def release(self) -> None:
        """Gives it up if it is ours. When Valkey cannot be asked it runs out by itself."""
        try:
            await self._release(keys=self._keys[:1], args=[self._token])
        except UNREACHABLE as error:
            logger.debug("the leader's lease cannot be given up: %s", error)

    async def close(self) -> None:
        await self._redis.aclose()
