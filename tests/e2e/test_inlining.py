"""A decode node of a real cluster computes short prompts itself: the answers are those of transformers in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster
from tests.support.generate import generate
from tests.support.models import demo_gguf
from tests.support.reference import Reference, random_prompt

PROFILE = {"prefill": [2000.0, 10.0, 0.0], "decode": [5.0, 0.1, 0.001]}
"""By which a prefill group would be much later."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    profile = tmp_path_factory.mktemp("profile") / "profile.json"
    profile.write_text(json.dumps(PROFILE))
    settings = {"admission": "baseline"}
    with Cluster(dtype="float32", profile=str(profile), decode_node={"inline_tokens": 100}, conductor=settings) as cluster:
        yield cluster


def test_short_prompts_and_next_turns_are_inlined_and_long_ones_are_not(cluster: Cluster) -> None:
    reference = Reference.from_gguf(demo_gguf())

    def answer(prompt: list[int]) -> tuple[list[int], int, float]:
        before = cluster.metric("decode-0", "springtide_decode_inlined_prompts_total")
        generated = generate(cluster.grpc_address, cluster.model, prompt, 20)
        assert generated.token_ids == reference.greedy(prompt, 20)
        return generated.token_ids, generated.cached_tokens, cluster.metric("decode-0", "springtide_decode_inlined_prompts_total") - before

    first = random_prompt(seed=1, length=90)
    tokens, cached, inlined = answer(first)
    assert (cached, inlined) == (0, 1)
    tokens, cached, inlined = answer(random_prompt(seed=2, length=300))
    assert inlined == 0
    _, cached, inlined = answer([*random_prompt(seed=2, length=300), *tokens, *random_prompt(seed=3, length=30)])
    assert (cached, inlined) == (256, 1)


def test_a_decode_node_killed_half_way_through_an_inlined_request_changes_no_token(cluster: Cluster) -> None:
    prompt = random_prompt(seed=4, length=80)
    killed: list[int] = []

    def kill_once(so_far: int) -> None:
        if so_far >= 10 and not killed:
            killed.append(cluster.kill("decode-0"))

    answer = generate(cluster.grpc_address, cluster.model, prompt, 50, on_token=kill_once)
    assert killed, "the stream ended before the kill"
    assert answer.token_ids == Reference.from_gguf(demo_gguf()).greedy(prompt, 50)
