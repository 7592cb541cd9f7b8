"""Looks after batches: takes those that nobody does, has their lines answered, writes the answers down, and makes files of them at the
end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from gateway.accounts.accounts import RateLimited
from gateway.batches import core as ev
from gateway.batches.batch import Batch, BatchStatus, Ending, InputError
from gateway.batches.core import BatchesCore
from gateway.batches.desk import BatchDesk, Lease, OpenBatch
from gateway.batches.files import Files, on_disk
from gateway.batches.lines import InputLines, find_lines
from gateway.batches.results import LineResult, ResultLog
from gateway.bodies import SideThread
from springtide.clock import Clock
from springtide.errors import SpringtideError, Unavailable
from springtide.supervision import end, first_of, supervised

logger = logging.getLogger(__name__)

MOST_LINES = 32
"""That run at once at a gateway. More would only wait there for idle capacity."""
MOST_HELD = 64
"""Batches that a gateway looks after at once."""
LOOK_S = 1.0
_PIECE_LINES = 1000
_MAKING_S = 600.0
"""A batch that has been seen listed for so long and not there will never be: who was making it is gone."""


class BatchApi(Protocol):
    """What a batch's lines are, and how they are answered: known to the API that they are of."""

    max_line_bytes: int

    def check(self, endpoint: str, raw: bytes) -> str:
        """Reads a line of a batch for this endpoint, and returns the id that its client gives it. Raises InvalidRequest."""
        ...

    async def answer(self, batch: Batch, line: int, raw: bytes, tries: int) -> LineResult:
        """Has the line answered in idle capacity, however that ends. Raises SpringtideError where it may be tried again, which it was so
        often before, and RateLimited when it would be more than its caller may have for now."""
        ...

    def unanswered(self, batch: Batch, line: int, raw: bytes) -> LineResult:
        """The result of a line whose batch expired before it was answered."""
        ...


