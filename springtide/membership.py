"""Who is in the cluster: each process announces itself in Valkey/Redis under a lease, and whoever needs the others lists them.

Nothing here is on a request's path: when Valkey is away, everybody goes on with the members last seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Literal

import redis.asyncio as redis
from redis.exceptions import RedisError

from springtide.cancellation import heeds_cancellation

logger = logging.getLogger(__name__)

_READ_AT_ONCE = 100
"""Records between which whoever lists thousands lets others have their turn: some 2 ms."""
_KNOWN_RECORDS = 8192
"""That are not parsed anew each time, for a member's record stays the same."""

UNREACHABLE = (RedisError, OSError, asyncio.TimeoutError, RuntimeError)
"""What redis-py raises when Valkey cannot be asked. RuntimeError is uvloop's, of a connection that was reset while nobody used it."""

Role = Literal["store", "prefill", "decode", "conductor", "gateway"]


@dataclass(frozen=True, slots=True)
class Member:
    """One process. `address` is its gRPC host:port; `node_id` ties an engine to its store."""

    role: Role
    member_id: str
    incarnation: int
    address: str
    node_id: str = ""
    metrics_address: str = ""
    pid: int = 0
    details: dict[str, str] = field(default_factory=dict)
    """Engines: model fingerprint, served name, context length, block_tokens, dtype, bytes_per_token, store address."""


class Membership:
    """Announces at most one member and lists all. Connect errors are logged, retried and never raised to the caller."""

    def __init__(self, url: str, cluster: str, lease_s: float) -> None:
        self._redis = redis.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0, decode_responses=True)
        self._prefix = f"{cluster}:member:"
        self._lease_s = lease_s
        self._heartbeat: asyncio.Task[None] | None = None
        self._announced: Member | None = None
        self._records: list[bytes | str | None] = []
        self._members: list[Member] = []
        """What these records came to."""

    async def announce(self, member: Member) -> None:
        """Keeps `member` listed, renewing every third of a lease, until `close`."""
        self._announced = member
        await self._put(member)
        self._heartbeat = asyncio.create_task(self._renew(member), name="membership-heartbeat")

    @heeds_cancellation
    async def members(self) -> list[Member] | None:
        """Everybody whose lease holds; None when Valkey cannot be asked just now."""
        try:
            keys = [key async for key in self._redis.scan_iter(match=self._prefix + "*", count=_READ_AT_ONCE)]
            values = [value for some in _batched(keys) for value in await self._redis.mget(some)]
        except UNREACHABLE as error:
            logger.debug("membership cannot be read: %s", error)
            return None
        if values != self._records:
            members = [member for value in values if value and (member := _read(value)) is not None]
            self._records, self._members = values, sorted(members, key=lambda member: (member.role, member.member_id))
        return list(self._members)

    async def close(self) -> None:
        """Stops renewing and withdraws the member."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._heartbeat
        if self._announced is not None:
            with contextlib.suppress(*UNREACHABLE):
                await self._redis.delete(self._key(self._announced))
        await self._redis.aclose()

    def _key(self, member: Member) -> str:
        return f"{self._prefix}{member.role}:{member.member_id}"

    @heeds_cancellation
    async def _put(self, member: Member) -> None:
        try:
            await self._redis.set(self._key(member), json.dumps(asdict(member)), px=int(self._lease_s * 1000))
        except UNREACHABLE as error:
            logger.warning("membership of %s cannot be renewed: %s", member.member_id, error)

    async def _renew(self, member: Member) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await self._put(member)


def _batched(keys: list[str]) -> list[list[str]]:
    return [keys[first : first + _READ_AT_ONCE] for first in range(0, len(keys), _READ_AT_ONCE)]


@lru_cache(maxsize=_KNOWN_RECORDS)
def _read(value: str | bytes) -> Member | None:
    """None for what is no member as this version writes them: in a shared Valkey it may be anybody's, and must not end its readers."""
    try:
        return Member(**json.loads(value))
    except (ValueError, TypeError) as error:
        logger.error("a membership record cannot be read (%s): %.200r", error, value)
        return None
