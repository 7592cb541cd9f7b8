"""Context caches of a real cluster: what they keep is found by requests, whatever is served meanwhile and whatever is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from springtide.modelinfo import KVSpec
from tests.support import command
from tests.support.cluster import Cluster, hanging, pins_of
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE

BLOCK_TOKENS = 64
ARENA_BLOCKS = 160
PREFIX_TOKENS = 4000
SPEC = KVSpec(3, 2, 16, "float32", BLOCK_TOKENS)
CONTEXT = "".join(f"Rule {number}: what is asked is answered. " for number in range(1000))
UNPINNED = CONTEXT.replace("Rule", "Role")
"""As long a text to the token, of which nobody asks that it be kept."""
TIMEOUT_S = 60.0
EVICTIONS = "springtide_store_removed_blocks_total"
STORES = ("prefill-0-store", "prefill-1-store", "decode-0-store")


class Caches:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def __call__(self, method: str, path: str, body: Any = None, tenant: str = "", status: int = 200) -> dict[str, Any]:
        headers = {"x-springtide-tenant": tenant}
        answer = httpx.request(method, self.cluster.url + path, json=body, headers=headers, timeout=TIMEOUT_S)
        assert answer.status_code == status, answer.text
        return dict(answer.json())

    def create(self, text: str, tenant: str = "", **more: Any) -> dict[str, Any]:
        messages = [{"role": "system", "content": text}]
        return self("POST", "/v1/caching", {"model": self.cluster.model, "messages": messages, **more}, tenant)

    def wait(self, cache: dict[str, Any], replicas: int, tenant: str = "", computed_beyond: int = -1) -> dict[str, Any]:
        """Until it is held so often, having been computed since its meter counted so many tokens: what is known of it may be older than
        what has happened to its stores."""
        found: dict[str, Any] = {}

        def held() -> bool:
            try:
                found.update(self("GET", f"/v1/caching/{cache['id']}", tenant=tenant))
            except httpx.HTTPError:
                return False
            computed = found["meter"]["creation_tokens"] > computed_beyond
            return found["status"] == "ready" and found["replicas_held"] == replicas and computed

        self.cluster.wait_until(held, f"{replicas} replicas of the cache")
        return found

    def ask(self, cache: dict[str, Any], question: str, tenant: str = "") -> int:
        """How many tokens of the prompt were found."""
        first = {"role": "cache", "content": f"cache_id={cache['id']}"}
        body = {"messages": [first, {"role": "user", "content": question}], "max_tokens": 2, "model": self.cluster.model}
        usage = self("POST", "/v1/chat/completions", body, tenant)["usage"]
        assert usage["prompt_tokens"] > cache["tokens"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def found(self, text: str, tenant: str = "") -> int:
        """How many tokens were found of a prompt that begins with the text, and names no cache."""
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "What is asked?"}]
        usage = self("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 2, "model": self.cluster.model}, tenant)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def flood(self, prompts: int, tenant: str = "flood") -> None:
        """More of the tenant's prompts than all arenas hold, four at a time. They go on after a first token, so that decode nodes have
        them too."""

        def one(number: int) -> None:
            body = {"model": self.cluster.model, "prompt": f"{number} " * 500, "max_tokens": 2, "ignore_eos": True}
            self("POST", "/v1/completions", body, tenant)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(one, range(prompts)))


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caches]:
    model = make_tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=8192)
    with Cluster(
        model=str(model),
        dtype="float32",
        profile=TINY_PROFILE,
        prefill=2,
        server={"separate_gateway": True},
        # What nobody pins is lost to a flood for certain: other policies may keep what has been used before.
        kv={"arena_size": ARENA_BLOCKS * SPEC.bytes_per_slot, "block_tokens": BLOCK_TOKENS, "eviction": "lru"},
        conductor={"admission": "baseline"},
    ) as cluster:
        yield Caches(cluster)


@pytest.fixture(scope="module")
def cache(caches: Caches) -> dict[str, Any]:
    made = caches.create(CONTEXT[:PREFIX_TOKENS], replicas=2, ttl=3000)
    assert made["status"] == "pending"
    return caches.wait(made, replicas=2)


def stable(cache: dict[str, Any]) -> int:
    """The tokens of its full blocks; a block less where its last one is not everybody's."""
    return int(cache["tokens"]) // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS


