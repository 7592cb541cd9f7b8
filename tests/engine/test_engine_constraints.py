"""What constrains outputs, with the demo model's vocabulary and logits at random."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from engine.batch import SamplingRow
from engine.formats.files import describe
from engine.sampling import constraints
from engine.sampling.constraints import Constraints
from engine.sampling.device_sampling import sample_together
from engine.sampling.grammars import MAX_COMPILED, GrammarCompiler, Grammars
from engine.sampling.sampler import Sampler, sample, uniform
from engine.tokenizer.tokenizer import load_tokenizer
from springtide.protocol.outputs import Failure, FailureCode, Finish, SampledToken, finish_of
from springtide.protocol.sampling import Grammar, SamplingParams, TokenIds

INFO = describe("demo")
TOKENIZER = load_tokenizer(INFO)
(EOS,) = INFO.eos_token_ids
GRAMMARS = Grammars(INFO)
SAMPLER = Sampler(INFO, GRAMMARS)
NO_EOS = TokenIds.of(token for token in range(INFO.vocab_size) if token != EOS)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled here before it is sampled by, and the machine may be busy."""
    monkeypatch.setattr(constraints, "COMPILED_WITHIN_S", 60.0)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["a", "b", None, 3]},
        "age": {"type": "integer", "minimum": -3, "maximum": 140},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}


def schema_grammar(schema: dict[str, Any]) -> Grammar:
    return Grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema | {"x-guidance": {"whitespace_flexible": False}})))


def regex_grammar(regex: str) -> Grammar:
    return Grammar(LLMatcher.grammar_from_regex(regex))


def logits_at(seed: int, position: int) -> torch.Tensor:
    """What a model might say there: what ends things is likelier than among so many tokens it would be."""
    noise = np.random.default_rng((seed, position))
    logits = torch.from_numpy(noise.standard_normal(INFO.vocab_size, np.float32)) * 2
    logits[[EOS, *(TOKENIZER.encode(text)[0] for text in ('"', "}", "]", ","))]] += 6
    return logits


def generate(params: SamplingParams, seed: int, sampler: Sampler, output: list[int] | None = None) -> list[int]:
    """The output of a row, alone; goes on with `output`."""
    row = SamplingRow(params, (1,), [] if output is None else output)
    while True:
        (drawn,) = sampler.sample(logits_at(seed, len(row.output_ids))[None], [row])
        assert isinstance(drawn, SampledToken), drawn
        finish = finish_of(drawn.token_id, len(row.output_ids) + 1, params, INFO.eos_token_ids)
        if finish is not Finish.STOP:
            row.output_ids.append(drawn.token_id)  # type: ignore[attr-defined]
        if finish is not None:
            return list(row.output_ids)


def draw(sampler: Sampler, *output: int, logits: torch.Tensor | None = None, **params: Any) -> SampledToken | Failure:
    row = SamplingRow(SamplingParams(**{"temperature": 0.0, "max_tokens": 100, **params}), (1,), list(output))
    (drawn,) = sampler.sample(torch.zeros(1, INFO.vocab_size) if logits is None else logits[None], [row])
    return drawn


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32), split=st.floats(0, 1))
def test_a_finished_output_satisfies_its_schema_and_goes_on_from_anywhere_as_it_would_have(seed: int, split: float) -> None:
    params = SamplingParams(seed=seed, max_tokens=400, grammar=schema_grammar(PERSON))
    whole = generate(params, seed, SAMPLER)
    if len(whole) < params.max_tokens:
        jsonschema.validate(json.loads(TOKENIZER.decode(whole)), PERSON)
    begun = whole[: int(split * len(whole))]
    assert generate(params, seed, Sampler(INFO, GRAMMARS), begun) == whole


def test_rows_of_a_batch_keep_to_their_own_grammars_and_the_others_to_none() -> None:
    regexes = ["[0-9]{44}", "(ab|cd)+e", None, "x{40}", None]
    rows = [
        SamplingRow(SamplingParams(seed=i, max_tokens=60, grammar=Grammar() if regex is None else regex_grammar(regex)), (1,), list[int]())
        for i, regex in enumerate(regexes)
    ]
    for position in range(3):
        logits = torch.stack([logits_at(i, position) for i in range(len(rows))])
        together = SAMPLER.sample(logits, rows)
        for i, row in enumerate(rows):
            (alone,) = Sampler(INFO, GRAMMARS).sample(logits[i : i + 1], [row])
            assert together[i] == alone
            assert isinstance(alone, SampledToken)
            row.output_ids.append(alone.token_id)  # type: ignore[attr-defined]
        for i in (2, 4):
            assert together[i] == sample(logits[i : i + 1], [SamplingRow(rows[i].params, (1,), rows[i].output_ids[:-1])])[0]
    assert TOKENIZER.decode(rows[3].output_ids, skip_special_tokens=True).startswith("x")


