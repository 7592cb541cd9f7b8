"""What the clients of a decode node see, with its real store, model and sessions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from decode_node.server.steps import StepRunner
from springtide.protocol.outputs import FailureCode, Finish
from springtide.protocol.sampling import LogitBias, SamplingParams
from tests.support.engine_nodes import EOS, DirectEngine, EngineNodes, Outcome
from tests.support.models import make_tiny_llama
from tests.support.waiting import until

KV = {"block_tokens": 16, "arena_size": "8MiB"}
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_llama(path)
    yield path


def prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(10, 250) for _ in range(length)]


REQUESTS = [
    (prompt(30), SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)),
    (prompt(31), SEEDED),
    (prompt(47), replace(SEEDED, seed=8, repetition_penalty=1.3, max_tokens=90)),
    (prompt(16), replace(SEEDED, seed=9, presence_penalty=0.7, frequency_penalty=0.4, logprobs=2)),
    (prompt(5), replace(SEEDED, top_p=1.0, min_p=0.01, logprobs=0, max_tokens=2)),
    (prompt(70), replace(SEEDED, seed=10, max_tokens=200, ignore_eos=False, logit_bias=LogitBias.of({EOS: 4.0}))),
    (prompt(17), replace(SEEDED, seed=11, max_tokens=1)),
]


async def everything_at_once(run_dir: Path, model: Path, *, overlap: bool) -> tuple[list[Outcome], list[list[int]]]:
    """What a gateway hears, and what the engine alone says."""
    async with EngineNodes(run_dir, model, prefill=1, decode=1, kv=KV, decode_node={"overlap": overlap, "max_batch": 4}) as nodes:
        outcomes = await asyncio.gather(*(nodes.gateway.run(token_ids, params, waits=True) for token_ids, params in REQUESTS))
        await nodes.all_slots_given_back()
        direct = DirectEngine(nodes)
        return list(outcomes), [direct.generate(token_ids, params) for token_ids, params in REQUESTS]


async def test_the_tokens_are_the_same_with_and_without_overlap_and_of_the_engine_alone(tmp_path: Path, model: Path) -> None:
    with_overlap, expected = await everything_at_once(tmp_path, model, overlap=True)
    one_at_a_time, _ = await everything_at_once(tmp_path, model, overlap=False)
    for outcome, plain, tokens, (_, params) in zip(with_overlap, one_at_a_time, expected, REQUESTS, strict=True):
        assert outcome.token_ids == plain.token_ids == tokens
        assert outcome.finish == plain.finish
        assert outcome.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
        assert len(outcome.logprobs) == (0 if params.logprobs is None else len(tokens))
    assert {outcome.finish for outcome in with_overlap} == {Finish.LENGTH, Finish.STOP}


async def test_a_stop_token_ends_the_output_before_it(tmp_path: Path, model: Path) -> None:
    async with EngineNodes(tmp_path, model, prefill=1, decode=1, kv=KV) as nodes:
        whole = await nodes.gateway.run(prompt(30), SEEDED)
        stop = next(token for token in whole.token_ids[5:] if token not in whole.token_ids[:5])
        stopped = await nodes.gateway.run(prompt(30), replace(SEEDED, stop_token_ids=(stop,)))
        assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop)]
        assert stopped.finish == Finish.STOP
        await nodes.all_slots_given_back()


async def test_an_abort_in_the_middle_of_others_leaves_their_tokens_alone(tmp_path: Path, model: Path) -> None:
    async with EngineNodes(tmp_path, model, prefill=1, decode=1, kv=KV) as nodes:
        token_ids, params = REQUESTS[2]
        others = [await nodes.gateway.start(prompt(40 + i), replace(SEEDED, max_tokens=1000)) for i in range(3)]
        running = asyncio.create_task(nodes.gateway.run(token_ids, params))
        await until(lambda: all(len(nodes.gateway.outcomes[attempt_id].token_ids) > 3 for attempt_id in others))
        for attempt_id in others:
            await nodes.gateway.abort(attempt_id)
        assert (await running).token_ids == DirectEngine(nodes).generate(token_ids, params)
        await nodes.all_slots_given_back()


async def test_a_step_that_raises_fails_who_is_in_it_and_the_node_goes_on(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(steps: StepRunner, run: object) -> None:
        raise RuntimeError("out of order")

    async with EngineNodes(tmp_path, model, prefill=1, decode=1, kv=KV) as nodes:
        with monkeypatch.context() as patched:
            patched.setattr(StepRunner, "run", broken)
            (failure,) = (await nodes.gateway.run(prompt(30), SEEDED)).failures
        assert failure.code == FailureCode.INTERNAL and "out of order" in failure.message
        assert (await nodes.gateway.run(prompt(30), SEEDED)).token_ids == DirectEngine(nodes).generate(prompt(30), SEEDED)
        await nodes.all_slots_given_back()


async def test_an_inlined_prompt_has_the_tokens_of_one_that_a_prefill_group_computed(tmp_path: Path, model: Path) -> None:
    """Cold, with its prefix here from the turn before, longer than a step takes, and as a continuation; others run beside them. One that is
    far too long fails."""
    decode_node = {"inline_tokens": 20}
    async with EngineNodes(tmp_path, model, prefill=1, decode=1, kv=KV, decode_node=decode_node) as nodes:
        gateway, params = nodes.gateway, replace(SEEDED, repetition_penalty=1.2, logprobs=1, max_tokens=40)
        others = [await gateway.start(prompt(40 + i), replace(SEEDED, max_tokens=1000)) for i in range(2)]
        prompts = [prompt(1), prompt(15), prompt(16), prompt(17), prompt(20), prompt(21), prompt(39)]
        inlined = await asyncio.gather(*(gateway.run(token_ids, params, inlined=True) for token_ids in prompts))
        by_prefill = await asyncio.gather(*(gateway.run(token_ids, params) for token_ids in prompts))
        for here, there in zip(inlined, by_prefill, strict=True):
            assert here.token_ids == there.token_ids and here.finish == there.finish == Finish.LENGTH
            assert here.logprobs == pytest.approx(there.logprobs, abs=1e-4)
            assert here.done is not None and here.done.output.position == 0 and here.done.compute_ms > 0

        turn = [*prompts[-1], *inlined[-1].token_ids, *range(20, 32)]
        second, direct = await gateway.run(turn, params, inlined=True), DirectEngine(nodes)
        assert second.done is not None and second.done.cached_tokens == (39 + 39) // 16 * 16
        assert second.token_ids == direct.generate(turn, params)
        continued = await gateway.run([*turn, *second.token_ids[:9]], params, num_prompt_tokens=len(turn), inlined=True)
        assert continued.token_ids == second.token_ids[9:]
        (failure,) = (await gateway.run(prompt(75), params, inlined=True)).failures
        assert failure.code == FailureCode.INTERNAL and "75 tokens" in failure.message
        one = await gateway.run(prompt(30), replace(params, max_tokens=1), inlined=True)
        assert one.finish == Finish.LENGTH and len(one.token_ids) == 1
        for attempt_id in others:
            await gateway.abort(attempt_id)
        await nodes.all_slots_given_back()
