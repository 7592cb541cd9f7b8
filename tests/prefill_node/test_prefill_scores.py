"""Log-probabilities of prompts from prefill groups of real stages: transformers' own, whatever the split."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from springtide.protocol.outputs import Finish
from springtide.protocol.sampling import SamplingParams
from tests.support.engine_nodes import EngineNodes
from tests.support.models import make_tiny_llama
from tests.support.reference import Reference, random_prompt
from tests.support.scores import assert_scores_are_those_of

KV = {"block_tokens": 16, "arena_size": "8MiB", "layer_group_size": 4 << 10}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
NUM_TOP = 5
SCORED = replace(GREEDY, prompt_logprobs=NUM_TOP)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4)


def prompt(length: int) -> list[int]:
    return random_prompt(length, length, 10, 250)


@pytest.mark.parametrize(
    ("stages", "chunk_tokens", "tensor_parallel"), [(1, 40, 1), (2, 64, 1), (3, 7, 1), (2, 33, 2)], ids=["1", "2", "3", "2 of 2 ranks"]
)
async def test_they_are_those_of_transformers_whatever_the_pool_has(
    tmp_path: Path, model: Path, stages: int, chunk_tokens: int, tensor_parallel: int
) -> None:
    reference = Reference.from_directory(model)
    settings = {"chunk_tokens": chunk_tokens, "stages": stages, "tensor_parallel": tensor_parallel}
    async with EngineNodes(tmp_path, model, kv=KV, prefill_node=settings) as nodes:

        async def check(length: int, params: SamplingParams, cached_tokens: int = 0) -> None:
            outcome = await nodes.gateway.run(prompt(length), params)
            assert outcome.done is not None and outcome.done.cached_tokens == cached_tokens
            assert outcome.token_ids == reference.greedy(prompt(length), params.max_tokens)
            scores = outcome.done.prompt_logprobs
            if params.prompt_logprobs is None:
                assert scores is None
            else:
                assert scores is not None
                assert_scores_are_those_of(reference, prompt(length), scores, params.prompt_logprobs)

        await asyncio.gather(*(check(length, params) for length, params in ((1, SCORED), (17, GREEDY), (65, SCORED), (200, SCORED))))
        # All of it is computed again, and others find what it has left.
        await check(200, replace(SCORED, prompt_logprobs=0))
        await check(200, GREEDY, cached_tokens=192)
        await nodes.all_slots_given_back()


async def test_a_prompt_that_is_only_scored_ends_with_its_first_token(tmp_path: Path, model: Path) -> None:
    reference = Reference.from_directory(model)
    async with EngineNodes(tmp_path, model, kv=KV) as nodes:
        outcome = await nodes.gateway.run(prompt(100), replace(SCORED, max_tokens=1))
        assert outcome.finish is Finish.LENGTH and outcome.done is not None and outcome.done.prompt_logprobs is not None
        assert_scores_are_those_of(reference, prompt(100), outcome.done.prompt_logprobs, NUM_TOP)
        await nodes.all_slots_given_back()


async def test_what_goes_on_elsewhere_after_its_first_token_is_not_scored_again(tmp_path: Path, model: Path) -> None:
    reference = Reference.from_directory(model)
    async with EngineNodes(tmp_path, model, kv=KV) as nodes:
        first = await nodes.gateway.run(prompt(100), replace(SCORED, max_tokens=1))
        outcome = await nodes.gateway.run([*prompt(100), *first.token_ids], SCORED, num_prompt_tokens=100)
        assert outcome.done is not None and outcome.done.prompt_logprobs is None and outcome.done.cached_tokens == 96
        assert [*first.token_ids, *outcome.token_ids] == reference.greedy(prompt(100), 4)