class CountingGrammars(Grammars):
    """Counts the outputs that are followed from their beginning."""

    begun = 0

    def matcher(self, grammar: Grammar, within_s: float) -> LLMatcher:
        self.begun += 1
        return super().matcher(grammar, within_s)


def test_an_output_is_followed_for_as_long_as_its_row_lives_whether_or_not_it_is_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = CountingGrammars(INFO)
    followed = Constraints(INFO.vocab_size, INFO.eos_token_ids, grammars)

    def step(*rows: SamplingRow) -> None:
        allowed = followed.allowed(rows)
        assert not allowed.refused
        for index, row in enumerate(rows):
            row.output_ids.append(int(allowed.masks[index].argmax()))  # type: ignore[attr-defined]

    params = SamplingParams(grammar=regex_grammar("[0-9]{44}"))
    first, second, third = (SamplingRow(params, (1,), list[int]()) for _ in range(3))
    for taking_part in ((first, second), (second,), (third,), (), (first, second, third), (second,)):
        step(*taking_part)
    assert grammars.begun == 3 and len(followed._followed) == 3
    del first, taking_part
    assert len(followed._followed) == 2, "what is kept of a row goes with it"
    monkeypatch.setattr(constraints, "MAX_FOLLOWED", 1)
    step(third)
    step(third)
    assert len(followed._followed) == 2
    more = [SamplingRow(params, (1,), list[int]()) for _ in range(9)]
    for row in more:
        step(row)
    assert len(followed._followed) == 2, "there is a bound"
    step(second)
    assert grammars.begun == 3 + 9 + 1, "and what was beyond it is followed anew"


