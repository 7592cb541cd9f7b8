"""Who looks after a batch: one gateway at a time, another one when that has gone or was held up, and every line has one result."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import redis.asyncio as redis
from gateway_cluster import MODEL, Cluster

from gateway.accounts.allowance import Allowance
from gateway.accounts.register import Register
from gateway.accounts.usage import UsageBook, today
from gateway.app import GatewayServer
from gateway.batches import desk
from springtide.process import ProcessArguments
from tests.support.waiting import until


class Gateways:
    """Of one cluster, with one directory of files."""

    def __init__(self, arguments: ProcessArguments, cluster: Cluster, name: str) -> None:
        config = arguments.config.model_copy(update={"cluster": name})
        self.name = name
        self.valkey = redis.Redis.from_url(config.redis_url or "")
        self.running: list[GatewayServer] = []
        self._arguments = replace(arguments, config=config)
        self._cluster = cluster

    async def start(self) -> openai.AsyncOpenAI:
        gateway = GatewayServer(self._arguments, self._cluster.conductor.address)
        await gateway.start()
        self.running.append(gateway)
        return openai.AsyncOpenAI(base_url=f"http://{gateway.http_address}/v1", api_key="none", max_retries=0, timeout=20)

    async def close(self) -> None:
        for gateway in self.running:
            await gateway.close()
        await self.valkey.aclose()


@pytest.fixture
async def gateways(arguments: ProcessArguments, cluster: Cluster, tmp_path: Path) -> AsyncIterator[Gateways]:
    gateways = Gateways(arguments, cluster, f"takeover-{tmp_path.name}")
    yield gateways
    await gateways.close()


async def submit(client: openai.AsyncOpenAI, count: int) -> str:
    rows = []
    for number in range(count):
        body = {"model": MODEL, "prompt": f"Say {number}", "max_tokens": 20}
        rows.append(json.dumps({"custom_id": f"q-{number}", "method": "POST", "url": "/v1/completions", "body": body}))
    sent = await client.files.create(file=("lines.jsonl", "\n".join(rows).encode()), purpose="batch")
    return (await client.batches.create(input_file_id=sent.id, endpoint="/v1/completions", completion_window="24h")).id


async def over(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async def ended() -> Any:
        batch = await client.batches.retrieve(batch_id)
        return batch if batch.status in ("completed", "failed") else None

    return await until(ended, within_s=60)


async def check_answers(client: openai.AsyncOpenAI, batch_id: str, count: int) -> None:
    batch = await over(client, batch_id)
    assert batch.status == "completed" and batch.error_file_id is None
    rows = [json.loads(row) for row in (await client.files.content(batch.output_file_id)).text.splitlines()]
    assert Counter(row["custom_id"] for row in rows) == Counter(f"q-{number}" for number in range(count))


async def test_one_gateway_has_a_batch_and_another_goes_on_when_it_ends(gateways: Gateways, cluster: Cluster, tmp_path: Path) -> None:
    first = await gateways.start()
    second = await gateways.start()
    for node in cluster.nodes.values():
        node.pause_at = 0
    batch_id = await submit(first, 60)
    await until(lambda: len(cluster.started) >= 2)
    (holder,) = [key async for key in gateways.valkey.scan_iter(match=f"{gateways.name}:batch-lease:*")]
    name = (await gateways.valkey.get(holder)).decode()
    holds = [gateway for gateway in gateways.running if gateway._gateway_id == name]
    assert len(holds) == 1
    for node in cluster.nodes.values():
        node.pause_at = None
        node.patience.set()
    await holds[0].close()
    other = second if holds[0] is gateways.running[0] else first
    await check_answers(other, batch_id, 60)
    assert list((tmp_path / "files" / "batches").iterdir()) == [], "nothing is left of a batch that is over"


async def test_one_whose_lease_somebody_else_has_gives_the_batch_up(
    gateways: Gateways, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "LEASE_S", 2.0)
    client = await gateways.start()
    for node in cluster.nodes.values():
        node.pause_at = 0
    batch_id = await submit(client, 10)
    await until(lambda: any(node.running for node in cluster.nodes.values()))
    await gateways.valkey.set(f"{gateways.name}:batch-lease:{batch_id}", "somebody else", px=3000)
    await until(lambda: not any(node.running for node in cluster.nodes.values()))
    for node in cluster.nodes.values():
        node.pause_at = None
        node.patience.set()
    await check_answers(client, batch_id, 10)


async def test_lines_count_in_the_usage_as_batches_and_against_the_budget(gateways: Gateways) -> None:
    client = (await gateways.start()).with_options(default_headers={"X-Springtide-Tenant": "acme"})
    await check_answers(client, await submit(client, 3), 3)
    book = UsageBook(gateways.valkey, gateways.name)
    async with asyncio.timeout(20):
        while True:
            found = [usage async for usage in book.read(today(), today()) if usage.row.tenant == "acme"]
            if sum(usage.counts.requests for usage in found) >= 3:
                break
            await asyncio.sleep(0.05)
    assert {(usage.row.endpoint, usage.row.batch) for usage in found} == {("/v1/completions", True)}
    await Register(gateways.valkey, gateways.name).set_tenant("acme", Allowance(batch_lines=4))
    async with asyncio.timeout(20):
        while (done := await over(client, await submit(client, 5))).status == "completed":
            pass
    assert done.errors.data[0].code == "batch_lines_exceeded"


async def test_of_batches_that_are_looked_over_at_once_those_begin_that_fit_the_budget(gateways: Gateways, cluster: Cluster) -> None:
    clients = [(await gateways.start()).with_options(default_headers={"X-Springtide-Tenant": "acme"}) for _ in range(2)]
    await Register(gateways.valkey, gateways.name).set_tenant("acme", Allowance(batch_lines=4))
    async with asyncio.timeout(20):
        for client in clients:
            while (await over(client, await submit(client, 5))).status == "completed":
                pass
    for node in cluster.nodes.values():
        node.pause_at = 0
    made = await asyncio.gather(*(submit(client, 3) for client in clients for _ in range(4)))
    async with asyncio.timeout(20):
        while "validating" in (statuses := [(await clients[0].batches.retrieve(batch_id)).status for batch_id in made]):  # noqa: ASYNC110 - only an answer tells
            await asyncio.sleep(0.05)
    assert Counter(statuses) == {"in_progress": 1, "failed": 7}


async def test_what_a_dead_gateway_was_receiving_is_removed_a_day_later(gateways: Gateways, tmp_path: Path) -> None:
    directory = tmp_path / "files" / "files"
    directory.mkdir(parents=True)
    old, new = directory / "upload-1.part", directory / "upload-2.part"
    for path in (old, new):
        path.write_bytes(b"half of")
    os.utime(old, (0, 0))
    await gateways.start()
    assert list(directory.iterdir()) == [new]
