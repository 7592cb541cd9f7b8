"""Grammars of calls: what they allow is read as the calls that it is, and nothing else is allowed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine.sampling.grammars import LIMITS
from gateway.api_request import FormatKind, OutputFormat, Tool
from gateway.grammars import Beforehand, constraint, lark_constraint, schema_in_lark
from gateway.output import CallArguments, CallBegun
from gateway.tool_calls.families import TOOL_FAMILIES
from gateway.tool_calls.forced import MAX_CALLS, keyword_rules
from springtide.errors import InvalidRequest
from springtide.protocol.sampling import Grammar

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/count"}}, "required": ["city"]}
WEATHER = Tool("weather", parameters={**CITY, "$defs": {"count": {"type": "integer"}}})
TIME = Tool("time", parameters={"type": "object", "properties": {"zone": {"type": "string"}, "exact": {"type": "boolean"}}})
BARE = Tool("now")


class Bytes:
    """A vocabulary of single bytes, and an end."""

    bos_token_id = None
    eos_token_id = 256
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


VOCABULARY = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257)


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = LLMatcher(VOCABULARY, grammar.source, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(list(text.encode()))) and bool(matcher.is_accepting())


def forced(family: str, tools: list[Tool], several: bool = False) -> Grammar:
    return lark_constraint(TOOL_FAMILIES[family].grammar(tools, several, json.dumps, schema_in_lark))  # type: ignore[index]


def calls(family: str, text: str) -> list[tuple[str, object]]:
    reader = TOOL_FAMILIES[family].new_reader(("weather", "time", "now"))  # type: ignore[index]
    parts = [*reader.push(text), *reader.finish()]
    assert all(isinstance(part, (CallBegun, CallArguments)) for part in parts), parts
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    arguments = ["".join(p.text for p in parts if isinstance(p, CallArguments) and p.number == n) for n in range(len(names))]
    return list(zip(names, map(json.loads, arguments), strict=True))


ROME = {"city": 'Rome "IT"', "days": 3}
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome \\"IT\\"", "days": 3}}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": {"city": "Rome \\"IT\\"", "days": 3}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome \\"IT\\"", "days": 3}}]',
    "pythonic": '[weather(city="Rome \\"IT\\"", days=3)]',
}
SEVERAL = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {"exact": true}}\n</tool_call>',
    "llama3": '{"name": "now", "parameters": {}}; {"name": "time", "parameters": {"exact": true}}',
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "time", "arguments": {"exact": true}}]',
    "pythonic": "[now(), time(exact=true)]",
}


@pytest.mark.parametrize("family", sorted(TOOL_FAMILIES))
def test_what_is_forced_is_a_call_that_the_family_reads(family: str) -> None:
    grammar, text = forced(family, [WEATHER]), WRITTEN[family]
    assert accepts(grammar, text) and calls(family, text) == [("weather", ROME)]
    assert not accepts(grammar, text.replace("3", '"3"')), "a schema holds"
    assert not accepts(grammar, text.replace("days", "hours"))
    assert not accepts(grammar, text.replace("weather", "time"))
    assert not accepts(grammar, f"Well. {text}") and not accepts(grammar, "")


@pytest.mark.parametrize("family", sorted(TOOL_FAMILIES))
def test_several_calls_where_there_may_be_several(family: str) -> None:
    tools, text = [WEATHER, TIME, BARE], SEVERAL[family]
    assert accepts(forced(family, tools, several=True), text) and not accepts(forced(family, tools), text)
    assert calls(family, text) == [("now", {}), ("time", {"exact": True})]


REPEATED = {
    "hermes": ("", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "\n", ""),
    "llama3": ("", '{"name": "now", "parameters": {}}', "; ", ""),
    "mistral": ("[TOOL_CALLS][", '{"name": "now", "arguments": {}}', ", ", "]"),
    "pythonic": ("[", "now()", ", ", "]"),
}


@pytest.mark.parametrize(("family", "written"), [*REPEATED.items(), ("mistral", ("", "[TOOL_CALLS]now{}", "", ""))])
def test_a_call_cannot_be_repeated_for_ever(family: str, written: tuple[str, str, str, str]) -> None:
    begin, call, between, end = written
    most, more = (begin + between.join([call] * count) + end for count in (MAX_CALLS, MAX_CALLS + 1))
    grammar = forced(family, [WEATHER, TIME, BARE], several=True)
    assert accepts(grammar, most) and calls(family, most) == [("now", {})] * MAX_CALLS
    assert not accepts(grammar, more)
    assert accepts(forced(family, [BARE]), begin + call + end) and not accepts(forced(family, [BARE]), begin + call + between + call + end)


def test_a_mistral_model_writes_one_list_or_one_call_behind_each_mark() -> None:
    lists = '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]' * 2
    assert not accepts(forced("mistral", [BARE], several=True), lists), "as many calls as there may be, in each of as many lists"


@pytest.mark.parametrize("mark", ["[ARGS]", "[CALL_ID]abcDEF123[ARGS]", ""])
def test_a_mistral_model_may_write_a_name_and_its_arguments(mark: str) -> None:
    text = f'[TOOL_CALLS]weather{mark}{{"city": "Rome"}}'
    assert accepts(forced("mistral", [WEATHER, TIME]), text) and calls("mistral", text) == [("weather", {"city": "Rome"})]
    assert accepts(forced("mistral", [WEATHER, TIME], several=True), text * 2) and not accepts(forced("mistral", [WEATHER]), text * 2)
    assert not accepts(forced("mistral", [WEATHER]), text.replace("city", "town"))


@pytest.mark.parametrize("written", ["[time()]", '[time(zone="a")]', "[time(exact=false)]", '[time(zone="a", exact=true)]'])
def test_keywords_that_are_not_required_may_be_left_out(written: str) -> None:
    assert accepts(forced("pythonic", [TIME]), written)
    assert not accepts(forced("pythonic", [TIME]), written.replace("(", "(, "))


def test_reasoning_may_come_before_and_text_in_the_place_of_calls() -> None:
    thinks = Beforehand("<think>", "</think>", begun=False)
    call = TOOL_FAMILIES["hermes"].grammar([WEATHER], False, json.dumps, schema_in_lark)
    assert accepts(lark_constraint(call, thinks), f"<think>Hm. {{}}</think>\n\n{WRITTEN['hermes']}")
    answer = OutputFormat(FormatKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
    for beforehand, before in ((None, ""), (thinks, "<think>Hm.</think>\n")):
        grammar = constraint(answer, beforehand, calls=call)
        assert accepts(grammar, before + WRITTEN["hermes"]) and accepts(grammar, before + '{"a": 1}')
        assert not accepts(grammar, before + "Well.")


@pytest.mark.parametrize(
    "parameters", [{"properties": {"from": {"type": "string"}}}, {"properties": [1]}, {"properties": {}, "required": "x"}]
)
def test_a_tool_that_python_could_not_call_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="tools"):
        list(keyword_rules(0, Tool("f", parameters=parameters), lambda schema: schema))
