"""The leader's lease in Valkey/Redis: taken, extended and given up by scripts, so that each is one step for everybody else."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from springtide.credentials import OPEN, Credentials
from springtide.metrics import VALKEY_UP
from springtide.telemetry import FewWarnings
from springtide.valkey import UNREACHABLE, ValkeyClient

logger = logging.getLogger(__name__)

_LONGEST_ANSWER_S = 1.0

# KEYS: the lease (a hash that expires; without a token it is vacant), the epoch of the last leadership (which stays).
# ARGV: our token (none: who only looks), member id, address, lease in ms, floor, whether to take, whether we lead, our signature.
_CLAIM = """
local lease, last_epoch = KEYS[1], KEYS[2]
local token, floor, take, leads = ARGV[1], tonumber(ARGV[5]), ARGV[6] == '1', ARGV[7] == '1'
local last = tonumber(redis.call('GET', last_epoch) or '0')
local held = redis.call('HMGET', lease, 'token', 'epoch', 'member_id', 'address', 'signature')
local ours, vacant = token ~= '' and held[1] == token, held[1] == ''
if not held[1] and token ~= '' and last < floor and not leads then
    redis.call('SET', last_epoch, string.format('%.0f', floor))
    redis.call('HSET', lease, 'token', '')
    redis.call('PEXPIRE', lease, ARGV[4])
    vacant = true
    held[1] = ''
end
if held[1] and not ours and not (vacant and leads) then
    return {'held', held[2] or '0', held[3] or '', held[4] or '', held[5] or '', redis.call('PTTL', lease)}
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
redis.call('HSET', lease, 'token', token, 'epoch', written, 'member_id', ARGV[2], 'address', ARGV[3], 'signature', ARGV[8])
redis.call('PEXPIRE', lease, ARGV[4])
return {'granted', written}
"""

_RELEASE = """
if redis.call('HGET', KEYS[1], 'token') == ARGV[1] then
    redis.call('DEL', KEYS[1])
end
"""


@dataclass(frozen=True, slots=True)
class Leader:
    """The one who holds the lease. `epoch` grows with every leadership."""

    member_id: str
    address: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Claim:
    """Ask Valkey: the lease is extended if it is ours and, with `take`, taken if it is nobody's.

    A Valkey that remembers no leadership as late as `floor` has lost its memory: whoever led may still do so. Then it keeps the lease
    vacant for its whole length, and only who `leads` may have it.
    """

    floor: int
    take: bool
    leads: bool


@dataclass(frozen=True, slots=True)
class Granted:
    """The lease is ours from now on, for its whole length. `epoch` is above every earlier one."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Held:
    """The lease is somebody else's, or kept vacant, for `left_s` more seconds."""

    leader: Leader | None
    left_s: float


@dataclass(frozen=True, slots=True)
class Free:
    """The lease is nobody's, and was not to be taken: its last holder gave it up, or never renewed it."""


Answer = Granted | Held | Free


class LeaderLease:
    """`token` tells this holder from every other, its own earlier runs included; who only looks needs none. A holder that has not signed
    its name and address is not believed to be a Conductor."""

    def __init__(
        self,
        url: str,
        cluster: str,
        lease_s: float,
        token: str = "",
        member_id: str = "",
        address: str = "",
        credentials: Credentials = OPEN,
    ) -> None:
        # An answer that comes after the lease it speaks of is of no use to its holder.
        timeout_s = min(_LONGEST_ANSWER_S, lease_s / 4)
        self._redis = ValkeyClient.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, decode_responses=True)
        self._keys = [f"{cluster}:leader", f"{cluster}:leader:epoch"]
        self._holder = [token, member_id, address, str(int(lease_s * 1000))]
        self._token = token
        self._credentials = credentials
        self._signature = credentials.signature(_said(member_id, address))
        self._warnings = FewWarnings(logger)
        self._claim = self._redis.register_script(_CLAIM)
        self._release = self._redis.register_script(_RELEASE)

    async def claim(self, claim: Claim) -> Answer | None:
        """Makes a claim; None when Valkey cannot be asked just now: the claim may have been granted all the same."""
        arguments = [*self._holder, str(claim.floor), str(int(claim.take)), str(int(claim.leads)), self._signature]
        try:
            answer = await self._claim(keys=self._keys, args=arguments)
            VALKEY_UP.labels("leader_lease").set(1)
            return self._read(answer)
        except UNREACHABLE as error:
            VALKEY_UP.labels("leader_lease").set(0)
            logger.debug("the leader's lease cannot be asked for: %s", error)
        except ValueError as error:  # no text, no number: nobody of the cluster has written it
            self._warnings.warn("the leader's lease in Valkey makes no sense: %.200s", error)
        return None

    def _read(self, answer: Any) -> Answer:
        match answer:
            case ["granted", epoch]:
                return Granted(int(epoch))
            case ["held", epoch, member_id, address, signature, left_ms]:
                believed = bool(address) and self._believed(member_id, address, signature)
                return Held(Leader(member_id, address, int(epoch)) if believed else None, max(0.0, left_ms / 1000))
            case ["free"]:
                return Free()
            case other:
                raise AssertionError(f"the script of the leader's lease answers {other!r}")

    def _believed(self, member_id: str, address: str, signature: str) -> bool:
        believed = self._credentials.vouches_for(_said(member_id, address), signature.encode())
        if not believed:
            self._warnings.warn("the leader's lease is held by %.100r, who has not signed it with the cluster_secret", member_id)
        return believed

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


def _said(member_id: str, address: str) -> bytes:
    return f"leader\n{member_id}\n{address}".encode()
