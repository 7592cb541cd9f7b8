"""Real engines that prefill and decode: their tokens are those of the model alone, wherever a prompt is computed, whatever runs beside."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.runner import ModelRunner
from springtide.protocol import wire
from springtide.protocol.outputs import FailureCode, Finish
from springtide.protocol.sampling import LogitBias, SamplingParams
from springtide.rpc import node_pb2
from tests.support.engine_nodes import DirectEngine, EngineNodes
from tests.support.models import make_tiny_llama
from tests.support.reference import Reference, random_prompt
from tests.support.scores import assert_scores_are_those_of
from tests.support.waiting import until

KV = {"block_tokens": 16, "arena_size": "8MiB", "layer_group_size": 4 << 10}
CHUNKS = {"chunk_tokens": 48}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.9, seed=7, repetition_penalty=1.2, logprobs=1)
HERE, THERE = "instance-0", "instance-1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4)


def prompt(length: int) -> list[int]:
    return random_prompt(length, length, 10, 250)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tbt_slo_ms", [0.0, 1e-3, 1e4], ids=["no objective", "no time for prompts", "time for prompts"])
async def test_prompts_and_outputs_side_by_side_have_the_tokens_of_the_model_alone(
    tmp_path: Path, model: Path, overlap: bool, tbt_slo_ms: float
) -> None:
    """Of each instance some are decoded where they are prefilled, and some handed over to the other."""
    settings = {"decode_node": {"overlap": overlap, "max_batch": 8}, "prefill_node": CHUNKS}
    async with EngineNodes(tmp_path, model, prefill=0, decode=0, instances=2, kv=KV, **settings) as nodes:
        direct, gateway = DirectEngine(nodes), nodes.gateway
        lengths = (1, 15, 16, 17, 47, 48, 49, 100, 200, 333)

        async def check(length: int, params: SamplingParams, prefill: str, decode: str) -> None:
            inlined = prefill == decode
            on = (f"{prefill}.prefill", decode)
            objective = {"tbt_slo_ms": tbt_slo_ms, "refusable": False}
            outcome = await gateway.run(prompt(length), params, on=on, inlined=inlined, **objective)
            assert not outcome.failures, outcome.failures
            assert outcome.token_ids == direct.generate(prompt(length), params) and outcome.finish is Finish.LENGTH

        long = replace(GREEDY, max_tokens=1500)
        running = [await gateway.start(prompt(30), long, on=("", name), inlined=True, tbt_slo_ms=tbt_slo_ms) for name in (HERE, THERE)]
        pairs = [(HERE, HERE), (THERE, THERE), (HERE, THERE), (THERE, HERE)]
        params = [GREEDY, SEEDED]
        await asyncio.gather(*(check(length, params[i % 2], *pairs[i % 4]) for i, length in enumerate(lengths)))
        await asyncio.gather(*(check(length, params[i % 2], *pairs[(i + 2) % 4]) for i, length in enumerate(lengths)))
        for name, attempt_id in zip((HERE, THERE), running, strict=True):
            await gateway.abort(attempt_id, on=(f"{name}.prefill", name))
        await nodes.all_slots_given_back()


async def test_the_ranks_of_an_instance_compute_steps_and_prompts_together(tmp_path: Path, model: Path) -> None:
    settings = {"decode_node": {"tensor_parallel": 2}, "prefill_node": CHUNKS}
    async with EngineNodes(tmp_path, model, prefill=0, decode=0, instances=1, kv=KV, **settings) as nodes:
        direct, gateway = DirectEngine(nodes), nodes.gateway
        lengths = (1, 47, 200, 333)
        outcomes = await asyncio.gather(
            *(gateway.run(prompt(length), SEEDED, on=(f"{HERE}.prefill", HERE), inlined=True) for length in lengths)
        )
        for length, outcome in zip(lengths, outcomes, strict=True):
            assert outcome.token_ids == direct.generate(prompt(length), SEEDED)
        await nodes.all_slots_given_back()


def test_nodes_of_one_process_that_would_be_several_groups_of_ranks_are_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ValueError, match="2 tensor parallel engines need processes of their own"):
        EngineNodes(tmp_path, model, instances=2, kv=KV, decode_node={"tensor_parallel": 2})


async def test_a_prompt_that_stays_takes_its_prefix_from_another_store(tmp_path: Path, model: Path) -> None:
    async with EngineNodes(tmp_path, model, prefill=0, decode=0, instances=2, kv=KV, prefill_node=CHUNKS) as nodes:
        gateway, direct = nodes.gateway, DirectEngine(nodes)
        first = await gateway.run(prompt(200), GREEDY, on=(f"{HERE}.prefill", HERE), inlined=True)
        turn = [*prompt(200), *first.token_ids, *prompt(21)]
        second = await gateway.run(turn, SEEDED, on=(f"{THERE}.prefill", THERE), inlined=True, source=HERE)
        assert second.done is not None and second.done.remote_tokens == second.done.cached_tokens == 239 // 16 * 16
        assert second.token_ids == direct.generate(turn, SEEDED)
        third = await gateway.run(turn, SEEDED, on=(f"{THERE}.prefill", THERE), inlined=True)
        assert third.done is not None and third.done.remote_tokens == 0 and third.token_ids == second.token_ids
        longer = [*turn, *second.token_ids[:9]]
        continued = await gateway.run(longer, SEEDED, num_prompt_tokens=len(turn), on=("", HERE), inlined=True)
        assert continued.token_ids == second.token_ids[9:]
        await nodes.all_slots_given_back()


async def test_prompts_are_scored_beside_what_runs(tmp_path: Path, model: Path) -> None:
    """With all the tokens that are guessed of it: always the same one comes."""
    reference = Reference.from_directory(model)
    async with EngineNodes(tmp_path, model, prefill=0, decode=0, instances=1, kv=KV, prefill_node=CHUNKS) as nodes:
        on = (f"{HERE}.prefill", HERE)
        always = replace(GREEDY, max_tokens=3000, logit_bias=LogitBias.of({50: 80.0}))
        running = await nodes.gateway.start(prompt(30), always, on=on, inlined=True)
        await until(lambda: len(nodes.gateway.outcomes[running].token_ids) > 100)
        for length, max_tokens in ((1, 4), (17, 1), (130, 4)):
            params = replace(GREEDY, prompt_logprobs=5, max_tokens=max_tokens)
            outcome = await nodes.gateway.run(prompt(length), params, on=on, inlined=True)
            assert outcome.token_ids == reference.greedy(prompt(length), max_tokens)
            assert outcome.done is not None and outcome.done.prompt_logprobs is not None
            assert_scores_are_those_of(reference, prompt(length), outcome.done.prompt_logprobs, 5)
        await nodes.gateway.abort(running, on=on)
        await nodes.all_slots_given_back()


async def test_a_step_that_fails_fails_what_was_in_it_alone(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with EngineNodes(tmp_path, model, prefill=0, decode=0, instances=1, kv=KV, prefill_node=CHUNKS) as nodes:
        on = (f"{HERE}.prefill", HERE)
        expected = DirectEngine(nodes).generate(prompt(60), GREEDY)
        with monkeypatch.context() as patched:
            patched.setattr(ModelRunner, "forward_layers", lambda *_, **__: 1 / 0)
            (failure,) = (await nodes.gateway.run(prompt(60), GREEDY, on=on, inlined=True)).failures
        assert failure.code is FailureCode.INTERNAL
        assert (await nodes.gateway.run(prompt(60), GREEDY, on=on, inlined=True)).token_ids == expected
        await nodes.all_slots_given_back()


async def test_whoever_watches_hears_of_both_roles(tmp_path: Path, model: Path) -> None:
    async with EngineNodes(tmp_path, model, prefill=0, decode=0, instances=1, kv=KV) as nodes:
        for name in (HERE, f"{HERE}.prefill"):
            report = wire.LOAD_REPORT.decode(await nodes.gateway.stub(name).WatchLoad(node_pb2.WatchLoadRequest()).read())
            assert report.instance_id == name and report.incarnation == nodes.members[name].incarnation
            assert report.load.slots_total == nodes.stores[HERE].options.num_slots
            assert (report.load.prefill_cost is not None) == name.endswith(".prefill")
