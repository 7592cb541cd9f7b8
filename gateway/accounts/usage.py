"""What keys and tenants have used: counted while it is served, and written down in Valkey/Redis by the day, each count once.

A gateway writes what has come since the last time, of running answers too, every `FLUSH_S`: so much is lost with one that is killed. What
Valkey may or may not have taken is sent again under the same number, by which it is found to be there already.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, fields

import redis.asyncio as redis

from springtide.errors import Unavailable
from springtide.ids import new_id
from springtide.protocol.usage import Usage
from springtide.slices import slices
from springtide.supervision import end, supervised
from springtide.telemetry import FewWarnings
from springtide.valkey import asked

logger = logging.getLogger(__name__)

FLUSH_S = 0.5
KEPT_DAYS = 400
MAX_ROWS = 1 << 16
"""Of a day, and of what a gateway has not written yet. What would be one more is counted as `OTHERS`': where tenants need no keys,
strangers name as many as they like."""
OTHERS = "(others)"
_APPLIED_KEPT_S = 86_400
_ROWS_AT_ONCE = 256
_UNREACHABLE = "usage_unreachable"

# KEYS: the day's counts (a hash), the number of the last batch of this gateway. ARGV: that of this one, how long to keep the day, the most
# fields of a day, how long to keep the number; then a row, the row to use where there is no room, and its counts.
_ADD = """
if tonumber(redis.call('GET', KEYS[2]) or '0') >= tonumber(ARGV[1]) then return 0 end
local full = redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3])
for i = 5, #ARGV, 6 do
    local row = ARGV[i]
    if full and redis.call('HEXISTS', KEYS[1], row .. '/requests') == 0 then row = ARGV[i + 1] end
    for j, name in ipairs({'requests', 'prompt_tokens', 'cached_tokens', 'output_tokens'}) do
        redis.call('HINCRBY', KEYS[1], row .. '/' .. name, ARGV[i + 1 + j])
    end
end
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[4])
return 1
"""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What is counted apart."""

    tenant: str
    key_id: str
    model: str
    endpoint: str
    batch: bool = False


NOBODYS_USAGE = UsageRow("", "", "", "")


@dataclass(slots=True)
class Counts:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompts, those that were found in the pool."""
    output_tokens: int = 0

    def add(self, other: Counts) -> None:
        for field in fields(Counts):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def empty(self) -> bool:
        return not any(getattr(self, field.name) for field in fields(Counts))


@dataclass(frozen=True, slots=True)
class DayUsage:
    """A row of a day."""

    day: datetime.date
    row: UsageRow
    counts: Counts


class Meter:
    """One answer's usage, read while it comes. A request counts once something of it is served."""

    def __init__(self, row: UsageRow, usage: Callable[[], Usage]) -> None:
        """`usage` is that of what was served so far, without prompts for which there is nothing yet."""
        self.row = row
        self._usage = usage
        self._counted = Usage(0, 0, 0)
        self._requests = 0

    def read(self) -> Counts:
        """What has come since the last time."""
        now, before = self._usage(), self._counted
        if not now.prompt_tokens:
            return Counts()
        first = 1 - self._requests
        self._counted, self._requests = now, 1
        return Counts(
            first,
            now.prompt_tokens - before.prompt_tokens,
            now.cached_tokens - before.cached_tokens,
            now.completion_tokens - before.completion_tokens,
        )


class UsageTally:
    """What was used, and not written yet. Free of I/O and clock."""

    def __init__(self) -> None:
        self._rows: dict[tuple[datetime.date, UsageRow], Counts] = {}
        self._meters: set[Meter] = set()

    def open(self, meter: Meter) -> None:
        self._meters.add(meter)

    def close(self, meter: Meter, day: datetime.date) -> None:
        """Its answer has ended. Idempotent."""
        if meter in self._meters:
            self._meters.remove(meter)
            self.add(day, meter.row, meter.read())

    def take(self, day: datetime.date) -> dict[datetime.date, dict[UsageRow, Counts]]:
        """All of it, which is the caller's now; what running answers have used since the last time counts for `day`."""
        for meter in self._meters:
            self.add(day, meter.row, meter.read())
        taken: dict[datetime.date, dict[UsageRow, Counts]] = {}
        for (of_day, row), counts in self._rows.items():
            taken.setdefault(of_day, {})[row] = counts
        self._rows.clear()
        return taken

    def add(self, day: datetime.date, row: UsageRow, counts: Counts) -> None:
        if counts.empty:
            return
        if (day, row) not in self._rows and len(self._rows) >= MAX_ROWS:
            row = _others(row)
        self._rows.setdefault((day, row), Counts()).add(counts)


