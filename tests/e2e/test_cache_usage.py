"""How context caches are used on a cluster of 2+2 nodes with two gateways, and under load: each use is counted once, whichever gateway
serves it, and pins go where both use a cache."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from tests.e2e.test_context_caches import ARENA_BLOCKS, BLOCK_TOKENS, CONTEXT, EVICTIONS, SPEC, TIMEOUT_S, Caches, stable
from tests.e2e.test_two_gateways import GATEWAYS, TwoGateways
from tests.support.cluster import Cluster, hanging, pins_of
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE

NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
USES_EACH = 12
LOAD_THREADS = 3


class Office:
    """Who keeps and uses caches through either gateway."""

    def __init__(self, cluster: Cluster, gateways: TwoGateways) -> None:
        self.cluster, self.gateways = cluster, gateways
        self.caches = Caches(cluster)

    def ask(self, gateway: str, cache: dict[str, Any], question: str) -> int:
        """How many tokens of the prompt were found, its own beyond the cache's included."""
        first = {"role": "cache", "content": f"cache_id={cache['id']}"}
        body = {"messages": [first, {"role": "user", "content": question}], "max_tokens": 2, "model": self.cluster.model}
        answer = httpx.post(f"{self.gateways.url(gateway)}/v1/chat/completions", json=body, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def use(self, cache: dict[str, Any], each: int, what: str) -> int:
        """By both gateways at once, so often by each. Returns how many of its tokens these uses have found."""
        asked = [(gateway, f"{what} {number}?") for number in range(each) for gateway in GATEWAYS]
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda one: self.ask(one[0], cache, one[1]), asked))
        return sum(min(tokens, cache["tokens"]) for tokens in found)

    def shown(self, gateway: str, cache: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.get(f"{self.gateways.url(gateway)}/v1/caching/{cache['id']}", timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def counted(self, gateway: str, cache: dict[str, Any]) -> tuple[int, int]:
        """Uses, and the tokens that they found."""
        meter = self.shown(gateway, cache)["meter"]
        return meter["calls"], meter["saved_tokens"]

    def wait_counted(self, cache: dict[str, Any], calls: int, saved_tokens: int) -> None:
        for gateway in GATEWAYS:
            try:
                self.cluster.wait_until(lambda gateway=gateway: self.counted(gateway, cache)[0] >= calls, f"{calls} uses to be counted")  # type: ignore[misc]
            finally:
                assert self.counted(gateway, cache) == (calls, saved_tokens)

    def pinned_at(self, cache: dict[str, Any]) -> list[str]:
        sockets = {name: Path(self.cluster.record.run_dir, f"{name}.store.sock") for name in NODES}
        return [name for name, socket in sockets.items() if f"context-cache:{cache['id']}" in pins_of(socket)]

    def evicted(self) -> float:
        return sum(self.cluster.metric(f"{name}-store", EVICTIONS) for name in NODES)


class Load:
    """Others' prompts, each a new one, through both gateways, from its entry to its exit."""

    def __init__(self, office: Office) -> None:
        self._office, self._over, self._numbers = office, Event(), count()
        self._threads = [Thread(target=self._send, args=(GATEWAYS[number % 2],)) for number in range(LOAD_THREADS)]
        self._evicted = office.evicted()

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def wait_pool_replaced(self) -> None:
        """Until as many blocks as all nodes hold have been pushed out."""
        more = self._evicted + len(NODES) * ARENA_BLOCKS
        self._office.cluster.wait_until(lambda: self._office.evicted() > more, "the load to push out what nobody keeps")

    def _send(self, gateway: str) -> None:
        headers = {"x-springtide-tenant": "load"}
        while not self._over.is_set():
            body = {"model": self._office.cluster.model, "prompt": f"{next(self._numbers)} " * 500, "max_tokens": 1}
            url = f"{self._office.gateways.url(gateway)}/v1/completions"
            answer = httpx.post(url, json=body, headers=headers, timeout=TIMEOUT_S)
            assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    with Cluster(
        model=str(make_tiny_llama(tmp_path_factory.mktemp("model"))),
        dtype="float32",
        profile=TINY_PROFILE,
        prefill=2,
        decode=2,
        server={"separate_gateway": True},
        kv={"arena_size": ARENA_BLOCKS * SPEC.bytes_per_slot, "block_tokens": BLOCK_TOKENS},
        conductor={"admission": "baseline"},
    ) as cluster:
        gateways = TwoGateways(cluster, tmp_path_factory.mktemp("gateways"))
        try:
            yield Office(cluster, gateways)
        finally:
            gateways.second.stop()


def test_every_use_is_counted_once_whichever_gateway_serves_it(office: Office) -> None:
    cache = office.caches.wait(office.caches.create(CONTEXT[:1000]), replicas=1)
    with Load(office) as load:
        saved = office.use(cache, USES_EACH, "Question")
        load.wait_pool_replaced()
        saved += office.use(cache, USES_EACH, "Another question")
    uses = 4 * USES_EACH
    office.wait_counted(cache, uses, saved)
    assert saved >= uses * stable(cache), "it was found each time"
    assert office.shown("gateway-1", cache)["meter"]["creation_tokens"] == cache["meter"]["creation_tokens"], "it was computed once"


def test_a_pin_follows_the_use_of_both_gateways_under_load(office: Office) -> None:
    """Of the two prefill nodes the one with the pinned copy stands still for a while. The load pushes out at the other what nobody uses."""
    cluster = office.cluster
    cache = office.caches.wait(office.caches.create(CONTEXT[-1000:]), replicas=1)
    (first,) = office.pinned_at(cache)
    other = "prefill-1" if first == "prefill-0" else "prefill-0"
    saved, rounds = office.use(cache, 1, "Before"), 1
    still = cluster.pid_of(first)
    assert still is not None
    with Load(office) as load, hanging([still]):

        def follows() -> bool:
            nonlocal saved, rounds
            saved, rounds = saved + office.use(cache, 1, f"Meanwhile, {rounds}"), rounds + 1
            return office.pinned_at(cache) == [other]

        cluster.wait_until(follows, "its pin to be where it is used")
        load.wait_pool_replaced()
    cluster.wait_ready()
    saved += office.use(cache, 1, "Afterwards")
    assert office.pinned_at(cache) == [other]
    office.wait_counted(cache, 2 * (rounds + 1), saved)
    assert office.shown("gateway-0", cache)["meter"]["creation_tokens"] == cache["meter"]["creation_tokens"], "it was computed once"


def test_uses_outlive_the_gateway_that_served_them_and_pins_end_with_the_cache(office: Office) -> None:
    cache = office.caches.wait(office.caches.create(CONTEXT[2000:3000], replicas=2), replicas=2)
    saved = office.use(cache, 2, "Before")
    office.wait_counted(cache, 4, saved)
    office.gateways.kill("gateway-1")
    found = [office.ask("gateway-0", cache, f"Who is left {number}?") for number in range(4)]
    assert min(found) >= stable(cache)
    office.gateways.wait_revived("gateway-1")
    office.wait_counted(cache, 8, saved + sum(min(tokens, cache["tokens"]) for tokens in found))
    assert len(office.pinned_at(cache)) == 2
    deleted = httpx.delete(f"{office.gateways.url('gateway-1')}/v1/caching/{cache['id']}", timeout=TIMEOUT_S)
    assert deleted.status_code == 200
    office.cluster.wait_until(lambda: office.pinned_at(cache) == [], "its pins to end with it")
