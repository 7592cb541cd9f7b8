"""What is held to grammars on a device: in passes of its runner, whose logits stay there, each row is held to its own grammar and to nobody
else's. The device is the CPU, of which torch says that it is a card."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLMatcher

from engine.batch import SamplingRow, SequenceChunk
from engine.formats.files import describe
from engine.sampling.grammars import Grammars
from engine.sampling.sampler import Sampler
from engine.tokenizer.tokenizer import load_tokenizer
from springtide.protocol.outputs import Finish, SampledToken, finish_of
from springtide.protocol.sampling import Grammar, SamplingParams, TokenIds
from tests.engine.sequences import Harness
from tests.engine.test_engine_device_runner import FLASHINFER, TORCH, on_device
from tests.support.models import make_tiny_llama
from tests.support.reference import Reference, random_prompt

CARD = torch.device("cuda", 0)
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 9},
        "b": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 3},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
DIGITS, LETTERS = "[0-9]{30}", "(ab|cd)+e"
EOS = 2
AMONG = (30, 31, 32)


class OnCard(torch.Tensor):
    """A tensor that says that it is in a card's memory, and so do those that are computed from it."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CARD


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What is brought to the card, which leaves it where it is."""
    brought, to = list[torch.Tensor](), torch.Tensor.to

    def bring(tensor: torch.Tensor, *where: Any, **how: Any) -> torch.Tensor:
        if where[:1] != (CARD,):
            return to(tensor, *where, **how)
        brought.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", bring)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return brought


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("device") / "model")


@pytest.fixture(scope="module")
def new_sampler(path: Path) -> Callable[[], Sampler]:
    info = describe(str(path))
    grammars = Grammars(info)
    return lambda: Sampler(info, grammars)


def json_grammar() -> Grammar:
    return Grammar(LLMatcher.grammar_from_json_schema(json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": False}})))


def regex_grammar(regex: str) -> Grammar:
    return Grammar(LLMatcher.grammar_from_regex(regex))


@pytest.mark.parametrize("kernels", [TORCH, FLASHINFER])
def test_rows_of_a_pass_are_held_each_to_its_own_grammar(
    path: Path, new_sampler: Callable[[], Sampler], brought: list[torch.Tensor], kernels: str
) -> None:
    """Every token is also the one that the row gets alone, of logits in the host's memory."""
    held, free = SamplingParams(seed=1, max_tokens=200), SamplingParams(seed=2, max_tokens=60, ignore_eos=True)
    every = [
        free,
        replace(held, grammar=json_grammar()),
        replace(held, grammar=regex_grammar(DIGITS), logprobs=3),
        replace(free, seed=3, top_k=40),
        replace(held, grammar=regex_grammar(LETTERS), top_p=0.9),
        replace(free, seed=4, allowed_token_ids=TokenIds.of(AMONG)),
        replace(held, seed=5, temperature=0.0, grammar=json_grammar()),
    ]
    prompts = [random_prompt(seed, 20 + 9 * seed, 10, 250) for seed in range(len(every))]
    with on_device(path, kernels, step_graphs=256) as harness:
        outputs = together(harness, new_sampler, every, prompts)
    assert brought, "the rows' masks among others"
    tokenizer = load_tokenizer(describe(str(path)))
    texts = [tokenizer.decode(output) for output in outputs]
    for index in (1, 6):
        jsonschema.validate(json.loads(texts[index]), SCHEMA)
    assert re.fullmatch(DIGITS, texts[2]) and re.fullmatch(LETTERS, texts[4])
    assert [len(outputs[index]) for index in (0, 3, 5)] == [60, 60, 60] and set(outputs[5]) <= set(AMONG)
    assert outputs[6] == greedy(Reference.from_directory(path), new_sampler(), every[6], prompts[6])


def together(
    harness: Harness, new_sampler: Callable[[], Sampler], every: Sequence[SamplingParams], prompts: Sequence[Sequence[int]]
) -> list[list[int]]:
    """The outputs. Prompts share the first pass; in each one after it are those that have not ended."""
    sampler, alone = new_sampler(), new_sampler()
    rows = [SamplingRow(params, prompt, list[int]()) for params, prompt in zip(every, prompts, strict=True)]
    slots = [harness.slots(len(row.prompt_ids) + row.params.max_tokens) for row in rows]
    running = list(range(len(rows)))
    while running:
        batch = []
        for index in running:
            prompt, output = rows[index].prompt_ids, rows[index].output_ids
            batch.append(SequenceChunk(output[-1:] or prompt, len(prompt) + len(output) - 1 if output else 0, slots[index]))
        logits = harness.runner.forward(batch)
        drawn = sampler.sample(logits.as_subclass(OnCard), [rows[index] for index in running])
        for place, (index, token) in enumerate(zip(list(running), drawn, strict=True)):
            (wanted,) = alone.sample(logits[place : place + 1], [rows[index]])
            assert isinstance(token, SampledToken) and isinstance(wanted, SampledToken), (token, wanted)
            assert token.token_id == wanted.token_id, f"row {index} of {running}, after {rows[index].output_ids}"
            if took_in(rows[index], token) is not None:
                running.remove(index)
    return [list(row.output_ids) for row in rows]


def greedy(reference: Reference, sampler: Sampler, params: SamplingParams, prompt: Sequence[int]) -> list[int]:
    """What transformers' logits give."""
    row = SamplingRow(params, prompt, list[int]())
    while True:
        (token,) = sampler.sample(reference.logits([*prompt, *row.output_ids])[-1:], [row])
        assert isinstance(token, SampledToken), token
        if took_in(row, token) is not None:
            return list(row.output_ids)


def took_in(row: SamplingRow, token: SampledToken) -> Finish | None:
    """Whether the output has ended with the token, which is part of it unless it is what has ended it."""
    finish = finish_of(token.token_id, len(row.output_ids) + 1, row.params, (EOS,))
    if finish is not Finish.STOP:
        row.output_ids.append(token.token_id)  # type: ignore[attr-defined]
    return finish
