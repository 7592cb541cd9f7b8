"""Tokens that are guessed change none: outputs are those of the model alone, and those that come without guesses, whatever they are sampled
by, and whatever is computed beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from decode_node.core import drafting
from decode_node.metrics import FORETOLD
from engine.backends import choice as backends
from engine.formats.files import read_config
from node_runtime.metrics import ACCEPTED_TOKENS, DRAFT_TOKENS
from springtide.protocol.outputs import Finish
from springtide.protocol.sampling import Grammar, LogitBias, SamplingParams, TokenIds
from tests.support.engine_nodes import EOS, DirectEngine, EngineNodes, Outcome
from tests.support.models import demo_gguf, make_tiny_llama
from tests.support.reference import random_prompt

KV = {"block_tokens": 16, "arena_size": "8MiB", "layer_group_size": 4 << 10}
HERE, THERE = ("instance-0.prefill", "instance-0"), ("instance-1.prefill", "instance-0")
FEW = TokenIds.of([40, 41, 42])
"""Of so few tokens each pair comes again soon."""
BIAS = LogitBias.of(dict.fromkeys((50, 51, 52), 80.0))
GREEDY = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.5, seed=3, logit_bias=BIAS, logprobs=2)


@dataclass(frozen=True, slots=True)
class Case:
    params: SamplingParams
    prompt: int = 33
    """Its length."""
    alone: bool = True
    """The model alone is asked for it, too."""


def cases() -> dict[str, Case]:
    text = Grammar(LLMatcher.grammar_from_regex("(ab|ba|c){30}"))
    ends = LogitBias.of({50: 80.0, 51: 80.0, EOS: 79.0})
    return {
        "greedy": Case(GREEDY),
        "seeded": Case(SEEDED),
        "filters": Case(replace(SEEDED, seed=4, top_p=0.9, top_k=2, min_p=0.01, logprobs=None)),
        "penalties": Case(replace(SEEDED, seed=5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.1)),
        "ends": Case(replace(SEEDED, seed=6, ignore_eos=False, logit_bias=ends)),
        "ends greedy": Case(replace(GREEDY, ignore_eos=False, repetition_penalty=1.2, logit_bias=ends)),
        "stop token": Case(replace(SEEDED, seed=7, logit_bias=ends, stop_token_ids=(EOS,), ignore_eos=False), alone=False),
        "few tokens": Case(replace(SEEDED, seed=8, logit_bias=LogitBias(), allowed_token_ids=FEW), alone=False),
        "bad words": Case(
            replace(SEEDED, seed=9, logit_bias=LogitBias(), allowed_token_ids=FEW, bad_words=(TokenIds.of([40, 41]),)), alone=False
        ),
        "at least": Case(replace(SEEDED, seed=10, logit_bias=ends, ignore_eos=False, min_tokens=60), alone=False),
        "grammar": Case(replace(SEEDED, seed=11, logit_bias=LogitBias(), grammar=text, ignore_eos=False, max_tokens=200), alone=False),
        **{f"{count} tokens": Case(replace(SEEDED, seed=20 + count, max_tokens=count)) for count in range(1, 13)},
        "long prompt": Case(replace(SEEDED, seed=12), prompt=300),
        "short prompt": Case(replace(SEEDED, seed=13), prompt=1),
    }


CASES = cases()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4, head_dim=32)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """In which the native kernels' bits do not depend on what is computed beside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def price_of_the_cost_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What guesses are measured to take on a busy machine is chance, and so would be how many there are."""
    monkeypatch.setattr(drafting, "_ENOUGH", 1_000_000)


def prompt(length: int) -> list[int]:
    return random_prompt(length, length, 10, 250)


def counted() -> tuple[float, float]:
    """Tokens that were guessed in this process, and those of them that were right."""
    drafted, accepted = (
        sum(sample.value for family in counter.collect() for sample in family.samples if sample.name.endswith("_total"))
        for counter in (DRAFT_TOKENS, ACCEPTED_TOKENS)
    )
    return drafted, accepted


async def everything(run_dir: Path, model: Path, speculation: str, **settings: Any) -> tuple[dict[str, Outcome], dict[str, list[int]]]:
    """What comes of all cases at once, and alone, beside prompts that are computed with them; and what the model alone says. Some prompts
    are handed over, and some outputs go on where they were lost."""
    engine = {"speculation": speculation, "threads": 1, **settings.pop("decode_node", {})}
    nodes_of = {"prefill": 0, "decode": 0, "instances": 2, "kv": KV, "prefill_node": {"chunk_tokens": 48, "threads": 1}, **settings}
    outcomes: dict[str, Outcome] = {}
    async with EngineNodes(run_dir, model, decode_node=engine, **nodes_of) as nodes:

        async def run(name: str, case: Case, index: int) -> None:
            # Inlined, or handed over.
            inlined = nodes_of["instances"] == 1 or index % 3 > 0
            options = {"on": HERE if inlined else THERE, "inlined": inlined, "waits": not inlined, "refusable": False}
            outcomes[name] = await nodes.gateway.run(prompt(case.prompt), case.params, **options)

        for index, name in enumerate(("greedy", "seeded", "ends", "grammar")):
            await run(f"{name} alone", CASES[name], index)
        await asyncio.gather(*(run(name, case, index) for index, (name, case) in enumerate(CASES.items())))
        for name in ("seeded", "penalties"):
            case, sent = CASES[name], outcomes[name].token_ids[:31]
            outcomes[f"{name} goes on"] = await nodes.gateway.run(
                [*prompt(case.prompt), *sent], case.params, num_prompt_tokens=case.prompt, on=HERE, inlined=True
            )
        await nodes.all_slots_given_back()
        if nodes.config.dtype != "float32":
            return outcomes, {}
        direct = DirectEngine(nodes)
        return outcomes, {name: direct.generate(prompt(case.prompt), case.params) for name, case in CASES.items() if case.alone}