def test_who_waits_too_long_for_a_grammar_may_try_again_and_is_not_told_that_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "COMPILED_WITHIN_S", 0.01)
    go_on, compile = threading.Event(), GrammarCompiler.compile

    def slowly(compiler: GrammarCompiler, grammar: Grammar) -> LLMatcher:
        go_on.wait(60)
        return compile(compiler, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", slowly)
    grammars = Grammars(INFO)
    sampler, params = Sampler(INFO, grammars), SamplingParams(grammar=regex_grammar("[0-9]"))
    rows = [SamplingRow(params, (1,), []), SamplingRow(SamplingParams(), (1,), [])]
    logits = torch.stack([logits_at(row, 0) for row in range(2)])
    late, other = sampler.sample(logits, rows)
    assert isinstance(late, Failure) and late.code is FailureCode.INTERNAL and isinstance(other, SampledToken)
    go_on.set()
    grammars.prepare(params.grammar).result(60)
    again, _ = sampler.sample(logits, rows)
    assert isinstance(again, SampledToken) and TOKENIZER.decode([again.token_id]).isdigit()


def test_what_is_drawn_together_on_a_device_is_what_is_drawn_one_by_one() -> None:
    dice = random.Random(3)
    grammars = [schema_grammar(PERSON), regex_grammar("[a-f]+"), Grammar()]
    for _ in range(12):
        rows = [
            SamplingRow(
                SamplingParams(
                    temperature=dice.choice([0.0, 0.8]),
                    top_k=dice.choice([0, 40]),
                    top_p=dice.choice([1.0, 0.9]),
                    seed=dice.randrange(99),
                    max_tokens=9,
                    logprobs=dice.choice([None, 3]),
                    min_tokens=dice.choice([0, 2]),
                    grammar=dice.choice(grammars),
                ),
                (1,),
                [],
            )
            for _ in range(5)
        ]
        vocabulary = torch.randperm(INFO.vocab_size, generator=torch.Generator().manual_seed(dice.randrange(99)))
        logits = torch.stack([vocabulary.roll(i) for i in range(5)]) * (12.0 / INFO.vocab_size)
        masks = Constraints(INFO.vocab_size, INFO.eos_token_ids, GRAMMARS).allowed(rows).masks
        forbidden = logits.clone()
        for index, mask in masks.items():
            forbidden[index][torch.from_numpy(~mask)] = -torch.inf
        draws = [uniform(row.params.seed, 0) for row in rows]
        assert sample(logits, rows, masks) == sample_together(forbidden, [row.params for row in rows], draws)


def test_where_a_grammar_is_complete_the_output_ends_whatever_else_is_asked() -> None:
    digits = TOKENIZER.encode("12")
    end = draw(SAMPLER, *digits, grammar=regex_grammar("12"), min_tokens=50, ignore_eos=True, allowed_token_ids=NO_EOS)
    assert isinstance(end, SampledToken) and end.token_id == EOS
    assert finish_of(EOS, 3, SamplingParams(grammar=regex_grammar("12"), ignore_eos=True), INFO.eos_token_ids) is Finish.STOP
    assert finish_of(EOS, 3, SamplingParams(ignore_eos=True), INFO.eos_token_ids) is None


def test_a_grammar_that_somebody_waits_with_stays_compiled_however_many_others_come() -> None:
    grammars, grammar = Grammars(INFO), regex_grammar("(ab)*")
    waited_for = grammars.prepare(grammar)
    for number in range(MAX_COMPILED + 5):
        grammars.prepare(regex_grammar(f"x{number}"))
    assert grammars.prepare(grammar) is waited_for
    grammars.close()


def test_where_a_grammar_may_go_on_but_nothing_of_that_is_allowed_the_output_ends() -> None:
    one, two = TOKENIZER.encode("1"), TOKENIZER.encode("2")
    logits = torch.zeros(INFO.vocab_size)
    logits[two[0]] = 9.0
    end = draw(SAMPLER, *one, logits=logits, grammar=regex_grammar("1[2-9]*"), allowed_token_ids=TokenIds.of(one))
    assert end == SampledToken(EOS)


def test_min_tokens_keeps_off_what_ends_an_output() -> None:
    logits = torch.zeros(INFO.vocab_size)
    logits[EOS], logits[77], logits[78] = 9.0, 8.0, 7.0
    tokens = [draw(SAMPLER, *[5] * count, logits=logits, min_tokens=2, stop_token_ids=(77,)) for count in (0, 1, 2)]
    assert tokens == [SampledToken(78), SampledToken(78), SampledToken(EOS)]
    # A grammar that may go on goes on.
    longer = draw(SAMPLER, *TOKENIZER.encode("1"), logits=logits, min_tokens=2, grammar=regex_grammar("1+"))
    assert isinstance(longer, SampledToken) and longer.token_id != EOS


def test_only_allowed_tokens_are_drawn_and_no_bad_word_is_completed() -> None:
    logits = torch.zeros(INFO.vocab_size)
    logits[30], logits[31], logits[32] = 3.0, 2.0, 1.0
    only = TokenIds.of([31, 32])
    assert draw(SAMPLER, logits=logits, allowed_token_ids=only) == SampledToken(31)
    words = (TokenIds.of([31]), TokenIds.of([7, 8, 32]))
    assert draw(SAMPLER, 7, 8, logits=logits, allowed_token_ids=TokenIds.of([30, 31, 32]), bad_words=words) == SampledToken(30)
    assert draw(SAMPLER, 7, 9, logits=logits, allowed_token_ids=only, bad_words=words) == SampledToken(32)
    nothing = draw(SAMPLER, 7, 8, logits=logits, allowed_token_ids=only, bad_words=words)
    assert isinstance(nothing, Failure) and nothing.code is FailureCode.INVALID and "allowed_token_ids" in nothing.message


def test_logprobs_are_of_what_is_allowed() -> None:
    drawn = draw(SAMPLER, allowed_token_ids=TokenIds.of([40, 41]), logprobs=5)
    assert isinstance(drawn, SampledToken)
    assert drawn.logprob == pytest.approx(np.log(0.5)) and {token for token, _ in drawn.top} == {40, 41}


@pytest.mark.parametrize("source", ["no json", '{"grammars": [{"lark_grammar": "start: x"}]}', LLMatcher.grammar_from_regex("(?=a)b")])
def test_what_cannot_be_used_fails_its_row_alone(source: str) -> None:
    rows = [
        SamplingRow(SamplingParams(temperature=0.0, grammar=Grammar(source)), (1,), ()),
        SamplingRow(SamplingParams(temperature=0.0), (1,), ()),
        SamplingRow(SamplingParams(temperature=0.0, grammar=regex_grammar("b")), (1,), ()),
    ]
    bad, free, good = SAMPLER.sample(torch.zeros(3, INFO.vocab_size), rows)
    assert isinstance(bad, Failure) and bad.code is FailureCode.INVALID and "grammar" in bad.message
    assert isinstance(free, SampledToken)
    assert isinstance(good, SampledToken) and TOKENIZER.decode([good.token_id]) == "b"


def test_an_output_that_is_none_of_its_grammar_s_fails() -> None:
    failed = draw(SAMPLER, *TOKENIZER.encode("hello"), grammar=regex_grammar("[0-9]+"))
    assert isinstance(failed, Failure) and "does not follow" in failed.message


def test_tokens_beyond_the_tokenizer_s_are_never_allowed() -> None:

    padded = replace(INFO, vocab_size=INFO.vocab_size + 64)
    sampler = Sampler(padded, Grammars(padded))
    row = SamplingRow(SamplingParams(temperature=0.0, grammar=regex_grammar("(?s:.)*")), (1,), ())
    logits = torch.zeros(1, padded.vocab_size)
    logits[0, INFO.vocab_size :] = 50.0
    (drawn,) = sampler.sample(logits, [row])
    assert isinstance(drawn, SampledToken) and drawn.token_id < INFO.vocab_size