def test_it_is_found_while_others_fill_the_pool_and_lose_as_long_a_prefix_that_nobody_keeps(caches: Caches, cache: dict[str, Any]) -> None:
    assert cache["tokens"] > PREFIX_TOKENS * 3 // 4 and cache["meter"]["creation_tokens"] >= stable(cache)
    unpinned = UNPINNED[:PREFIX_TOKENS]
    assert caches.found(unpinned) < BLOCK_TOKENS, "it is new"
    assert caches.ask(cache, "What is asked?") >= stable(cache)
    caches.cluster.wait_until(lambda: caches.found(unpinned) >= stable(cache), "both to be found")
    evicted = {store: caches.cluster.metric(store, EVICTIONS) for store in STORES}
    caches.flood(prompts=40)
    gone = [caches.cluster.metric(store, EVICTIONS) - before for store, before in evicted.items()]
    assert min(gone) > ARENA_BLOCKS, f"what nobody keeps was pushed out everywhere, more than once over: {gone}"
    assert caches.ask(cache, "And now?") >= stable(cache)
    assert caches.found(unpinned) < BLOCK_TOKENS, "the same flood has pushed it out: it is the pins that have saved the other"


def test_what_a_request_marks_is_found_while_others_fill_the_pool_and_lose_what_none_marks(caches: Caches) -> None:
    said = [{"role": "user", "content": "Keep what I say. " * 60}]
    body = {"model": caches.cluster.model, "messages": said, "max_tokens": 2, "prompt_cache_options": {"ttl": "1h"}}
    unmarked = "Lose what I say. " * 60
    written = caches("POST", "/v1/chat/completions", body)["usage"]["prompt_tokens_details"]
    assert written["cached_tokens"] == 0 and written["cache_write_tokens"] > 500

    def pinned() -> bool:
        stores = ("prefill-0-store", "prefill-1-store")
        return any(caches.cluster.metric(store, "springtide_store_pinned_blocks", {"kind": "soft"}) for store in stores)

    caches.cluster.wait_until(pinned, "its blocks to be pinned")
    caches.cluster.wait_until(lambda: caches.found(unmarked) > 500, "the other to be found too")
    caches.flood(prompts=40)
    read = caches("POST", "/v1/chat/completions", body)["usage"]["prompt_tokens_details"]
    assert read == {"cached_tokens": written["cache_write_tokens"], "cache_write_tokens": 0}
    assert caches.found(unmarked) < BLOCK_TOKENS


def test_its_pin_follows_to_the_node_where_it_is_used(caches: Caches) -> None:
    """Of two prefill nodes the one with the pinned copy stands still for a while, and the other computes what begins with the cache."""
    cluster = caches.cluster
    made = caches.wait(caches.create(CONTEXT[-1000:]), replicas=1)

    def pinned_at() -> list[str]:
        sockets = {name: Path(cluster.record.run_dir, f"{name}.store.sock") for name in ("prefill-0", "prefill-1", "decode-0")}
        return [name for name, socket in sockets.items() if f"context-cache:{made['id']}" in pins_of(socket)]

    (first,) = pinned_at()
    other = "prefill-1" if first == "prefill-0" else "prefill-0"
    still = cluster.pid_of(first)
    assert first.startswith("prefill") and still is not None
    with hanging([still]):
        for number in range(8):
            caches.ask(made, f"Question {number}?")
        cluster.wait_until(lambda: pinned_at() == [other], "its pin to be where it is used")
    cluster.wait_ready()
    caches.flood(prompts=40)
    assert pinned_at() == [other] and caches.wait(made, replicas=1)["meter"]["creation_tokens"] == made["meter"]["creation_tokens"]
    assert caches.ask(made, "And now?") >= stable(made)


