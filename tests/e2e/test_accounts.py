"""Keys, limits and usage of a real cluster with TLS: what tenants share and what they do not, and what outlives a gateway, Valkey and the
cluster."""

from __future__ import annotations

import asyncio
import datetime
import json
import ssl
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from statistics import median
from typing import Any

import grpc
import httpx
import pytest
import redis.asyncio as redis

from gateway.accounts.usage import Counts, UsageBook, today
from springtide.errors import Unavailable
from springtide.rpc import inference_pb2, inference_pb2_grpc
from tests.support import command
from tests.support.certificates import Authority
from tests.support.cluster import Cluster
from tests.support.profiles import DEMO_PROFILE
from tests.support.waiting import wait_until

MODEL = "demo"
PROMPT = [7 + number % 900 for number in range(300)]
OUTPUT_TOKENS = 4
BLOCK_TOKENS = 32
UNKNOWN_CACHE = "cache-0123456789abcdef01234567"


@dataclass(frozen=True)
class Place:
    """Where clusters live, one after the other: their certificate, and the run directory that is kept."""

    directory: Path
    authority: Authority

    def cluster(self) -> Cluster:
        files = {"tls_certificate": str(self.directory / "server.pem"), "tls_key": str(self.directory / "server.key")}
        return Cluster(
            server={"separate_gateway": True, **files},
            served_model_name=MODEL,
            run_dir=str(self.directory / "run"),
            kv={"arena_size": "128MiB", "block_tokens": BLOCK_TOKENS},
            max_context=1000,
            profile=DEMO_PROFILE,
        )


@dataclass(frozen=True)
class Tenant:
    """A tenant with a key of its own, and how it reaches the cluster."""

    name: str
    key: str
    key_id: str
    authority: Path

    @classmethod
    def made(cls, cluster: Cluster, place: Place, name: str) -> Tenant:
        made = json.loads(springtide(cluster, "keys", "create", name, "--json"))
        tenant = cls(name, made["key"], made["key_id"], place.authority.path)
        cluster.wait_until(lambda: tenant.status(cluster) == 200, f"the key of {name} to be known")
        return tenant

    def ask(self, cluster: Cluster, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0, **fields}
        with self.http(cluster) as http:
            return http.post("/v1/completions", json=body)

    def cached(self, cluster: Cluster, **fields: Any) -> int:
        answer = self.ask(cluster, **fields)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def seconds(self, cluster: Cluster, prompt: list[int]) -> float:
        """Until the first token of an answer is there."""
        began = time.monotonic()
        assert self.ask(cluster, prompt=prompt, max_tokens=1).status_code == 200
        return time.monotonic() - began

    def keep(self, cluster: Cluster, text: str) -> tuple[dict[str, Any], float]:
        """A new context cache of the text, and the seconds until it was ready."""
        with self.http(cluster) as http:
            began = time.monotonic()
            answer = http.post("/v1/caching", json={"model": MODEL, "messages": [{"role": "system", "content": text}]})
            assert answer.status_code == 200, answer.text
            path = f"/v1/caching/{answer.json()['id']}"
            wait_until(lambda: http.get(path).raise_for_status().json()["status"] == "ready", "the context cache to be ready")
            took_s = time.monotonic() - began
            return dict(http.get(path).json()), took_s

    def let_go(self, cluster: Cluster, *caches: dict[str, Any]) -> None:
        with self.http(cluster) as http:
            for cache in caches:
                http.delete(f"/v1/caching/{cache['id']}").raise_for_status()

    def ask_with(self, cluster: Cluster, cache_id: str, text: str) -> tuple[httpx.Response, float]:
        """The answer to a question after the text, of which that context cache is named, and the seconds that it took."""
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "Well?"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 1, "ignore_eos": True, "temperature": 0}
        with self.http(cluster) as http:
            began = time.monotonic()
            answer = http.post("/v1/chat/completions", json=body, headers={"x-msh-context-cache": cache_id})
            took_s = time.monotonic() - began
        assert answer.status_code == 200, answer.text
        return answer, took_s

    def status(self, cluster: Cluster) -> int:
        with self.http(cluster) as http:
            try:
                return http.get("/v1/models").status_code
            except httpx.TransportError:
                return 0

    def http(self, cluster: Cluster) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key}"}
        trusted = ssl.create_default_context(cafile=self.authority)
        return httpx.Client(base_url=cluster.url, headers=headers, verify=trusted, timeout=60)

    def used(self, cluster: Cluster) -> tuple[int, int, int]:
        """Requests, prompt tokens and output tokens, as they are written down."""
        counts = asyncio.run(self._counts(cluster))
        return counts.requests, counts.prompt_tokens, counts.output_tokens

    async def _counts(self, cluster: Cluster) -> Counts:
        client, counts = redis.Redis.from_url(cluster.record.redis_url), Counts()
        yesterday = today() - datetime.timedelta(days=1)
        try:
            async for usage in UsageBook(client, cluster.record.cluster).read(yesterday, today()):
                if usage.row.tenant == self.name:
                    counts.add(usage.counts)
        except Unavailable:
            return Counts()
        finally:
            await client.aclose()
        return counts


