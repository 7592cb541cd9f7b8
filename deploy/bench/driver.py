"""Sends a workload to a running cluster and times what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from deploy.bench.statistics import RequestRecord
from deploy.bench.workload import BenchWorkload
from springtide.client import NO_RETRIES, AsyncClient
from springtide.errors import SpringtideError
from springtide.protocol.usage import Usage

REFUSED = "429 gate"
"""Error of a request that a gate refused: it was not sent."""


class Gate:
    """Lets at most `most` requests be in flight at a time. The others wait in the order in which they came or, with `refuses`, are refused
    at once."""

    def __init__(self, most: int, *, refuses: bool = False) -> None:
        self._places, self._refuses = asyncio.Semaphore(most), refuses

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[bool]:
        """Whether the request may be sent; it is in flight for as long as the context lasts."""
        if self._refuses and self._places.locked():
            yield False
            return
        async with self._places:
            yield True


async def drive(
    url: str,
    model: str | None,
    workload: BenchWorkload,
    on_done: Callable[[RequestRecord], None],
    gate: Gate | None = None,
    ca: Path | None = None,
) -> tuple[str, list[RequestRecord]]:
    """The model's name and a record for each request; `on_done` is told of each as it ends. `gate`: one that other workloads pass too, in
    the place of the workload's own. `ca`: as for a client. Raises Unavailable when nothing answers."""
    async with AsyncClient(url, ca=ca, retries=NO_RETRIES) as client:
        name = model or (await client.models())[0]
        entrance = gate or Gate(workload.concurrency or workload.requests)
        start = time.monotonic()

        async def send(prompt: list[int], arrival_s: float) -> RequestRecord:
            await asyncio.sleep(start + arrival_s - time.monotonic())
            async with entrance.place() as admitted:
                # A request that is late because this process is busy, or that had to wait for its place, was still due then.
                due_s = time.monotonic() if workload.rate is None else start + arrival_s
                if admitted:
                    record = await _request(client, name, prompt, workload.output_tokens, due_s)
                else:
                    record = RequestRecord(due_s, (), due_s, error=REFUSED)
            on_done(record)
            return record

        async with asyncio.TaskGroup() as group:
            pairs = zip(workload.prompts(), workload.arrivals_s(), strict=True)
            tasks = [group.create_task(send(prompt, arrival_s)) for prompt, arrival_s in pairs]
    return name, [task.result() for task in tasks]


async def _request(client: AsyncClient, model: str, prompt: list[int], output_tokens: int, sent_s: float) -> RequestRecord:
    times: list[float] = []
    usage: Usage | None = None
    error = None
    try:
        async for chunk in client.complete(prompt, model=model, max_tokens=output_tokens, ignore_eos=True, temperature=0):
            if chunk.text or (chunk.finish_reason is not None and not times):  # an answer may consist of bytes that are no text
                times.append(chunk.received_at)
            usage = chunk.usage or usage
    except SpringtideError as failure:
        error = f"{failure.http_status} {failure.code or failure.openai_type}"
    if error is None and (usage is None or usage.completion_tokens != output_tokens or not times):
        error = "incomplete answer"
    prompt_tokens, produced, cached = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) if usage else (0, 0, 0)
    return RequestRecord(sent_s, tuple(times), time.monotonic(), prompt_tokens, produced, cached, error)
