"""Springtide's own client against a real cluster: kept contexts and batches, waiting for them and not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from springtide.client import AsyncClient, BatchRequest, Client
from springtide.errors import SpringtideError
from tests.support.cluster import Cluster
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE

RULES = [{"role": "system", "content": "Rules of the house: " + " ".join(f"rule {number} is kept." for number in range(60))}]
QUESTION = {"role": "user", "content": "What is rule 7?"}
SHORT = {"max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    with Cluster(model=str(model), dtype="float32", profile=TINY_PROFILE, kv={"arena_size": "256MiB"}, max_context=2048) as cluster:
        yield cluster


def test_a_context_is_kept_used_extended_tagged_and_ended(cluster: Cluster) -> None:
    with Client(cluster.url) as client:
        made = client.caches.create(RULES, ttl_s=600, name="rules", metadata={"of": "the house"})
        ready = client.caches.wait(made.cache_id, timeout_s=60, every_s=0.1)
        assert (ready.status, ready.name, ready.metadata) == ("ready", "rules", {"of": "the house"}) and ready.tokens > 200
        for first in (ready.as_message(), ready.as_message(reset_ttl_s=1200)):
            answer = client.answer([first, QUESTION], **SHORT)
            assert answer.usage.cached_tokens > 200 and answer.text == client.answer([*RULES, QUESTION], **SHORT).text
        assert client.caches.get(made.cache_id).expires_at > ready.expires_at
        assert client.caches.extend(made.cache_id, 3600).expires_at > ready.expires_at + 2000
        assert client.caches.tag("house", made.cache_id) == "house"
        assert client.caches.tagged("house").cache_id == made.cache_id
        assert [cache.cache_id for cache in client.caches.list()] == [made.cache_id]
        assert client.caches.untag("house") and client.caches.delete(made.cache_id)
        assert client.caches.list() == []
        with pytest.raises(SpringtideError) as gone:
            client.caches.get(made.cache_id)
        assert made.cache_id in gone.value.message


def test_a_batch_is_answered_and_each_result_has_its_name(cluster: Cluster) -> None:
    with Client(cluster.url) as client:
        body = {"model": cluster.model, "messages": [QUESTION], **SHORT}
        requests = [BatchRequest(f"line-{number}", {**body, "seed": number}) for number in range(5)]
        requests.append(BatchRequest("wrong", {**body, "temperature": 9}))
        made = client.batches.create(requests, metadata={"of": "tests"})
        assert made.total in (0, 6) and made.batch_id in [batch.batch_id for batch in client.batches.list()]
        ended = client.batches.wait(made.batch_id, timeout_s=60, every_s=0.2)
        assert (ended.status, ended.total, ended.completed, ended.failed) == ("completed", 6, 5, 1) and ended.over
        results = client.batches.results(ended)
        assert results.keys() == {request.custom_id for request in requests}
        expected = client.answer([QUESTION], **SHORT).text
        for name, result in results.items():
            if name == "wrong":
                assert result.status_code == 400 and "temperature" in result.body["error"]["message"]
            else:
                assert result.status_code == 200 and result.body["choices"][0]["message"]["content"] == expected
        other = client.batches.create([BatchRequest(f"long-{number}", {**body, "max_tokens": 1500}) for number in range(40)])
        client.batches.cancel(other.batch_id)
        assert client.batches.wait(other.batch_id, timeout_s=60, every_s=0.2).status == "cancelled"


async def test_without_blocking_it_is_the_same(cluster: Cluster) -> None:
    async with AsyncClient(cluster.url) as client:
        made = await client.caches.create(RULES, ttl_s=600)
        batch = await client.batches.create([BatchRequest("one", {"model": cluster.model, "messages": [QUESTION], **SHORT})])
        ready, ended = await asyncio.gather(
            client.caches.wait(made.cache_id, timeout_s=60, every_s=0.1), client.batches.wait(batch.batch_id, timeout_s=60, every_s=0.2)
        )
        assert ready.status == "ready" and (await client.answer([ready.as_message(), QUESTION], **SHORT)).usage.cached_tokens > 200
        assert (await client.caches.get(made.cache_id)).tokens == ready.tokens
        assert await client.caches.tag("async", made.cache_id) == "async"
        assert (await client.caches.tagged("async")).cache_id == (await client.caches.list())[0].cache_id == made.cache_id
        assert (await client.caches.extend(made.cache_id, 3600)).expires_at > ready.expires_at
        assert await client.caches.untag("async") and await client.caches.delete(made.cache_id)
        assert ended.status == "completed" and (await client.batches.get(batch.batch_id)) == ended
        assert (await client.batches.results(ended))["one"].status_code == 200
        assert batch.batch_id in [listed.batch_id for listed in await client.batches.list()]
        long = await client.batches.create(
            [BatchRequest(str(number), {"model": cluster.model, "messages": [QUESTION], "max_tokens": 1500}) for number in range(20)]
        )
        await client.batches.cancel(long.batch_id)
        assert (await client.batches.wait(long.batch_id, timeout_s=60, every_s=0.2)).status == "cancelled"
