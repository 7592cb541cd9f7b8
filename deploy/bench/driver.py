"""Sends a workload to a running cluster and times what comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from deploy.bench.statistics import RequestRecord
from deploy.bench.workload import BenchWorkload
from springtide.client import AsyncClient
from springtide.errors import SpringtideError
from springtide.protocol.outputs import Usage


async def drive(
    url: str, model: str | None, workload: BenchWorkload, on_done: Callable[[RequestRecord], None]
) -> tuple[str, list[RequestRecord]]:
    """The model's name and a record for each request; `on_done` is told of each as it ends. Raises Unavailable when nothing answers."""
    async with AsyncClient(url) as client:
        name = model or (await client.models())[0]
        gate = asyncio.Semaphore(workload.concurrency or workload.requests)
        start = time.monotonic()

        async def send(prompt: list[int], arrival_s: float) -> RequestRecord:
            await asyncio.sleep(start + arrival_s - time.monotonic())
            async with gate:
                # A request that is late because this process is busy was still due then.
                due_s = time.monotonic() if workload.rate is None else start + arrival_s
                record = await _request(client, name, prompt, workload.output_tokens, due_s)
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