def springtide(cluster: Cluster, *arguments: str) -> str:
    ended = command.springtide(*arguments, "--url", cluster.url)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="st-") as path:
        place = Place(Path(path), Authority(Path(path)))
        place.authority.sign(place.directory / "server.pem", place.directory / "server.key")
        yield place


@pytest.fixture(scope="module")
def cluster(place: Place) -> Iterator[Cluster]:
    with place.cluster() as cluster:
        yield cluster


def two_tenants(cluster: Cluster, place: Place) -> tuple[Tenant, Tenant]:
    """Acme and Zeta, of whose prompts the cluster has none yet, also when a test is tried again."""
    acme, zeta = (Tenant.made(cluster, place, f"{name}-{token_hex(4)}") for name in ("acme", "zeta"))
    return acme, zeta


def test_two_tenants_do_not_find_each_others_prompts(cluster: Cluster, place: Place) -> None:
    acme, zeta = two_tenants(cluster, place)
    assert acme.cached(cluster) == 0
    cluster.wait_until(lambda: acme.cached(cluster, max_tokens=1) > 0, "its own prompt to be found")
    assert zeta.cached(cluster) == 0, "what another tenant has asked is new"
    same_tenant = Tenant.made(cluster, place, acme.name)
    assert same_tenant.cached(cluster) > 0, "all keys of a tenant find the same"


def test_two_tenants_cannot_tell_by_the_time_what_the_other_has_asked(cluster: Cluster, place: Place) -> None:
    """What another tenant has in the pool takes a tenant as long as what is new, which is much longer than what it has itself."""
    acme, zeta = two_tenants(cluster, place)
    new, others, own = [], [], []
    for number in range(5):
        prompt = [1000 + (number * 900 + i) % 9000 for i in range(900)]
        new.append(acme.seconds(cluster, prompt))
        cluster.wait_until(lambda prompt=prompt: acme.cached(cluster, prompt=prompt, max_tokens=1) > 800, "its own prompt to be found")
        others.append(zeta.seconds(cluster, prompt))
        own.append(acme.seconds(cluster, prompt))
    assert median(others) > 0.5 * median(new)
    assert median(others) > 2 * median(own), "otherwise nothing would have been seen"