@dataclass(slots=True, eq=False)
class _Holding:
    """A batch that this gateway looks after."""

    batch: Batch
    lines: InputLines
    log: ResultLog
    completed: int = 0
    failed: int = 0
    unwritten: list[LineResult] = field(default_factory=list)
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    how: Ending | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Something is to be written, or it is over."""

    def drop(self) -> None:
        for task in self.running.values():
            task.cancel()


class BatchWorker:
    """The batches that this gateway looks after. `start` it once; `close` it in any case: others go on with what it had."""

    def __init__(self, desk: BatchDesk, files: Files, api: BatchApi, side_thread: SideThread, clock: Clock) -> None:
        self._desk = desk
        self._files = files
        self._api = api
        self._side_thread = side_thread
        self._clock = clock
        self._core = BatchesCore(MOST_LINES)
        self._holdings: dict[str, _Holding] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By the batch that each looks after."""
        self._tenants: dict[str, str] = {}
        """Of these batches."""
        self._missing_since: dict[str, float] = {}
        """Batches that are listed and not there."""
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._looking = supervised(self._look, "batches")

    async def close(self) -> None:
        """Gives up everything, so that others may go on at once. Idempotent."""
        await end(self._looking, *self._tasks.values())

    # ---- which batches ----

    async def _look(self) -> None:
        while True:
            try:
                await self._take()
            except Unavailable as error:
                logger.warning("batches cannot be looked for: %s", error.message)
            self._feed(ev.Tick())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._desk.changed.wait()
            self._desk.changed.clear()

    async def _take(self) -> None:
        """Takes batches that nobody looks after: of the tenant of which it has fewest, the oldest."""
        listed = {batch.batch_id: batch for batch in await self._desk.open()}
        self._missing_since = {batch_id: since for batch_id, since in self._missing_since.items() if batch_id in listed}
        free = [batch for batch in listed.values() if batch.batch_id not in self._tasks]
        while free and len(self._tasks) < MOST_HELD:
            held = Counter(self._tenants.values())
            batch = min(free, key=lambda batch: held[batch.tenant])
            free.remove(batch)
            lease = await self._desk.claim(batch)
            if lease is not None:
                self._tenants[batch.batch_id] = batch.tenant
                self._tasks[batch.batch_id] = asyncio.create_task(self._look_after(lease), name=f"look after {batch.batch_id}")

    async def _look_after(self, lease: Lease) -> None:
        name = lease.batch.batch_id
        try:
            await self._held(lease)
        except SpringtideError as error:
            logger.warning("%s is left to others for now: %s", name, error.message)
        except Exception:
            logger.exception("%s is left to others for now", name)
        finally:
            self._feed(ev.Lost(name))
            holding = self._holdings.pop(name, None)
            if holding is not None:
                holding.drop()
                await asyncio.gather(*holding.running.values(), return_exceptions=True)
                holding.log.close()
            with contextlib.suppress(SpringtideError):
                await self._desk.release(lease)
            del self._tasks[name], self._tenants[name]

    async def _held(self, lease: Lease) -> None:
        where = lease.batch
        batch = await self._desk.change(where.tenant, where.batch_id, Batch.taken)
        if batch is None or batch.status.over:
            await self._forget(where, there=batch is not None)
            return
        await first_of(self._keep(lease, batch), self._work(batch))

    async def _forget(self, where: OpenBatch, *, there: bool) -> None:
        """It is over, or was never quite made."""
        now = self._clock.now()
        if there or now - self._missing_since.setdefault(where.batch_id, now) > _MAKING_S:
            await on_disk(shutil.rmtree, self._desk.directory(where.batch_id), True)
            await self._desk.closed(where)

    async def _keep(self, lease: Lease, batch: Batch) -> None:
        """Keeps the lease, tells how far the batch is and hears whether it is still wanted; returns when it is somebody else's."""
        while True:
            try:
                if not await self._desk.renew(lease):
                    return
                now = await self._tell(batch)
                if now is None or now.epoch != batch.epoch:
                    return
                if now.status is BatchStatus.CANCELLING:
                    self._feed(ev.Cancelled(batch.batch_id))
            except Unavailable as error:
                logger.warning("the lease of %s cannot be kept just now: %s", batch.batch_id, error.message)
            if self._clock.now() >= lease.until:
                return
            await asyncio.sleep(LOOK_S)

    async def _tell(self, batch: Batch) -> Batch | None:
        holding = self._holdings.get(batch.batch_id)
        if holding is None:
            return await self._desk.get(batch.tenant, batch.batch_id)
        completed, failed = holding.completed, holding.failed
        return await self._desk.change(batch.tenant, batch.batch_id, lambda now: now.advanced(batch.epoch, completed, failed))

    # ---- one batch ----

    async def _work(self, batch: Batch) -> None:
        """From wherever it is to its end."""
        validating = batch.status is BatchStatus.VALIDATING
        check = (lambda raw: self._api.check(batch.endpoint, raw)) if validating else None
        path = self._desk.input(batch.batch_id)
        lines, errors = await find_lines(path, self._api.max_line_bytes, self._side_thread, check)
        if validating and not errors:
            errors = await self._beyond_budget(batch, len(lines))
        if errors:
            await self._change(batch, lambda now: now.refused(batch.epoch, errors, _now()))
            await self._forget(OpenBatch(batch.batch_id, batch.tenant, batch.created_at), there=True)
            return
        if validating:
            batch = await self._change(batch, lambda now: now.validated(batch.epoch, len(lines), _now()))
        log = await on_disk(ResultLog.take_over, self._desk.directory(batch.batch_id), batch.epoch)
        outcomes = log.answered.values()
        holding = self._holdings[batch.batch_id] = _Holding(batch, lines, log, sum(outcomes), len(outcomes) - sum(outcomes))
        if batch.status is BatchStatus.CANCELLING:
            holding.how = "cancelled"
        else:
            answered = log.answered
            open_lines = [line for line in range(len(lines)) if line not in answered]
            expires_at = self._clock.now() + batch.expires_at - time.time()
            self._feed(ev.Held(batch.batch_id, batch.tenant, batch.created_at, expires_at, open_lines))
        await self._write(holding)
        await self._finish(holding)

    async def _beyond_budget(self, batch: Batch, lines: int) -> tuple[InputError, ...]:
        others = await self._desk.count_lines(batch, lines)
        if others is None:
            return ()
        message = f"{lines} lines, with {others} of other batches that are not over, are more than the {batch.most_lines} that are allowed"
        return (InputError("batch_lines_exceeded", message),)

    async def _write(self, holding: _Holding) -> None:
        """Writes results down as they come, those that came together at once, until there is nothing more to come."""
        while True:
            while holding.unwritten:
                results, holding.unwritten = holding.unwritten, []
                await on_disk(holding.log.append, results)
                for result in results:
                    holding.completed += result.ok
                    holding.failed += not result.ok
                    self._feed(ev.Answered(holding.batch.batch_id, result.line))
            if holding.how is not None:
                return
            await holding.wake.wait()
            holding.wake.clear()

    async def _finish(self, holding: _Holding) -> None:
        batch, how, log = holding.batch, holding.how, holding.log
        assert how is not None
        if how == "completed":
            await self._change(batch, lambda now: now.finalizing(batch.epoch, _now()))
        if how == "expired":
            await self._expire(holding)
        output, errors = [await self._file(holding, ok=ok) for ok in (True, False)]
        outcomes = log.answered.values()
        completed, failed = sum(outcomes), len(outcomes) - sum(outcomes)
        await self._change(batch, lambda now: now.ended(batch.epoch, how, completed, failed, output, errors, _now()))
        await self._forget(OpenBatch(batch.batch_id, batch.tenant, batch.created_at), there=True)

    async def _expire(self, holding: _Holding) -> None:
        """Every line that has no answer gets that for a result."""
        answered = holding.log.answered
        left = [line for line in range(len(holding.lines)) if line not in answered]

        def told(lines: list[int]) -> None:
            holding.log.append([self._api.unanswered(holding.batch, line, holding.lines.read(line)) for line in lines])

        for begin in range(0, len(left), _PIECE_LINES):
            await on_disk(told, left[begin : begin + _PIECE_LINES])

    async def _file(self, holding: _Holding, *, ok: bool) -> str:
        """The id of the file of outputs, or errors; empty where there are none. Whoever does this again makes the same file."""
        batch, kind = holding.batch, "output" if ok else "errors"
        file_id = f"file-{hashlib.sha256(f'{batch.batch_id} {kind}'.encode()).hexdigest()[:24]}"
        content = holding.log.texts(ok=ok)
        made = await self._files.make(batch.tenant, file_id, content, f"{batch.batch_id}_{kind}.jsonl", "batch_output", time.time())
        return "" if made is None else made.file_id

    async def _change(self, batch: Batch, change: Callable[[Batch], Batch | None]) -> Batch:
        """The batch after that. Raises Unavailable when it is not this gateway's any more."""
        now = await self._desk.change(batch.tenant, batch.batch_id, change)
        if now is None or now.epoch != batch.epoch:
            raise Unavailable(f"{batch.batch_id} is looked after by somebody else", code="batch_lost")
        return now

    # ---- lines ----

    def _feed(self, event: ev.Event) -> None:
        for action in self._core.handle(event, self._clock.now()):
            holding = self._holdings.get(action.batch_id)
            if holding is None:
                continue
            match action:
                case ev.RunLine(_, line, tries):
                    task = asyncio.create_task(self._run(holding, line, tries), name=f"{action.batch_id} line {line}")
                    holding.running[line] = task
                    task.add_done_callback(lambda task, holding=holding, line=line: _ended(holding, line, task))  # type: ignore[misc]
                case ev.DropLines():
                    holding.drop()
                case ev.Finish(_, how):
                    holding.how = how
                    holding.wake.set()

    async def _run(self, holding: _Holding, line: int, tries: int) -> None:
        batch = holding.batch
        try:
            raw = await on_disk(holding.lines.read, line)
            result = await self._api.answer(batch, line, raw, tries)
        except RateLimited as error:
            self._feed(ev.OverBudget(batch.batch_id, line, error.retry_after_s))
            return
        except SpringtideError as error:
            logger.info("line %d of %s is tried again: %s", line, batch.batch_id, error.message)
        except Exception:
            logger.exception("line %d of %s is tried again", line, batch.batch_id)
        else:
            holding.unwritten.append(result)
            holding.wake.set()
            return
        self._feed(ev.NotAnswered(batch.batch_id, line))


def _ended(holding: _Holding, line: int, task: asyncio.Task[None]) -> None:
    if holding.running.get(line) is task:
        del holding.running[line]


def _now() -> int:
    return int(time.time())
