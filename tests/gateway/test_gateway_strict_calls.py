"""Strict tools where the model may call or not: what it begins as a call fits its tool, what is no call is free."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine.batch import SamplingRow, SequenceChunk
from engine.formats.files import describe
from engine.loader import load_model
from engine.runner import ModelRunner
from engine.sampling.grammars import LIMITS, Grammars
from engine.sampling.sampler import Sampler
from engine.tokenizer.tokenizer import load_tokenizer
from gateway.api_request import ApiRequest, Conversation, Message, Speaker, Tool, ToolChoice
from gateway.conversation import ChatModel
from gateway.grammars import Beforehand, lark_constraint, schema_in_lark
from gateway.output import CallArguments, CallBegun, Part
from gateway.prepare import Origin, Preparer
from gateway.tool_calls.families import TOOL_FAMILIES
from gateway.tool_calls.reading import Reading
from springtide.protocol.outputs import Finish, SampledToken, finish_of
from springtide.protocol.sampling import Grammar
from tests.support.models import make_tiny_llama

# Two threads that wait for each other are slow on a machine whose cores have other work too.
torch.set_num_threads(1)

FAMILIES = sorted(TOOL_FAMILIES)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"$ref": "#/$defs/count"},
        "unit": {"enum": ["C", "F"]},
        "hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "unit"],
    "$defs": {"count": {"type": "integer", "minimum": 0, "maximum": 99}},
}
CLOSED = {**SCHEMA, "additionalProperties": False}
WEATHER, TIME = Tool("weather", parameters=SCHEMA, strict=True), Tool("time", parameters={"type": "object", "required": ["zone"]})
TOOLS = (WEATHER, TIME)
NAMES = tuple(tool.name for tool in TOOLS)


def called(parts: list[Part]) -> list[tuple[str, str]]:
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    return [(name, "".join(p.text for p in parts if isinstance(p, CallArguments) and p.number == n)) for n, name in enumerate(names)]


def read(reading: Reading, text: str) -> list[tuple[str, str]]:
    reader = reading.new_reader()
    return called([*reader.push(text), *reader.finish()])


def check(calls: list[tuple[str, str]], *, ended: bool) -> None:
    """All but the last are whole, and that too where the output has ended."""
    for place, (name, arguments) in enumerate(calls):
        try:
            value = json.loads(arguments)
        except ValueError:
            assert not ended and place == len(calls) - 1
            continue
        assert name in NAMES
        if name == "weather":
            jsonschema.validate(value, CLOSED)


# ---- the grammars, byte by byte ----

MARKS = sorted({mark for family in TOOL_FAMILIES.values() for mark in family.markers})


class Bytes:
    """A vocabulary of single bytes, an end, and the families' marks as special tokens."""

    bos_token_id = None
    eos_token_id = 256
    tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in ("<end>", *MARKS)]
    special_token_ids = list(range(256, 257 + len(MARKS)))  # noqa: RUF012

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


VOCABULARY = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=len(Bytes.tokens))


@cache
def grammar_of(family: str, special: bool = False, several: bool = True, opening: str = "") -> Grammar:
    def literal(text: str) -> str:
        return f"<[{257 + MARKS.index(text)}]>" if special else json.dumps(text)

    return lark_constraint(TOOL_FAMILIES[family].beside_text(TOOLS, several, literal, schema_in_lark, opening))  # type: ignore[index]


