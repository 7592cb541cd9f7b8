"""What constrains outputs, at real nodes: prefill and decode, inlined prompts, continuations, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest
from llguidance import LLMatcher

from engine.backends import choice as backends
from engine.sampling.grammars import GrammarCompiler
from engine.tokenizer.tokenizer import load_tokenizer
from springtide.protocol.outputs import FailureCode, Finish
from springtide.protocol.sampling import Grammar, SamplingParams, TokenIds
from tests.support import cpu_as_device, flashinfer_twin
from tests.support.engine_nodes import EOS, EngineNodes, Outcome
from tests.support.models import make_tiny_llama
from tests.support.waiting import until

KV = {"block_tokens": 16, "arena_size": "8MiB"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(LLMatcher.grammar_from_json_schema(json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": False}})))
HELD = SamplingParams(temperature=1.0, seed=7, max_tokens=300, grammar=GRAMMAR)
PROMPT = list(range(40, 70))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_llama(path)
    yield path


async def held_outcomes(nodes: EngineNodes, number: int) -> list[Outcome]:
    """Of requests with a schema, each with a seed of its own: what they answer satisfies it."""
    tokenizer = load_tokenizer(nodes.info)
    outcomes = await asyncio.gather(*(nodes.gateway.run(PROMPT, replace(HELD, seed=seed)) for seed in range(number)))
    for outcome in outcomes:
        assert outcome.finish is Finish.STOP
        jsonschema.validate(json.loads(tokenizer.decode(outcome.token_ids)), SCHEMA)
    return outcomes


@pytest.mark.parametrize("stages", [1, 2])
async def test_outputs_satisfy_their_schema_and_go_on_elsewhere_as_they_would_have(tmp_path: Path, model: Path, stages: int) -> None:
    async with EngineNodes(
        tmp_path, model, prefill=1, decode=1, kv=KV, prefill_node={"stages": stages}, decode_node={"inline_tokens": 64}
    ) as nodes:
        gateway = nodes.gateway
        free = asyncio.create_task(gateway.run(PROMPT, replace(HELD, grammar=Grammar(), max_tokens=80, ignore_eos=True)))
        outcomes = await held_outcomes(nodes, 4)
        assert len((await free).token_ids) == 80
        whole = outcomes[3].token_ids
        assert len(whole) > 8
        for split in (1, 5, len(whole) - 1, len(whole)):
            for inlined in (False, True):
                rest = await gateway.run([*PROMPT, *whole[:split]], replace(HELD, seed=3), num_prompt_tokens=len(PROMPT), inlined=inlined)
                assert (rest.token_ids, rest.finish) == (whole[split:], Finish.STOP)
        assert (await gateway.run(PROMPT, replace(HELD, seed=3), inlined=True)).token_ids == whole
        await nodes.all_slots_given_back()


@pytest.mark.parametrize("kernels", ["torch", "flashinfer"])
async def test_outputs_of_nodes_with_devices_satisfy_their_schema_too(
    tmp_path: Path, model: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is the CPU, the pages of the KV cache lie apart from the arena, and what attends in them is torch or FlashInfer's twin."""
    cpu_as_device.use(monkeypatch.setattr)
    if kernels == "flashinfer":
        monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_twin)
        monkeypatch.setattr(backends, "choose", lambda config, dtype, kernels, device: backends.flashinfer(device))
    async with EngineNodes(tmp_path, model, prefill=1, decode=1, kv=KV) as nodes:
        free = asyncio.create_task(nodes.gateway.run(PROMPT, replace(HELD, grammar=Grammar(), max_tokens=80, ignore_eos=True)))
        await held_outcomes(nodes, 8)
        assert len((await free).token_ids) == 80
        await nodes.all_slots_given_back()


