"""Rate limits that all gateways hold together: what was taken in each second of the last minute is counted in Valkey/Redis, by its clock.

While Valkey is away each gateway goes on by itself from what it last knew: nobody is refused for that, and what is let through is at most
the limit at each gateway.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import redis.asyncio as redis

from gateway.accounts.windows import WINDOW_S, Window
from springtide.telemetry import FewWarnings
from springtide.valkey import UNREACHABLE

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.5
"""No request waits longer for Valkey."""
_AGAIN_AFTER_S = 1.0
"""Once it has not answered, it is not asked for so long."""
_KNOWN_WINDOWS = 1 << 16

# KEYS: windows, hashes from seconds to what was taken in them. ARGV: the window's length, then for each window limit and amount.
# What was taken more than a window from now is of before the clock was set back.
# Takes all amounts, or none where one does not fit; returns whether it did, the time, and what had been taken before.
_TAKE = """
local time = redis.call('TIME')
local now, length = tonumber(time[1]), tonumber(ARGV[1])
local fits, windows = 1, {}
for i, key in ipairs(KEYS) do
    local taken, kept, used = redis.call('HGETALL', key), {}, 0
    for j = 1, #taken, 2 do
        local amount = tonumber(taken[j + 1])
        if tonumber(taken[j]) < now - length or tonumber(taken[j]) > now + length then
            redis.call('HDEL', key, taken[j])
        elseif amount > 0 then
            used = used + amount
            kept[#kept + 1] = taken[j]
            kept[#kept + 1] = taken[j + 1]
        end
    end
    if used + tonumber(ARGV[2 * i + 1]) > tonumber(ARGV[2 * i]) then fits = 0 end
    windows[i] = kept
end
if fits == 1 then
    for i, key in ipairs(KEYS) do
        redis.call('HINCRBY', key, time[1], ARGV[2 * i + 1])
        redis.call('EXPIRE', key, length + 2)
    end
end
return {fits, time[1], time[2], windows}
"""

# KEYS: windows. ARGV: the window's length, an amount that was taken too little or, negative, too much, and the second it was taken in.
_SETTLE = """
local now = redis.call('TIME')[1]
local second = tonumber(ARGV[2]) > 0 and now or ARGV[3]
if tonumber(second) < tonumber(now) - tonumber(ARGV[1]) then return end
for _, key in ipairs(KEYS) do
    redis.call('HINCRBY', key, second, ARGV[2])
    redis.call('EXPIRE', key, ARGV[1] + 2)
end
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """An amount that is wanted of a limit."""

    window: str
    """The name of what it counts in."""
    limit: int
    amount: int


@dataclass(frozen=True, slots=True)
class Standing:
    """How a limit stands after a claim."""

    limit: int
    remaining: int
    reset_s: float
    """Until all of it is free again."""
    wait_s: float
    """Until the claim fits; 0 where it does."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of claims that are made together: all of them are granted, or none."""

    granted: bool
    second: int
    """In which they were, on Valkey's clock."""
    standings: tuple[Standing, ...]


@dataclass(frozen=True, slots=True)
class Receipt:
    """The tokens that were taken of limits for a request."""

    windows: tuple[str, ...] = ()
    tokens: int = 0
    second: int = 0
    """In which that was, on the limiter's clock."""


NO_RECEIPT = Receipt()


class Limiter:
    """The windows of all limits of a cluster."""

    def __init__(self, client: redis.Redis, cluster: str) -> None:
        self._prefix = f"{cluster}:rate"
        self._take = client.register_script(_TAKE)
        self._settle = client.register_script(_SETTLE)
        self._warnings = FewWarnings(logger)
        self._known: OrderedDict[str, Window] = OrderedDict()
        """As they were when they were last asked for, the last ones at the end."""
        self._away_until = 0.0
        self._ahead_s = time.time() - time.monotonic()
        """Valkey's clock of this process's monotonic one, when it was last heard."""

    async def take(self, claims: Sequence[Claim]) -> Verdict:
        """Grants all claims or none."""
        if time.monotonic() >= self._away_until:
            try:
                return await self._take_shared(claims)
            except UNREACHABLE as error:
                self._away_until = time.monotonic() + _AGAIN_AFTER_S
                self._warnings.warn("rate limits are held by this gateway alone while Valkey cannot be asked: %s", error)
        now = self._now()
        windows = [Window.of(self._known.get(claim.window, Window()).taken, now) for claim in claims]
        return self._verdict(claims, windows, now)

    async def settle(self, windows: Sequence[str], amount: int, second: int) -> None:
        """Takes more, whatever the limit, or with a negative amount gives back what was taken in that second."""
        for name in windows:
            if (window := self._known.get(name)) is not None:
                window.add(int(self._now()) if amount > 0 else second, amount)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._settle(keys=[self._key(name) for name in windows], args=[WINDOW_S, amount, second])
        except UNREACHABLE as error:
            logger.debug("what a request took in the end is known to this gateway alone: %s", error)

    async def _take_shared(self, claims: Sequence[Claim]) -> Verdict:
        arguments = [number for claim in claims for number in (claim.limit, claim.amount)]
        async with asyncio.timeout(_PATIENCE_S):
            reply = await self._take(keys=[self._key(claim.window) for claim in claims], args=[WINDOW_S, *arguments])
        _, seconds, micros, flat = reply
        now = int(seconds) + int(micros) / 1e6
        self._ahead_s = now - time.monotonic()
        windows = [Window.of(dict(zip(map(int, taken[::2]), map(int, taken[1::2]), strict=True)), now) for taken in flat]
        return self._verdict(claims, windows, now)

    def _now(self) -> float:
        """On Valkey's clock, while it cannot be asked."""
        return time.monotonic() + self._ahead_s

    def _verdict(self, claims: Sequence[Claim], windows: Sequence[Window], now: float) -> Verdict:
        """By the same rule as the script's: what is granted here was granted there."""
        waits = [window.wait_s(claim.amount, claim.limit, now) for claim, window in zip(claims, windows, strict=True)]
        granted = all(window.used + claim.amount <= claim.limit for claim, window in zip(claims, windows, strict=True))
        standings = []
        for claim, window, wait_s in zip(claims, windows, waits, strict=True):
            if granted:
                window.add(int(now), claim.amount)
            self._remember(claim.window, window)
            standings.append(Standing(claim.limit, max(0, claim.limit - window.used), window.reset_s(now), wait_s))
        return Verdict(granted, int(now), tuple(standings))

    def _remember(self, name: str, window: Window) -> None:
        self._known[name] = window
        self._known.move_to_end(name)
        if len(self._known) > _KNOWN_WINDOWS:
            self._known.popitem(last=False)

    def _key(self, window: str) -> str:
        return f"{self._prefix}:{window}"
