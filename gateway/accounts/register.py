"""The register of API keys and tenants in Valkey/Redis, and each gateway's copy of it, which is asked for every request.

Each entry has a version, the count of changes when it was last written. So a gateway that asks for what is newer than what it knows gets
the changes, be it one or all, at the price of one short question when there is none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import redis.asyncio as redis
from pydantic import ValidationError

from gateway.accounts.allowance import ALLOWANCE, API_KEY, NO_LIMITS, Allowance, ApiKey, as_json
from springtide.errors import SpringtideError, Unavailable
from springtide.supervision import end, supervised
from springtide.telemetry import FewWarnings
from springtide.valkey import asked, text_of

logger = logging.getLogger(__name__)

POLL_S = 0.25
"""How often a gateway asks for changes: what is revoked is refused after twice that at most, while Valkey answers."""
_FIRST_READINGS = 2
"""One may be lost while Valkey is there: its time is over when this process has stood still."""
_MOST_TRIES = 16
_CHANGES_AT_ONCE = 512
KEY, TENANT = "key/", "tenant/"
"""Of which kind an entry is; behind it come a key's digest or a tenant's name."""
_UNREACHABLE = "register_unreachable"

# KEYS: entries (a hash), versions (a sorted set), the count of changes, the register's own name. ARGV: the entry, its value, what it must
# be now ('': not there), a name for a new register.
_WRITE = """
local now = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if now ~= ARGV[3] then return 0 end
redis.call('SET', KEYS[4], ARGV[4], 'NX')
local version = redis.call('INCR', KEYS[3])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], version, ARGV[1])
return version
"""

# The same KEYS. ARGV: the version that is known, the most entries. Returns the register's name, and entry, version and value of what is
# newer.
_CHANGES = """
local found = {redis.call('GET', KEYS[4]) or ''}
local newer = redis.call('ZRANGE', KEYS[2], '(' .. ARGV[1], '+inf', 'BYSCORE', 'LIMIT', 0, ARGV[2], 'WITHSCORES')
for i = 1, #newer, 2 do
    found[#found + 1] = newer[i]
    found[#found + 1] = newer[i + 1]
    found[#found + 1] = redis.call('HGET', KEYS[1], newer[i]) or ''
end
return found
"""


class UnknownKey(SpringtideError):
    """There is no such API key; the message names it."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Entries that are newer than what was known, the oldest first."""

    register: str
    """Which one: another when what was in Valkey has been lost. Empty: nothing was ever written."""
    entries: Mapping[str, str]
    version: int
    """Of the last of them."""


class Register:
    """Keys and tenants in Valkey. Whatever Valkey fails with becomes Unavailable."""

    def __init__(self, client: redis.Redis, cluster: str) -> None:
        prefix = f"{cluster}:accounts"
        self._client = client
        self._keys = [prefix, f"{prefix}:versions", f"{prefix}:changes", f"{prefix}:name"]
        self._write_script = client.register_script(_WRITE)
        self._changes_script = client.register_script(_CHANGES)

    async def add_key(self, digest: str, key: ApiKey) -> None:
        if not await self._write(KEY + digest, as_json(key), was=""):
            raise Unavailable("this key is in the register already; make another", code="conflict")

    async def keys(self) -> dict[str, ApiKey]:
        """All that were ever made, by their digests."""
        return {name.removeprefix(KEY): API_KEY.validate_json(value) for name, value in (await self._all()).items() if name.startswith(KEY)}

    async def revoke(self, named: str, now: float) -> ApiKey:
        """Ends a key, named by its id or its digest. Raises UnknownKey."""
        for _ in range(_MOST_TRIES):
            entries = await self._all()
            found = ((name, value, API_KEY.validate_json(value)) for name, value in entries.items() if name.startswith(KEY))
            match = next(((name, value, key) for name, value, key in found if named in (key.key_id, name.removeprefix(KEY))), None)
            if match is None:
                raise UnknownKey(f"there is no API key {named!r}; `springtide keys ls` shows them by their ids")
            name, value, key = match
            if key.revoked_at is not None:
                return key
            revoked = replace(key, revoked_at=now)
            if await self._write(name, as_json(revoked), was=value):
                return revoked
        raise Unavailable(f"{named} is changed by many at once; try again", code="conflict")

    async def tenants(self) -> dict[str, Allowance]:
        entries = (await self._all()).items()
        return {name.removeprefix(TENANT): ALLOWANCE.validate_json(value) for name, value in entries if name.startswith(TENANT)}

    async def set_tenant(self, tenant: str, allowance: Allowance) -> None:
        for _ in range(_MOST_TRIES):
            value = (await self._all()).get(TENANT + tenant, "")
            if await self._write(TENANT + tenant, as_json(allowance), was=value):
                return
        raise Unavailable(f"tenant {tenant!r} is changed by many at once; try again", code="conflict")

    async def changes(self, since: int) -> Changes:
        answer = await asked(self._changes_script(keys=self._keys, args=[since, _CHANGES_AT_ONCE]), _UNREACHABLE)
        name, *rest = [text_of(part) for part in answer]
        entries = dict(zip(rest[::3], rest[2::3], strict=True))
        return Changes(name, entries, int(float(rest[-2])) if rest else since)

    async def _all(self) -> dict[str, str]:
        entries = await asked(self._client.hgetall(self._keys[0]), _UNREACHABLE)
        return {text_of(name): text_of(value) for name, value in entries.items()}

    async def _write(self, entry: str, value: str, was: str) -> bool:
        writing = self._write_script(keys=self._keys, args=[entry, value, was, f"{time.time_ns():x}"])
        return bool(await asked(writing, _UNREACHABLE))


class RegisterCopy:
    """A gateway's copy of the register, kept up to date. While Valkey is away it stays as it is."""

    def __init__(self, register: Register) -> None:
        self._register = register
        self._warnings = FewWarnings(logger)
        self._name = ""
        self._version = 0
        self._keys: dict[str, ApiKey] = {}
        self._allowances: dict[str, Allowance] = {}
        """Of keys, by their ids."""
        self._tenants: dict[str, Allowance] = {}
        self._follower: asyncio.Task[None] | None = None
        self._has_had_keys = False
        self.read = False
        """It has been read once, so that what it lacks is not there."""

    @property
    def has_keys(self) -> bool:
        """There has been a key since this gateway has started, revoked or not: a register that was lost opens nothing."""
        return self._has_had_keys

    def key(self, digest: str) -> ApiKey | None:
        return self._keys.get(digest)

    def allowance(self, key_id: str) -> Allowance:
        """That of a key, revoked or not."""
        return self._allowances.get(key_id, NO_LIMITS)

    def tenant(self, name: str) -> Allowance:
        return self._tenants.get(name, NO_LIMITS)

    async def start(self) -> None:
        """Reads the register, or leaves that for later when Valkey is away, and follows it until `close`."""
        for _ in range(_FIRST_READINGS):
            await self._catch_up()
            if self.read:
                break
        self._follower = supervised(self._follow, "accounts-register")

    async def close(self) -> None:
        await end(self._follower)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._catch_up()

    async def _catch_up(self) -> None:
        try:
            while True:
                changes = await self._register.changes(self._version)
                if changes.register != self._name:
                    self._forget(changes.register)
                    if self._version:
                        self._version = 0
                        continue
                self._take(changes)
                if len(changes.entries) < _CHANGES_AT_ONCE:
                    break
            self.read = True
        except Unavailable as error:
            logger.debug("the register of API keys cannot be read: %s", error)

    def _forget(self, name: str) -> None:
        if self._keys or self._tenants:
            logger.warning("the register of API keys in Valkey is another one than before: it counts from now on")
        self._name = name
        self._keys.clear()
        self._allowances.clear()
        self._tenants.clear()

    def _take(self, changes: Changes) -> None:
        for name, value in changes.entries.items():
            try:
                if name.startswith(KEY):
                    key = self._keys[name.removeprefix(KEY)] = API_KEY.validate_json(value)
                    self._allowances[key.key_id] = key.allowance
                    self._has_had_keys = True
                elif name.startswith(TENANT):
                    self._tenants[name.removeprefix(TENANT)] = ALLOWANCE.validate_json(value)
            except ValidationError as error:
                # What cannot be read opens nothing.
                self._keys.pop(name.removeprefix(KEY), None)
                self._warnings.warn("the entry %.200r of the register of API keys is ignored: %.500s", name, error)
        self._version = changes.version