def assert_same(outcomes: dict[str, Outcome], others: dict[str, Outcome], tolerance: float) -> None:
    assert outcomes.keys() == others.keys()
    for name, outcome in outcomes.items():
        other = others[name]
        assert not outcome.failures and not other.failures
        assert (outcome.token_ids, outcome.finish) == (other.token_ids, other.finish), name
        assert outcome.logprobs == pytest.approx(other.logprobs, abs=tolerance), name


@pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "overlap"])
async def test_the_tokens_are_those_without_guesses_and_of_the_model_alone(tmp_path: Path, model: Path, overlap: bool) -> None:
    before = counted()
    outcomes, alone = await everything(tmp_path, model, "auto", decode_node={"overlap": overlap, "max_batch": 12})
    drafted, accepted = (now - then for now, then in zip(counted(), before, strict=True))
    assert drafted > 300 and accepted > 100, "tokens have been guessed, and some of them right"
    for name, tokens in alone.items():
        assert outcomes[name].token_ids == tokens, name
    before = counted()
    assert_same(outcomes, (await everything(tmp_path, model, "off", decode_node={"overlap": overlap, "max_batch": 12}))[0], 1e-4)
    assert counted() == before
    assert {outcome.finish for outcome in outcomes.values()} == {Finish.LENGTH, Finish.STOP}
    assert len(outcomes["at least"].token_ids) >= 60


@pytest.mark.skipif(not backends.native_can_run(read_config(demo_gguf())), reason="this machine has no AVX2")
async def test_in_bfloat16_too_to_the_last_bit(tmp_path: Path, model: Path) -> None:
    before = counted()
    outcomes, _ = await everything(tmp_path, model, "auto", dtype="bfloat16")
    assert counted()[1] > before[1] + 100, "tokens have been guessed, and right"
    assert_same(outcomes, (await everything(tmp_path, model, "off", dtype="bfloat16"))[0], 0.0)


@pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "overlap"])
async def test_what_is_foretold_changes_no_token_whether_it_is_right_or_not(tmp_path: Path, model: Path, overlap: bool) -> None:
    """Guesses are switched off: all that is computed beyond a step's own token was foretold."""
    engine = {"speculation": "off", "threads": 1, "overlap": overlap}
    async with EngineNodes(tmp_path, model, prefill=0, decode=0, instances=1, kv=KV, decode_node=engine) as nodes:

        async def run(case: Case, sent: Sequence[int] = (), foretold: Sequence[int] = ()) -> Outcome:
            token_ids, on = [*prompt(case.prompt), *sent], ("instance-0.prefill", "instance-0")
            options = {"num_prompt_tokens": case.prompt, "on": on, "inlined": True, "foretold": foretold}
            return await nodes.gateway.run(token_ids, case.params, **options)

        chosen = {name: CASES[name] for name in ("greedy", "seeded", "penalties", "ends", "grammar", "7 tokens", "long prompt")}
        plainly = {name: await run(case) for name, case in chosen.items()}
        for sent in (0, 5):
            for right in (3, 40, 200):
                before, came = counted(), FORETOLD._value.get()

                async def foretold(name: str, case: Case, sent: int = sent, right: int = right) -> None:
                    tokens = plainly[name].token_ids
                    told = [*tokens[sent : sent + right], *(token ^ 1 for token in tokens[sent + right :])]
                    outcome = await run(case, tokens[:sent], told)
                    assert not outcome.failures
                    assert ([*tokens[:sent], *outcome.token_ids], outcome.finish) == (tokens, plainly[name].finish), name

                await asyncio.gather(*(foretold(name, case) for name, case in chosen.items()))
                # The first token is sampled with the prompt; with the last that is right, a step has one more.
                most = sum(max(0, min(right, len(outcome.token_ids) - sent) - 1) for outcome in plainly.values())
                # Of few, some may come one by one before the engine has heard of them.
                least = most / 2 if right > 3 else 0
                assert least < FORETOLD._value.get() - came <= most, (sent, right)
                assert counted() == before, "they count as no guesses"
        assert (await run(CASES["greedy"], foretold=[1 << 20])).token_ids == plainly["greedy"].token_ids, "no token of the model"
        await nodes.all_slots_given_back()


async def test_ranks_verify_guesses_together(tmp_path: Path, model: Path) -> None:
    before = counted()
    outcomes, alone = await everything(tmp_path, model, "auto", decode_node={"tensor_parallel": 2}, instances=1)
    assert counted()[1] > before[1] + 100
    for name, tokens in alone.items():
        assert outcomes[name].token_ids == tokens, name
