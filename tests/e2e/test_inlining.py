"""A decode node of a real cluster computes short prompts itself: the answers are those of transformers in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.generate import generate
from tests.support.models import make_tiny_llama
from tests.support.reference import Reference, random_prompt

PROFILE = {"prefill": [2000.0, 10.0, 0.0], "decode": [5.0, 0.1, 0.001]}
"""By which a prefill group would be much later."""
LONG_OUTPUT = 500
"""Of which most is still to come when the one who is to die has been looked up."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 8}
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", **shape)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference.from_directory(model)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    profile = tmp_path_factory.mktemp("profile") / "profile.json"
    profile.write_text(json.dumps(PROFILE))
    settings = {"profile": str(profile), "decode_node": {"inline_tokens": 100}, "conductor": {"admission": "baseline"}}
    with Cluster(model=str(model), dtype="float32", **settings) as cluster:
        yield cluster


def prompt_of(seed: int, length: int) -> list[int]:
    return random_prompt(seed, length, 10, 250)


def test_short_prompts_and_next_turns_are_inlined_and_long_ones_are_not(cluster: Cluster, reference: Reference) -> None:
    def answer(prompt: list[int]) -> tuple[list[int], int, float]:
        before = cluster.metric("decode-0", "springtide_decode_inlined_prompts_total")
        generated = generate(cluster.grpc_address, cluster.model, prompt, 20)
        assert generated.token_ids == reference.greedy(prompt, 20)
        return generated.token_ids, generated.cached_tokens, cluster.metric("decode-0", "springtide_decode_inlined_prompts_total") - before

    first = prompt_of(1, 90)
    tokens, cached, inlined = answer(first)
    assert (cached, inlined) == (0, 1)
    tokens, cached, inlined = answer(prompt_of(2, 300))
    assert inlined == 0
    _, cached, inlined = answer([*prompt_of(2, 300), *tokens, *prompt_of(3, 30)])
    assert (cached, inlined) == (256, 1)


def test_a_decode_node_killed_half_way_through_an_inlined_request_changes_no_token(cluster: Cluster, reference: Reference) -> None:
    prompt = prompt_of(4, 80)
    killed: list[int] = []

    def kill_once(so_far: int) -> None:
        if so_far >= 10 and not killed:
            killed.append(cluster.kill("decode-0"))

    answer = generate(cluster.grpc_address, cluster.model, prompt, LONG_OUTPUT, on_token=kill_once)
    assert killed, "the stream ended before the kill"
    assert answer.token_ids == reference.greedy(prompt, LONG_OUTPUT)