class UsageBook:
    """The counts in Valkey."""

    def __init__(self, client: redis.Redis, cluster: str) -> None:
        self._client = client
        self._prefix = f"{cluster}:usage"
        self._add = client.register_script(_ADD)

    async def add(self, writer: str, number: int, day: datetime.date, rows: dict[UsageRow, Counts]) -> None:
        """Adds them unless this writer's batch of that number, or a later one, is there already. Raises Unavailable."""
        arguments: list[str | int] = [number, KEPT_DAYS * 86_400, MAX_ROWS * len(fields(Counts)), _APPLIED_KEPT_S]
        for row, counts in rows.items():
            arguments += [_written(row), _written(_others(row))]
            arguments += [counts.requests, counts.prompt_tokens, counts.cached_tokens, counts.output_tokens]
        await asked(self._add(keys=[self._key(day), f"{self._prefix}-of:{writer}"], args=arguments), _UNREACHABLE)

    async def read(self, first: datetime.date, last: datetime.date) -> AsyncIterator[DayUsage]:
        """The rows of these days, in order. Raises Unavailable."""
        for ordinal in range(first.toordinal(), last.toordinal() + 1):
            day = datetime.date.fromordinal(ordinal)
            found = await asked(self._client.hgetall(self._key(day)), _UNREACHABLE)
            for usage in _rows_of(day, found):
                yield usage

    def _key(self, day: datetime.date) -> str:
        return f"{self._prefix}:{day.isoformat()}"


class UsageWriter:
    """Writes a tally down as it grows, until it is closed."""

    def __init__(self, tally: UsageTally, book: UsageBook, today: Callable[[], datetime.date]) -> None:
        self._tally = tally
        self._book = book
        self._today = today
        self._name = new_id("writer")
        self._number = 0
        self._pending: list[tuple[int, datetime.date, dict[UsageRow, Counts]]] = []
        """Taken from the tally, and not known to be written."""
        self._warnings = FewWarnings(logger)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = supervised(self._run, "usage-writer")

    async def close(self) -> None:
        """Writes the rest, if Valkey answers."""
        if self._task is not None:
            await end(self._task)
            if self._pending:
                await self.flush()
            await self.flush()

    async def flush(self) -> None:
        """Writes down what was taken from the tally before and is not known to be written or, if there is no such thing, all that was used
        so far. What Valkey does not take is left for the next time."""
        if not self._pending:
            for day, rows in self._tally.take(self._today()).items():
                for some in slices(list(rows.items()), _ROWS_AT_ONCE):
                    self._number += 1
                    self._pending.append((self._number, day, dict(some)))
        try:
            while self._pending:
                await self._book.add(self._name, *self._pending[0])
                self._pending.pop(0)
        except Unavailable as error:
            self._warnings.warn("usage is written down later: %s", error.message)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()


def today() -> datetime.date:
    """In UTC, in which days are counted."""
    return datetime.datetime.now(datetime.UTC).date()


def _others(row: UsageRow) -> UsageRow:
    return UsageRow(OTHERS, "", row.model, row.endpoint, row.batch)


def _written(row: UsageRow) -> str:
    return json.dumps([row.tenant, row.key_id, row.model, row.endpoint, row.batch], separators=(",", ":"))


def _rows_of(day: datetime.date, found: Mapping[bytes | str, bytes | str]) -> Iterator[DayUsage]:
    rows: dict[str, Counts] = {}
    for name, value in found.items():
        written, _, count = (name.decode() if isinstance(name, bytes) else name).rpartition("/")
        setattr(rows.setdefault(written, Counts()), count, int(value))
    for written in sorted(rows):
        yield DayUsage(day, UsageRow(*json.loads(written)), rows[written])