def test_two_tenants_cannot_tell_by_the_time_what_the_other_has_in_a_context_cache(cluster: Cluster, place: Place) -> None:
    """To keep what another tenant keeps, and to ask with it, by its cache's very name, is as with what is new: it is computed, is answered
    in the same form and takes as long, which is much longer than with what the tenant keeps itself."""
    acme, zeta = two_tenants(cluster, place)
    keeping: dict[str, list[float]] = {"new": [], "other's": [], "own": []}
    asking: dict[str, list[float]] = {"new": [], "other's": [], "own": []}

    def rules(number: int) -> str:
        """Some 800 tokens, that no other number's begin with."""
        return f"House number {100 + number}. " + "The tide comes in, and it goes out. " * 80

    def keep(tenant: Tenant, whose: str, text: str) -> tuple[dict[str, Any], int]:
        """The cache, and how many tokens were computed for it."""
        before = cluster.metric("prefill-0", "springtide_prefill_tokens_total")
        cache, took_s = tenant.keep(cluster, text)
        keeping[whose].append(took_s)
        return cache, int(cluster.metric("prefill-0", "springtide_prefill_tokens_total") - before)

    def ask(tenant: Tenant, whose: str, cache_id: str, text: str) -> tuple[dict[str, Any], list[str]]:
        """What was used, and the names of the answer's headers."""
        answer, took_s = tenant.ask_with(cluster, cache_id, text)
        asking[whose].append(took_s)
        return answer.json()["usage"], sorted(answer.headers)

    def form(cache: dict[str, Any]) -> dict[str, Any]:
        """What two caches of the same text have in common."""
        return {name: value for name, value in cache.items() if name not in ("id", "created_at", "expired_at")}

    for number in range(5):
        (acmes, new), (zetas, others), (again, own) = (
            keep(tenant, whose, rules(3 * number)) for tenant, whose in ((acme, "new"), (zeta, "other's"), (acme, "own"))
        )
        assert new == others > acmes["tokens"] - 2 * BLOCK_TOKENS and own <= BLOCK_TOKENS, (new, others, own)
        assert form(acmes) == form(zetas) == form(again)
        zeta.let_go(cluster, zetas)
        acme.let_go(cluster, acmes, again)

        acmes, _ = keep(acme, "new", rules(3 * number + 1))
        as_with_others = ask(zeta, "other's", acmes["id"], rules(3 * number + 1))
        as_with_new = ask(zeta, "new", UNKNOWN_CACHE, rules(3 * number + 2))
        as_with_own, _ = ask(acme, "own", acmes["id"], rules(3 * number + 1))
        assert as_with_others == as_with_new and as_with_new[0]["prompt_tokens_details"]["cached_tokens"] == 0
        assert as_with_own["prompt_tokens_details"]["cached_tokens"] > acmes["tokens"] - 2 * BLOCK_TOKENS
        acme.let_go(cluster, acmes)
    for seconds in (keeping, asking):
        new_s, others_s, own_s = (median(seconds[whose]) for whose in ("new", "other's", "own"))
        print(f"new {new_s:.3f} s, the other's {others_s:.3f} s, own {own_s:.3f} s")
        assert others_s > 0.5 * new_s
        assert others_s > 2 * own_s, "otherwise nothing would have been seen"


def test_a_revoked_key_is_refused_over_http_and_grpc_within_a_second(cluster: Cluster, place: Place) -> None:
    tenant = Tenant.made(cluster, place, "revoked")
    credentials = grpc.ssl_channel_credentials(place.authority.path.read_bytes())
    with grpc.secure_channel(cluster.grpc_address, credentials) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        metadata = (("authorization", f"Bearer {tenant.key}"),)
        request = inference_pb2.GenerateRequest(model=MODEL, text="Hello", sampling={"max_tokens": 2})
        assert list(stub.Generate(request, metadata=metadata, timeout=60))
        springtide(cluster, "keys", "revoke", tenant.key_id)
        time.sleep(1.0)
        assert tenant.status(cluster) == 401
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.Generate(request, metadata=metadata, timeout=60))
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    cluster.wait_until(lambda: tenant.used(cluster)[0] == 1, "the one request to be written down")


def test_our_own_commands_speak_tls(cluster: Cluster, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", Tenant.made(cluster, place, "ours").key)
    ca = ("--ca", str(place.authority.path))
    assert "TTFT" in springtide(cluster, "chat", "Hello", "--max-tokens", "3", *ca)
    report = json.loads(
        springtide(cluster, "bench", "serve", "--requests", "2", "--prompt-tokens", "40", "--output-tokens", "2", "--json", *ca)
    )
    assert report["results"]["completed"] == 2


def test_keys_and_usage_outlive_the_gateway_valkey_and_the_cluster(cluster: Cluster, place: Place) -> None:
    tenant = Tenant.made(cluster, place, "lasting")
    prompt, output = len(PROMPT), OUTPUT_TOKENS
    assert tenant.ask(cluster).status_code == 200
    cluster.wait_until(lambda: tenant.used(cluster) == (1, prompt, output), "the first request to be written down")

    cluster.kill("gateway-0")
    cluster.wait_ready(restarted="gateway-0")
    assert tenant.used(cluster) == (1, prompt, output)
    assert tenant.ask(cluster).status_code == 200
    cluster.wait_until(lambda: tenant.used(cluster) == (2, 2 * prompt, 2 * output), "the second to be written down")

    cluster.kill("valkey")
    assert tenant.ask(cluster).status_code == 200, "the last known keys go on"
    cluster.wait_ready(restarted="valkey")
    cluster.wait_until(lambda: tenant.used(cluster) == (3, 3 * prompt, 3 * output), "what was used meanwhile to be written down")

    cluster.stop()
    with place.cluster() as again:
        assert tenant.status(again) == 200
        assert tenant.used(again) == (3, 3 * prompt, 3 * output)
        [row] = json.loads(springtide(again, "usage", "--tenant", "lasting", "--format", "json"))
        assert (row["requests"], row["output_tokens"]) == (3, 3 * output)
