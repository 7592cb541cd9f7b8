"""Two tenants' context caches in a real cluster: one keeps and asks for as much as it may, and what the other keeps is found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.test_context_caches import ARENA_BLOCKS, BLOCK_TOKENS, EVICTIONS, SPEC, Caches, stable
from tests.support.cluster import Cluster
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE

HARD_BLOCKS = ARENA_BLOCKS // 4
"""That a store takes."""
BUDGET_TOKENS = 4000
"""Of ten caches, with more blocks than two stores take from one tenant under hard pins."""
STORES = ("prefill-0-store", "decode-0-store")


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caches]:
    with Cluster(
        model=str(make_tiny_llama(tmp_path_factory.mktemp("model"))),
        dtype="float32",
        profile=TINY_PROFILE,
        server={"cache_budget_tokens": BUDGET_TOKENS},
        kv={
            "arena_size": ARENA_BLOCKS * SPEC.bytes_per_slot,
            "block_tokens": BLOCK_TOKENS,
            "hard_pin_share": HARD_BLOCKS / ARENA_BLOCKS,
        },
        conductor={"admission": "baseline"},
    ) as cluster:
        yield Caches(cluster)


def rules(number: int) -> str:
    """Some 350 tokens, one for each digit, that no other number's begin with."""
    return f"{number:02} " + "0123456789" * 35


def fill(caches: Caches, tenant: str) -> list[dict[str, Any]]:
    """As many caches as the tenant's budget is for."""
    made = [caches.create(rules(0), tenant)]
    while sum(cache["tokens"] for cache in made) + made[0]["tokens"] <= BUDGET_TOKENS:
        made.append(caches.create(rules(len(made)), tenant))
    return [caches.wait(cache, replicas=1, tenant=tenant) for cache in made]


def pinned(caches: Caches, kind: str) -> dict[str, float]:
    return {store: caches.cluster.metric(store, "springtide_store_pinned_blocks", {"kind": kind}) for store in STORES}


def pinned_together(caches: Caches, *kinds: str) -> float:
    return sum(sum(pinned(caches, kind).values()) for kind in kinds)


def blocks(cache: dict[str, Any]) -> int:
    """The least that it keeps."""
    return stable(cache) // BLOCK_TOKENS


def test_who_uses_up_its_budget_and_its_hard_pins_leaves_others_theirs(caches: Caches) -> None:
    bobs = caches.wait(caches.create(rules(0), "bob"), replicas=1, tenant="bob")
    most_of_bob = bobs["tokens"] // BLOCK_TOKENS

    anns = fill(caches, "ann")
    one_more = {"model": caches.cluster.model, "messages": [{"role": "system", "content": rules(len(anns))}]}
    assert caches("POST", "/v1/caching", one_more, "ann", status=429)["error"]["code"] == "cache_budget_exceeded"
    kept = blocks(bobs) + sum(map(blocks, anns))
    caches.cluster.wait_until(lambda: pinned_together(caches, "hard", "soft") >= kept, "all of them to be pinned")
    assert pinned_together(caches, "soft") > 0, "Ann has all the hard pins that she may have"

    evicted = {store: caches.cluster.metric(store, EVICTIONS) for store in STORES}
    caches.flood(prompts=40, tenant="ann")
    gone = [caches.cluster.metric(store, EVICTIONS) - before for store, before in evicted.items()]
    assert sum(gone) > 2 * ARENA_BLOCKS, "what nobody keeps was pushed out, more than once over"
    assert caches.ask(bobs, "Is it there?", tenant="bob") >= stable(bobs)

    hard = pinned(caches, "hard")
    assert all(count <= HARD_BLOCKS // 2 + most_of_bob for count in hard.values()), "a tenant leaves as many as it has"
    assert pinned_together(caches, "hard", "soft") <= BUDGET_TOKENS // BLOCK_TOKENS + most_of_bob

    second = caches.wait(caches.create(rules(1), "bob"), replicas=1, tenant="bob")
    more = sum(hard.values()) + blocks(second)
    caches.cluster.wait_until(lambda: pinned_together(caches, "hard") >= more, "Bob's second cache to be under a hard pin")
    assert [caches.ask(cache, "And now?", tenant="bob") >= stable(cache) for cache in (bobs, second)] == [True, True]