async def test_other_constraints_hold_from_the_first_token_on(tmp_path: Path, model: Path) -> None:
    async with EngineNodes(tmp_path, model, prefill=1, decode=1, kv=KV) as nodes:
        among = SamplingParams(temperature=1.0, max_tokens=60, min_tokens=40, allowed_token_ids=TokenIds.of([EOS, 30, 31, 32]))
        words = (TokenIds.of([32]), TokenIds.of([30, 31]))
        outcomes = await asyncio.gather(*(nodes.gateway.run(PROMPT, replace(among, seed=seed, bad_words=words)) for seed in range(5)))
        for outcome in outcomes:
            tokens = outcome.token_ids
            assert 40 <= len(tokens) <= 60 and set(tokens) <= {30, 31}
            assert (30, 31) not in pairwise(tokens)


@pytest.mark.parametrize("inlined", [False, True])
async def test_a_grammar_that_cannot_be_used_fails_its_attempt_and_nobody_else_s(tmp_path: Path, model: Path, inlined: bool) -> None:
    async with EngineNodes(tmp_path, model, prefill=1, decode=1, kv=KV, decode_node={"inline_tokens": 64}) as nodes:
        gateway = nodes.gateway
        other = await gateway.start(PROMPT, replace(HELD, grammar=Grammar(), max_tokens=60, ignore_eos=True))
        for params in (
            replace(HELD, grammar=Grammar('{"grammars": [{"lark_grammar": "start: missing"}]}')),
            # What is found only when it is sampled by.
            replace(HELD, grammar=Grammar(LLMatcher.grammar_from_regex("x{9}")), allowed_token_ids=TokenIds.of([5])),
        ):
            attempt_id = await gateway.start(PROMPT, params, inlined=inlined)
            outcome = await gateway.end_of(attempt_id)
            assert [failure.code for failure in outcome.failures] == [FailureCode.INVALID]
            assert "grammar" in outcome.failures[0].message or "allowed_token_ids" in outcome.failures[0].message
            await gateway.abort(attempt_id)
        assert len((await gateway.end_of(other)).token_ids) == 60
        await nodes.all_slots_given_back()


async def test_an_attempt_is_known_and_can_be_aborted_while_its_grammar_is_compiled(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, compiling, compile = threading.Event(), threading.Event(), GrammarCompiler.compile

    def slowly(compiler: GrammarCompiler, grammar: Grammar) -> LLMatcher:
        compiling.set()
        go_on.wait(60)
        return compile(compiler, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", slowly)
    async with EngineNodes(tmp_path, model, prefill=1, decode=1, kv=KV) as nodes:
        gateway = nodes.gateway
        held, aborted = [await gateway.start(PROMPT, HELD) for _ in range(2)]
        await until(compiling.is_set)
        await gateway.abort(aborted)
        # Others are served meanwhile.
        assert len((await gateway.run(PROMPT, replace(HELD, grammar=Grammar(), max_tokens=9, ignore_eos=True))).token_ids) == 9
        go_on.set()
        assert (await gateway.end_of(held)).finish is Finish.STOP
        assert not gateway.outcomes[aborted].token_ids
        await nodes.all_slots_given_back()


async def test_nobody_waits_at_a_decode_node_for_a_grammar_that_is_still_compiled_there(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, compile = threading.Event(), GrammarCompiler.compile

    def slowly(compiler: GrammarCompiler, grammar: Grammar) -> LLMatcher:
        go_on.wait(60)
        return compile(compiler, grammar)

    free = replace(HELD, grammar=Grammar(), max_tokens=40, ignore_eos=True)
    async with EngineNodes(tmp_path, model, prefill=1, decode=2, kv=KV) as nodes:
        gateway = nodes.gateway
        whole = (await gateway.run(PROMPT, HELD)).token_ids
        monkeypatch.setattr(GrammarCompiler, "compile", slowly)
        there = ("prefill-0", "decode-1")
        held = await gateway.start(PROMPT, HELD, on=there)
        await until(lambda: gateway.outcomes[held].token_ids)
        for _ in range(3):
            assert len((await gateway.run(PROMPT, free, on=there)).token_ids) == 40
        assert gateway.outcomes[held].token_ids == whole[:1] and not gateway.outcomes[held].ended
        go_on.set()
        assert (await gateway.end_of(held)).token_ids == whole
        await nodes.all_slots_given_back()