def matcher_of(grammar: Grammar) -> LLMatcher:
    matcher = LLMatcher(VOCABULARY, grammar.source, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def tokens_of(text: str, special: bool) -> list[int]:
    """With the marks as special tokens, or spelled."""
    if not special:
        return list(text.encode())
    for number, mark in enumerate(MARKS):
        if mark in text:
            before, _, after = text.partition(mark)
            return [*tokens_of(before, True), 257 + number, *tokens_of(after, True)]
    return list(text.encode())


def accepts(grammar: Grammar, text: str, special: bool = False) -> bool:
    matcher = matcher_of(grammar)
    return bool(matcher.consume_tokens(tokens_of(text, special))) and bool(matcher.is_accepting())


def written(family: str, weather: str = '{"city": "Rome", "unit": "C"}', kwargs: str = 'city="Rome", unit="C"') -> str:
    return {
        "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {weather}}}\n</tool_call>',
        "llama3": f'{{"name": "weather", "parameters": {weather}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {weather}}}]',
        "pythonic": f"[weather({kwargs})]",
    }[family]


LOOSE = {
    "hermes": '<tool_call>{"name": "time", "arguments": {"zone": [1]}}</tool_call>',
    "llama3": '{"name": "time", "parameters": {"zone": [1]}}',
    "mistral": '[TOOL_CALLS]time[ARGS]{"zone": [1]}',
    "pythonic": "[time(zone=[1, {'a': None, \"b\": True}], x=-2.5)]",
}
TEXTS = {
    "hermes": ["1 < 2 and <tool_cal", "[1] A list"],
    "llama3": ['{"answer": 42} is it.', '{"name": "Anna", "age": 3}', "[1] A list", f"It is {written('llama3')}", "<|python_"],
    "mistral": ["[TOOL_CALLS", "[1] A list"],
    "pythonic": ["[1, 2, 3]", "[exit()]", "[weather]", f"It is {written('pythonic')}", "[weather, see below] (so)"],
}
MORE = {
    "hermes": [f"Let me look.\n{written('hermes')}\n{LOOSE['hermes']} Done."],
    "llama3": [
        '\n{"name":"weather","arguments":{"city":"Rome","unit":"C"}} Done.',
        f"<|python_tag|>{written('llama3')}; {LOOSE['llama3']};{written('llama3')}",
        f"[{LOOSE['llama3']}, {written('llama3')}]",
        '{"type": "function", "name": "weather", "parameters": {"city": "Rome", "unit": "C"}}',
    ],
    "mistral": [
        f"Well. {LOOSE['mistral']}{written('mistral')}",
        '[TOOL_CALLS]weather[CALL_ID]abcdEF123[ARGS]{"city": "", "unit": "F"} Done.',
    ],
    "pythonic": [f"\n{LOOSE['pythonic']} Done.", '<|python_start|>[time(), weather(city="a/b", unit="F", hours=[true])]<|python_end|>'],
}
BAD = {
    "hermes": ["<tool_call>no", '<tool_call>{"name": "other"', f"{LOOSE['hermes']} {written('hermes', '{}')}"],
    "llama3": [
        '{"parameters": {"hour": 1}, "name": "weather"}',
        '{"n\\u0061me": "weather", "parameters": {}}',
        '[{"name" : "weather", "parameters": {}}]',
        f"{LOOSE['llama3']}; {written('llama3', '{}')}",
        f"[{LOOSE['llama3']}]; {written('llama3', '{}')}",
    ],
    "mistral": [
        "[TOOL_CALLS] what?",
        "[TOOL_CALLS]other{}",
        '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
        f"{LOOSE['mistral']}[TOOL_CALLS]weather{{}}",
    ],
    "pythonic": ["[weather()]", " [ weather ( 'Rome')]", "[time(), weather()]", "[time(), other()]", "<|python_start|>\n[weather()]"],
}
WRONG = [
    ('{"city": "Rome"}', 'city="Rome"'),
    ('{"city": "Rome", "unit": "K"}', 'city="Rome", unit="K"'),
    ('{"city": "Rome", "days": "3", "unit": "C"}', 'city="Rome", days="3", unit="C"'),
    ('{"city": "Rome", "unit": "C", "more": 1}', 'city="Rome", unit="C", more=1'),
]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_free_and_calls_fit_their_tools(family: str, special: bool) -> None:
    grammar, reading = grammar_of(family, special), Reading(tools=TOOL_FAMILIES[family], tool_names=NAMES)  # type: ignore[index]
    for text in ("", "Just text, {} and [].", *TEXTS[family]):
        assert accepts(grammar, text, special) and not read(reading, text), text
    for text in (written(family), LOOSE[family], *MORE[family]):
        assert accepts(grammar, text, special), text
        check(found := read(reading, text), ended=True)
        assert found
    for text in (*(written(family, *wrong) for wrong in WRONG), *BAD[family]):
        assert not accepts(grammar, text, special), text
        # A mark that is spelled out is read as one, too.
        assert not accepts(grammar, text), text


@pytest.mark.parametrize("family", ["hermes", "mistral", "pythonic", "llama3"])
def test_one_call_where_there_may_be_one(family: str) -> None:
    once, call = grammar_of(family, several=False), written(family)
    assert accepts(once, call) and accepts(once, "Text.")
    assert not accepts(once, {"pythonic": f"{call[:-1]}, {call[1:]}", "llama3": f"{call}; {call}"}.get(family, f"{call}\n{call}"))


@pytest.mark.parametrize("family", FAMILIES)
def test_reasoning_may_come_before_and_is_free(family: str) -> None:
    call, wrong = written(family), written(family, *WRONG[0])
    for begun, thought in ((True, f"Hm, {wrong}</think>\n\n"), (False, f"<think>Hm, {wrong}</think>"), (False, "")):
        beforehand = Beforehand("<think>", "</think>", begun)
        call_grammar = json.loads(grammar_of(family, opening="" if begun else "<think>").source)["grammars"][0]["lark_grammar"]
        grammar = lark_constraint(call_grammar, beforehand)
        assert accepts(grammar, thought + call) and accepts(grammar, f"{thought}Just text.")
        assert not accepts(grammar, thought + wrong)


PIECES = [
    *MARKS,
    *("{", "}", "[", "]", "(", ")", ", ", ": ", "; ", "=", '"', "'", "\\", "\n", " ", "1", "x", "</think>", "true", "None", "\\u0061", "é"),
    *('"name"', '"parameters"', '"arguments"', '"weather"', "weather", "weather(", "time", '"time"', '"city"', "city=", "unit", '"C"'),
    *('{"name": "weather", "parameters": ', '{"name": "weather", "arguments": ', '"city": "Rome"', 'unit="C")', '"unit": "F"}}'),
]


@given(family=st.sampled_from(FAMILIES), special=st.booleans(), pieces=st.lists(st.sampled_from(PIECES), max_size=30))
def test_whatever_a_grammar_lets_through_every_call_in_it_fits(family: str, special: bool, pieces: list[str]) -> None:
    """Pieces that do not fit are left out, or broken off where they do not."""
    matcher, text = matcher_of(grammar_of(family, special)), ""
    for piece in pieces:
        tokens = tokens_of(piece, special)
        taken = 0 if matcher.is_stopped() else matcher.validate_tokens(tokens)
        if not taken or (taken < len(tokens) and not piece.isascii()):
            continue
        assert matcher.consume_tokens(tokens[:taken])
        text += piece if taken == len(tokens) else piece[:taken]
    reading = Reading(tools=TOOL_FAMILIES[family], tool_names=NAMES)  # type: ignore[index]
    check(read(reading, text), ended=bool(matcher.is_accepting()))


# ---- a model, token by token ----

MOST_TOKENS = 240
SLOTS, BLOCK = 40, 16
BEGUN = {
    "hermes": ["", "Well. <tool_call>", '<tool_call>{"name": "weather"'],
    "llama3": ["", '{"name": "weather"', '<|python_tag|>{"type": "function", "name"', f'{LOOSE["llama3"]}; {{"name": "wea'],
    "mistral": ["", "Well. [TOOL_CALLS]", "[TOOL_CALLS]weather", '[TOOL_CALLS][{"name": "weather", '],
    "pythonic": ["", "[weather(", "[time(), weather", "<|python_start|>[ weather ("],
}


class Model:
    """A tiny random model, with the families' marks as special tokens or not."""

    def __init__(self, path: Path, special: bool) -> None:
        make_tiny_llama(path, special_tokens=MARKS if special else ())
        self.info = describe(str(path))
        self.tokenizer = load_tokenizer(self.info)
        spec = self.info.kv_spec("float32", BLOCK)
        self._runner = ModelRunner(load_model(self.info, "float32"), spec, np.zeros(SLOTS * spec.bytes_per_slot, np.uint8), SLOTS)
        self._sampler = Sampler(self.info, Grammars(self.info))

    def goes_on(self, request: ApiRequest, family: Any, begun: str) -> tuple[str, bool, Reading]:
        """The text of an output that begins so, and whether it has ended by itself; and how it is read."""
        chat_model = ChatModel(self.tokenizer, family)
        preparer = Preparer("tiny", self.info.context_length, self.info.vocab_size, self.tokenizer, chat_model=chat_model)
        prepared = preparer.prepared(request, Origin("r", 0.0))
        prompt, output = prepared.prompts[0][-60:], self.tokenizer.encode(begun, add_special_tokens=False)
        new, start, finish = [*prompt, *output], 0, None
        row = SamplingRow(prepared.sampling, prompt, output)
        while finish is None:
            logits = self._runner.forward([SequenceChunk(new, start, range(SLOTS))])
            (drawn,) = self._sampler.sample(logits, [row])
            assert isinstance(drawn, SampledToken), drawn
            new, start = [drawn.token_id], start + len(new)
            output.append(drawn.token_id)
            finish = finish_of(drawn.token_id, len(output), prepared.sampling, self.info.eos_token_ids)
        kept = [token_id for mark in prepared.reading.markers if (token_id := self.tokenizer.special_id(mark)) is not None]
        detokenizer = self.tokenizer.detokenizer(kept=kept)
        text = "".join((*map(detokenizer.push, output), detokenizer.finish()))
        return text, finish is Finish.STOP, prepared.reading


@pytest.fixture(scope="module", params=[False, True], ids=["spelled", "special"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("strict") / "tiny", request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_a_model_begins_always_fits_its_tool(model: Model, family: str) -> None:
    dice = random.Random(5)
    whole = 0
    for begun in BEGUN[family] * 2:
        request = ApiRequest(
            "tiny",
            Conversation((Message(Speaker.USER, "How is the weather?"),), TOOLS, ToolChoice()),
            max_tokens=MOST_TOKENS,
            sampling={"temperature": 1.0, "seed": (seed := dice.randrange(1000))},
        )
        text, ended, reading = model.goes_on(request, family, begun)
        calls = read(reading, text)
        print(f"{begun!r}, seed {seed}: {text!r}: {calls}")
        check(calls, ended=ended)
        whole += sum(arguments.endswith("}") for name, arguments in calls if name == "weather")
        if "weather(" in begun.replace(" ", "") or '"weather"' in begun:
            assert calls
    assert whole, "some are"


def test_no_grammar_where_no_tool_is_strict(model: Model) -> None:
    asked = (Message(Speaker.USER, "How is the weather?"),)
    preparer = Preparer("tiny", 2000, model.info.vocab_size, model.tokenizer, chat_model=ChatModel(model.tokenizer, "llama3"))
    for tools, choice, held in ((TOOLS, ToolChoice(), True), ((replace(WEATHER, strict=False), TIME), ToolChoice(), False)):
        prepared = preparer.prepared(ApiRequest("tiny", Conversation(asked, tools, choice)), Origin("r", 0.0))
        assert bool(prepared.sampling.grammar) is held