def test_it_is_found_when_one_of_two_stores_that_hold_it_is_killed_and_held_twice_again(caches: Caches, cache: dict[str, Any]) -> None:
    before = caches("GET", f"/v1/caching/{cache['id']}")["meter"]["creation_tokens"]
    caches.cluster.kill("prefill-0-store")
    assert caches.ask(cache, "Who is there?") >= stable(cache)
    caches.cluster.wait_ready("prefill-0-store")
    held = caches.wait(cache, replicas=2)
    assert held["meter"]["creation_tokens"] == before, "it was copied, not computed"
    assert caches.ask(cache, "And who now?") >= stable(cache)


def test_it_is_found_after_a_restart_of_conductor_and_gateway(caches: Caches, cache: dict[str, Any]) -> None:
    for name in ("conductor-0", "gateway-0"):
        caches.cluster.kill(name)
    caches.cluster.wait_ready()
    assert caches.wait(cache, replicas=2)["tokens"] == cache["tokens"]
    assert caches.ask(cache, "Do you remember?") >= stable(cache)


def test_when_every_store_that_held_it_is_killed_it_is_computed_anew(caches: Caches, cache: dict[str, Any]) -> None:
    before = caches("GET", f"/v1/caching/{cache['id']}")["meter"]["creation_tokens"]
    for name in STORES:
        caches.cluster.kill(name)
    caches.cluster.wait_ready()
    held = caches.wait(cache, replicas=2, computed_beyond=before)
    assert held["meter"]["creation_tokens"] > before
    assert caches.ask(cache, "Anew?") >= stable(cache)


def test_the_command_makes_shows_and_ends_caches(caches: Caches, tmp_path: Path) -> None:
    def springtide(*arguments: str, code: int = 0) -> Any:
        done = command.springtide("cache", *arguments, "--url", caches.cluster.url)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if "--json" in arguments else done.stdout + done.stderr

    text = tmp_path / "rules.txt"
    text.write_text(CONTEXT[:1000])
    (made,) = springtide("create", str(text), "--name", "rules", "--ttl", "10m", "--tag", "rules", "--soft", "--wait", "--json")
    assert (made["status"], made["name"], made["pin"], made["replicas_held"]) == ("ready", "rules", "soft", 1)
    assert made["id"] in [cache["id"] for cache in springtide("ls", "--json")]
    shown = springtide("stat", made["id"], "--extend", "2h", "--json")
    assert shown["expired_at"] > made["expired_at"] + 6000 and shown["messages"][0]["content"] == CONTEXT[:1000]
    assert "1 of 1 stores" in springtide("stat", made["id"])
    springtide("rm", made["id"])
    assert "there is no context cache" in springtide("stat", made["id"], code=1)


def test_a_tenant_finds_nothing_of_what_another_keeps(caches: Caches) -> None:
    text = "A secret of Ann's. " * 100
    made = caches.create(text, tenant="ann")
    caches.wait(made, replicas=1, tenant="ann")
    for tenant, status in (("ann", 200), ("bob", 404)):
        caches("GET", f"/v1/caching/{made['id']}", tenant=tenant, status=status)
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "Well?"}]
    found = {}
    for tenant in ("bob", "ann"):
        headers = {"x-springtide-tenant": tenant}
        with openai.OpenAI(base_url=f"{caches.cluster.url}/v1", api_key="none", default_headers=headers, max_retries=0) as client:
            answer = client.chat.completions.create(model=caches.cluster.model, messages=messages, max_tokens=2)  # type: ignore[arg-type]
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            found[tenant] = answer.usage.prompt_tokens_details.cached_tokens
    assert found["bob"] == 0 and (found["ann"] or 0) >= stable(made)
