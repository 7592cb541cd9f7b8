"""Prompts that are scored, and prompts that are only computed, by the official client against running clusters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.cluster import Cluster
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE
from tests.support.reference import Reference, random_prompt
from tests.support.scores import TOLERANCE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference.from_directory(model)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    """Short prompts are inlined, as far as that depends on their length."""
    settings = {"prefill_node": {"stages": 2, "chunk_tokens": 64, "threads": 1}, "decode_node": {"threads": 1, "inline_tokens": 64}}
    with Cluster(model=str(model), dtype="float32", profile=TINY_PROFILE, kv={"block_tokens": 16}, **settings) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize("length", [1, 20, 300])
def test_an_echo_is_scored_as_transformers_does_whatever_is_cached(
    cluster: Cluster, client: openai.OpenAI, reference: Reference, length: int
) -> None:
    prompt = random_prompt(length, length, 10, 250)
    wanted = reference.logits(prompt).log_softmax(-1)
    for _ in range(2):
        answer = client.completions.create(model=cluster.model, prompt=prompt, echo=True, logprobs=3, max_tokens=1, temperature=0)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
        assert len(logprobs.token_logprobs) == length + 1 and logprobs.token_logprobs[0] is None
        for position in range(1, length):
            own = logprobs.token_logprobs[position]
            assert own is not None and abs(own - float(wanted[position - 1, prompt[position]])) < TOLERANCE
            best = max((logprobs.top_logprobs[position] or {}).values())
            assert abs(best - float(wanted[position - 1].max())) < TOLERANCE
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0, "all of it is computed"


def test_choices_of_one_prompt_score_it_once_and_reuse_what_that_has_computed(cluster: Cluster, reference: Reference) -> None:
    prompt = random_prompt(7, 200, 10, 250)
    body = {"model": cluster.model, "prompt": prompt, "prompt_logprobs": 0, "n": 3, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).json()
    wanted = reference.logits(prompt).log_softmax(-1)
    for choice in answer["choices"]:
        entries = choice["prompt_logprobs"][1:]
        for position, entry in enumerate(entries, 1):
            (own,) = entry.values()
            assert abs(own["logprob"] - float(wanted[position - 1, prompt[position]])) < TOLERANCE
    assert len({choice["text"] for choice in answer["choices"]}) == 1


def test_a_prompt_that_is_only_computed_is_found_by_the_next_request(cluster: Cluster, client: openai.OpenAI) -> None:
    for length in (40, 333):
        prompt = random_prompt(8, length, 10, 250)
        only = client.completions.create(model=cluster.model, prompt=prompt, max_tokens=0)
        assert only.choices[0].text == "" and only.choices[0].finish_reason == "length"
        assert only.usage is not None and only.usage.completion_tokens == 0
        following = client.completions.create(model=cluster.model, prompt=prompt, max_tokens=2)
        assert following.usage is not None and following.usage.prompt_tokens_details is not None
        assert following.usage.prompt_tokens_details.cached_tokens == (length - 1) // 16 * 16


def test_the_best_of_several_outputs_is_the_likeliest_of_those_that_its_seeds_make(cluster: Cluster, client: openai.OpenAI) -> None:
    options = {"model": cluster.model, "prompt": random_prompt(9, 30, 10, 250), "seed": 5, "max_tokens": 6, "logprobs": 0}
    every = client.completions.create(**options, n=4, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
    best = client.completions.create(**options, best_of=4, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
    likeliest = max(every.choices, key=lambda choice: sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs))
    assert [choice.logprobs.tokens for choice in best.choices] == [likeliest.logprobs.tokens]
    assert best.usage.completion_tokens == 24
