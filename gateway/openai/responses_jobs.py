"""Responses in the background: they are made whether or not anybody waits, and what comes about is in Valkey for whoever asks."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gateway.answer import AnswerStream
from gateway.background import Background
from gateway.bodies import ClientDisconnected
from gateway.exchange import server_sent
from gateway.openai.responses_format import Json, ResponseFormat
from gateway.openai.responses_store import AGAIN_S, MOST_EVENT_BYTES, MOST_TRIES, RENEW_S, ResponseNotFound, ResponseStore, Stored
from springtide.errors import Overloaded, SpringtideError, Unavailable

logger = logging.getLogger(__name__)

MOST_JOBS = 64
"""Of a tenant in one gateway: nobody's connection limits them."""
_RETRY_AFTER_S = 5.0
_ENDINGS = ("status", "completed_at", "error", "incomplete_details", "usage", "output")
"""What of a response its end decides."""


@dataclass(slots=True, eq=False)
class _Job:
    tenant: str
    format: ResponseFormat
    answer: AnswerStream
    num_events: int = 0
    num_bytes: int = 0
    complete: bool = False
    """No further event is kept."""
    events: list[bytes] = field(default_factory=list)
    """Not yet kept."""

    @property
    def response_id(self) -> str:
        return self.format.response_id


class ResponseJobs:
    """The background responses of this gateway."""

    def __init__(self, store: ResponseStore, background: Background) -> None:
        self._store = store
        self._background = background
        self._jobs: dict[tuple[str, str], _Job] = {}
        self._running: Counter[str] = Counter()
        """By tenant, those that are about to begin too."""

    def check_room(self, tenant: str) -> None:
        """Raises Overloaded. May be called by any thread."""
        if (running := self._running[tenant]) >= MOST_JOBS:
            raise Overloaded(
                f"background: {running} responses of this tenant are being made already", retry_after_s=_RETRY_AFTER_S, reason="background"
            )

    async def begin(self, tenant: str, stored: Stored, written: ResponseFormat, start: Callable[[], AnswerStream]) -> None:
        """Returns when it is known to all gateways; it goes on by itself. Raises Overloaded, Unavailable and RecordTooLarge."""
        self.check_room(tenant)
        self._running[tenant] += 1
        try:
            await self._store.begin_run(tenant, written.response_id)
            await self._store.keep(tenant, stored)
            job = _Job(tenant, written, start())
        except BaseException:
            self._leave(tenant)
            raise
        self._jobs[tenant, job.response_id] = job
        self._background.start(self._run(job), f"response {job.response_id}")

    async def cancel(self, tenant: str, response_id: str) -> Stored:
        """As it is then. Raises ResponseNotFound."""
        stored = await self._store.end(tenant, response_id, {"status": "cancelled"})
        await self._store.cancel_run(tenant, response_id)
        if (job := self._jobs.get((tenant, response_id))) is not None:
            job.answer.disconnect()
        return stored

    async def _run(self, job: _Job) -> None:
        renewing = asyncio.create_task(self._renew(job))
        try:
            await self._keep(job, job.format.begin())
            async for batch in job.answer.batches():
                usage = job.answer.usage
                await self._keep(job, (event for delta in batch for event in job.format.delta(delta, usage)))
            await self._end(job, job.format.end(job.answer.usage))
        except ClientDisconnected:
            await self._end(job, job.format.cancelled(job.answer.usage))
        except SpringtideError as error:
            logger.info("background response failed: %s", error.message, extra={"request_id": job.answer.request_id})
            await self._end(job, job.format.failed(error))
        finally:
            renewing.cancel()
            job.answer.close()
            del self._jobs[job.tenant, job.response_id]
            self._leave(job.tenant)

    def _leave(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    async def _renew(self, job: _Job) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                if not await self._store.renew_run(job.tenant, job.response_id):
                    job.answer.disconnect()
                    return
            except Unavailable as error:
                logger.warning("cannot renew the lease of %s: %s", job.response_id, error.message)

    async def _keep(self, job: _Job, events: Iterable[bytes]) -> None:
        fresh = [*events]
        job.events += fresh
        job.num_bytes += sum(map(len, fresh))
        too_many = job.num_bytes > MOST_EVENT_BYTES
        if too_many and not job.complete:
            message = f"the events of this response have more than {MOST_EVENT_BYTES} bytes; retrieve it as a whole"
            number = job.num_events
            job.events = [
                server_sent({"type": "error", "sequence_number": number, "code": "too_long", "message": message, "param": None}, "error")
            ]
        try:
            await self._add(job, last=too_many)
        except Unavailable as error:
            logger.info("events of %s are kept later: %s", job.response_id, error.message)

    async def _add(self, job: _Job, last: bool) -> None:
        """Raises Unavailable; then they are still to be kept."""
        if job.complete:
            job.events = []
        if not job.events:
            return
        await self._store.add_events(job.tenant, job.response_id, job.events, job.num_events, last)
        job.complete, job.num_events, job.events = last, job.num_events + len(job.events), []

    async def _end(self, job: _Job, events: Iterable[bytes]) -> None:
        """The response is kept before its last event goes out: who has that finds it."""
        job.events += events
        for tries in range(1, MOST_TRIES + 1):
            try:
                await self._keep_end(job)
                return
            except ResponseNotFound:
                logger.info("%s was deleted while it was made", job.response_id)
                return
            except SpringtideError as error:
                if tries == MOST_TRIES or not isinstance(error, Unavailable):
                    logger.warning("%s cannot be kept: %s", job.response_id, error.message)
                    return
            await asyncio.sleep(AGAIN_S)

    async def _keep_end(self, job: _Job) -> None:
        """May be done again."""
        response = job.format.response
        changes: Json = {name: response[name] for name in _ENDINGS}
        stored = await self._store.end(job.tenant, job.response_id, changes)
        if stored.response["status"] == "cancelled":
            await self._store.add_output(job.tenant, job.response_id, {"output": response["output"], "usage": response["usage"]})
        await self._add(job, last=True)
        await self._store.end_run(job.tenant, job.response_id)
