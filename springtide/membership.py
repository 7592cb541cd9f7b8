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
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from springtide.config import ClusterConfig
from springtide.credentials import OPEN, Credentials
from springtide.metrics import VALKEY_UP
from springtide.slices import slices
from springtide.supervision import end, supervised
from springtide.telemetry import FewWarnings
from springtide.valkey import UNREACHABLE, ValkeyClient, member_key

logger = logging.getLogger(__name__)

_READ_AT_ONCE = 100
"""Records between which whoever lists thousands lets others have their turn: some 2 ms."""
_KNOWN_RECORDS = 8192
"""That are not parsed anew each time, for a member's record stays the same."""

MAX_RECORD_BYTES = 64 << 10
"""A member's record has some hundred. What has more is not even fetched."""

# A value for each of KEYS, in order: '' for what is not there, 0 for what is no string of at most ARGV[1] bytes.
_READ = """
local found = {}
for i, key in ipairs(KEYS) do
    local kind = redis.call('TYPE', key).ok
    if kind == 'none' then
        found[i] = ''
    elseif kind ~= 'string' or redis.call('STRLEN', key) > tonumber(ARGV[1]) then
        found[i] = 0
    else
        found[i] = redis.call('GET', key)
    end
end
return found
"""

MemberRole = Literal["store", "layer-store", "prefill", "stage", "decode", "conductor", "gateway"]
Address = Annotated[str, Field(pattern=r"^\S+:\d{1,5}$")]


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the cluster. `address` is its gRPC host:port; `node_id` ties an engine to its store."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    role: MemberRole
    member_id: Annotated[str, Field(min_length=1, max_length=256)]
    incarnation: Annotated[int, Field(ge=0, lt=1 << 64)]
    address: Address
    node_id: str = ""
    metrics_address: str = ""
    pid: int = 0
    details: dict[str, str] = field(default_factory=dict)
    """Engines: model fingerprint, served name, context length, block_tokens, dtype, bytes_per_token, kernels, store address."""


_MEMBER = TypeAdapter(Member)


def write_record(member: Member, credentials: Credentials) -> bytes:
    """The signature, a line feed, and the member as JSON."""
    said = json.dumps(asdict(member)).encode()
    return credentials.signature(said).encode() + b"\n" + said


def read_record(record: bytes, credentials: Credentials) -> Member:
    """Raises ValueError, saying what is wrong with it."""
    signature, _, said = record.partition(b"\n")
    if not credentials.vouches_for(said, signature):
        raise ValueError("it is not signed with the cluster_secret of this cluster")
    try:
        return _MEMBER.validate_json(said)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, problem['loc'])) or 'record'}: {problem['msg']}" for problem in error.errors(include_url=False))
        raise ValueError("; ".join(problems)) from None


class Membership:
    """Announces at most one member and lists all. Connect errors are logged, retried and never raised to the caller.

    Whatever is in a shared Valkey, only records that somebody of the cluster has signed and that are whole are listed; of each other one it
    is said once what is wrong with it.
    """

    def __init__(self, url: str, cluster: str, lease_s: float, credentials: Credentials = OPEN) -> None:
        self._redis = ValkeyClient.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0)
        self._fetch = self._redis.register_script(_READ)
        self._credentials = credentials
        self._warnings = FewWarnings(logger)
        self._read = lru_cache(maxsize=_KNOWN_RECORDS)(self._parse)
        self._cluster = cluster
        self._lease_s = lease_s
        self._heartbeat: asyncio.Task[None] | None = None
        self._announced: Member | None = None
        self._records: list[tuple[bytes, bytes | int]] = []
        self._members: list[Member] = []
        """What these records came to."""

    async def announce(self, member: Member) -> None:
        """Keeps `member` listed, renewing every third of a lease, until `close`."""
        self._announced = member
        await self._put(member)
        self._heartbeat = supervised(lambda: self._renew(member), "membership-heartbeat")

    async def members(self) -> list[Member] | None:
        """Everybody whose lease holds; None when Valkey cannot be asked just now."""
        try:
            keys = [key async for key in self._redis.scan_iter(match=member_key(self._cluster, "*", "*"), count=_READ_AT_ONCE)]
            values = [value for some in slices(keys, _READ_AT_ONCE) for value in await self._fetch(keys=some, args=[MAX_RECORD_BYTES])]
        except UNREACHABLE as error:
            logger.debug("membership cannot be read: %s", error)
            return None
        records = list(zip(keys, values, strict=True))
        if records != self._records:
            members = [member for key, value in records if value != b"" and (member := self._read(key, value)) is not None]
            self._records, self._members = records, sorted(members, key=lambda member: (member.role, member.member_id))
        return list(self._members)

    async def leases(self) -> list[tuple[Member, float]] | None:
        """The same, each with the seconds for which its lease holds if nobody renews it."""
        members = await self.members()
        if members is None:
            return None
        try:
            async with self._redis.pipeline(transaction=False) as asked:
                for member in members:
                    asked.pttl(self._key_of(member))
                left_ms = await asked.execute()
        except UNREACHABLE as error:
            logger.debug("leases cannot be read: %s", error)
            return None
        return [(member, ms / 1000) for member, ms in zip(members, left_ms, strict=True) if ms > 0]

    @classmethod
    def of(cls, config: ClusterConfig, credentials: Credentials) -> Membership:
        """Of the cluster that a configuration is of, which names its Valkey."""
        assert config.redis_url is not None, "the configuration must be resolved"
        return cls(config.redis_url, config.cluster, config.conductor.lease_s, credentials)

    async def has(self, role: MemberRole, member_id: str) -> bool | None:
        """Whether this one's lease holds; None when Valkey cannot be asked just now."""
        try:
            return bool(await self._redis.exists(self._key(role, member_id)))
        except UNREACHABLE as error:
            logger.debug("membership cannot be read: %s", error)
            return None

    async def withdraw(self) -> None:
        """Stops renewing and withdraws the member, if one is announced."""
        await end(self._heartbeat)
        self._heartbeat = None
        if self._announced is not None:
            with contextlib.suppress(*UNREACHABLE):
                await self._redis.delete(self._key_of(self._announced))
            self._announced = None

    async def close(self) -> None:
        """Withdraws the member."""
        await self.withdraw()
        await self._redis.aclose()

    def _key(self, role: MemberRole, member_id: str) -> str:
        return member_key(self._cluster, role, member_id)

    def _key_of(self, member: Member) -> str:
        return self._key(member.role, member.member_id)

    async def _put(self, member: Member) -> None:
        try:
            await self._redis.set(self._key_of(member), write_record(member, self._credentials), px=int(self._lease_s * 1000))
            VALKEY_UP.labels("membership").set(1)
        except UNREACHABLE as error:
            VALKEY_UP.labels("membership").set(0)
            logger.warning("membership of %s cannot be renewed: %s", member.member_id, error)

    async def _renew(self, member: Member) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await self._put(member)

    def _parse(self, key: bytes, value: bytes | int) -> Member | None:
        """None for what is no member's: it may be anybody's, and must not end its readers."""
        try:
            if isinstance(value, int):
                raise ValueError(f"it is no text of at most {MAX_RECORD_BYTES} bytes")
            member = read_record(value, self._credentials)
            if self._key_of(member).encode() != key:
                raise ValueError(f"it is of {member.role} {member.member_id}")
            return member
        except ValueError as error:
            self._warnings.warn("the membership record %.200r is ignored: %.500s", key, error)
            return None
