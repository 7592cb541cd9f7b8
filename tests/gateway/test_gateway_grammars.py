"""What outputs are held to: made of what clients send, and tried on a real vocabulary in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from llguidance.gbnf_to_lark import RuleRefNode

from engine.formats.files import describe
from engine.sampling.grammars import GrammarCompiler
from engine.tokenizer.tokenizer import load_tokenizer
from gateway import grammar_checks
from gateway.api_request import FormatKind, OutputFormat
from gateway.grammar_checks import GrammarChecker
from gateway.grammars import MAX_CHOICES, MAX_PROPERTIES, MAX_SCHEMA_DEPTH, MAX_SOURCE_CHARACTERS, Beforehand, constraint, lark_constraint
from springtide.errors import InvalidRequest, Overloaded, Unavailable
from springtide.protocol.sampling import Grammar

INFO = describe("demo")
TOKENIZER = load_tokenizer(INFO)
COMPILER = GrammarCompiler(TOKENIZER, INFO)
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def schema(value: dict[str, Any]) -> OutputFormat:
    return OutputFormat(FormatKind.JSON_SCHEMA, json.dumps(value))


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the text, as it is tokenized, is one of the grammar, and all of it."""
    matcher, tokens = COMPILER.compile(grammar).deep_copy(), TOKENIZER.encode(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        (FormatKind.JSON_OBJECT, "", ["{}", '{"a": [1, null]}'], ["[]", "x", ' {"a": 1}']),
        (FormatKind.JSON_SCHEMA, json.dumps(OBJECT), ['{"a":1}', '{\n  "a": -20\n}'], ["{}", '{"a":"x"}', '{"a":1,"b":2}']),
        (FormatKind.JSON_SCHEMA, json.dumps({"type": "string", "format": "int64"}), ['"x"'], ["1"]),
        (FormatKind.JSON_SCHEMA, '{"properties": {"format": {"const": "zip"}}, "required": ["format"]}', ['{"format":"zip"}'], ["{}"]),
        (FormatKind.REGEX, "^a/b[0-9]{2}$", ["a/b12"], ["a/b1", "ab12"]),
        (FormatKind.CHOICE, json.dumps(['say "no"', "é\n☃", "a\\b"]), ['say "no"', "é\n☃", "a\\b"], ["say", "é"]),
        (FormatKind.GRAMMAR, 'start: "a" rest\nrest: /b+/', ["abbb"], ["a"]),
        (FormatKind.GRAMMAR, 'root ::= "yes" | "no " digits\ndigits ::= [0-9]+', ["yes", "no 17"], ["no "]),
        (
            FormatKind.GRAMMAR,
            '?start: word -> one\n    | list\n!word: "::="\nlist: "[" [word ("," word)*] "]"',
            ["::=", "[]", "[::=,::=]"],
            ["[,]"],
        ),
        (FormatKind.GRAMMAR, "// a comment\n%import common.INT\n%import common.WS\n%ignore WS\n?start: INT+", ["1", "1 20"], ["x"]),
    ],
)
def test_a_format_is_a_grammar_of_just_its_texts(kind: FormatKind, source: str, good: list[str], bad: list[str]) -> None:
    grammar = constraint(OutputFormat(kind, source))
    assert [accepts(grammar, text) for text in good] == [True] * len(good)
    assert [accepts(grammar, text) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "date",
            ["2023-12-31", "2024-02-29", "2000-02-29", "0004-02-29"],
            ["2023-02-29", "1900-02-29", "2023-04-31", "0000-01-01", "0000-02-29"],
        ),
        ("time", ["23:59:59Z", "01:02:03.25+05:30"], ["23:59:60Z", "24:00:00Z", "12:00:00", "12:00:00+24:00"]),
        (
            "date-time",
            ["2024-02-29T23:59:59Z", "1999-01-01T00:00:00.123456-01:00"],
            ["2023-02-29T00:00:00Z", "2023-01-01T12:53:60Z", "2023-01-01"],
        ),
    ],
)
def test_there_are_only_days_and_seconds_that_there_are(name: str, good: list[str], bad: list[str]) -> None:
    grammar = constraint(schema({"type": "string", "format": name}))
    assert [accepts(grammar, json.dumps(text)) for text in good] == [True] * len(good)
    assert [accepts(grammar, json.dumps(text)) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize("value", [[], {}, 3])
def test_a_format_that_is_no_text_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidRequest, match="`format`"):
        constraint(schema({"type": "object", "properties": {"a": {"type": "string", "format": value}}}))


@pytest.mark.parametrize(("stated", "holds"), [({}, 253), ({"maxLength": 100}, 100), ({"maxLength": 300}, 253)])
def test_the_name_of_a_host_has_at_most_253_characters(stated: dict[str, int], holds: int) -> None:
    grammar = constraint(schema({"type": "string", "format": "hostname", **stated}))
    longest = ".".join(["a" * 63] * 4)[:holds]
    assert accepts(grammar, json.dumps(longest))
    assert not accepts(grammar, json.dumps(longest + "a"))


def test_the_answer_alone_is_held_to_a_format_not_the_reasoning_before_it() -> None:
    thinks, marked = Beforehand("<think>", "</think>", begun=True), ("<|im_start|>", "<|im_end|>")
    begun, free = constraint(schema(OBJECT), thinks), constraint(schema(OBJECT), Beforehand("<think>", "</think>", begun=False))
    assert accepts(begun, 'So {"a": "b"}, or <b>?</think>\n\n{"a":1}') and accepts(begun, '</think>{"a":1}')
    assert not accepts(begun, '{"a":1}') and not accepts(begun, 'So</think>\n\n{"a":"b"}')
    assert accepts(free, '{"a":1}') and accepts(free, '<think>So</think>{"a":1}') and not accepts(free, 'So</think>{"a":1}')
    special = lark_constraint('start: "x"', Beforehand("<|im_start|>", "<repo_name>", begun=False, tokens=(*marked, "<repo_name>")))
    assert accepts(special, "x") and accepts(special, "<|im_start|>So<repo_name>x") and not accepts(special, "So<repo_name>x")


@pytest.mark.parametrize(
    ("format", "says"),
    [
        (OutputFormat(FormatKind.JSON_SCHEMA, "{"), "JSON schema as JSON"),
        (OutputFormat(FormatKind.JSON_SCHEMA, "[1]"), "an object"),
        (OutputFormat(FormatKind.JSON_SCHEMA, '{"items":' * (MAX_SCHEMA_DEPTH + 1) + "{}" + "}" * (MAX_SCHEMA_DEPTH + 1)), "deep"),
        (OutputFormat(FormatKind.JSON_SCHEMA, '{"a":' * 9000), "as JSON"),
        (schema({"properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}}), "properties"),
        (schema({"enum": list(range(17000))}), "at most"),
        (OutputFormat(FormatKind.REGEX, "a" * (MAX_SOURCE_CHARACTERS + 1)), "characters"),
        (OutputFormat(FormatKind.CHOICE, "[]"), "not empty"),
        (OutputFormat(FormatKind.CHOICE, '["a", 1]'), "texts"),
        (OutputFormat(FormatKind.CHOICE, json.dumps([str(i) for i in range(MAX_CHOICES + 1)])), "choices"),
        (OutputFormat(FormatKind.GRAMMAR, "root ::= ?"), "no grammar in GBNF"),
        (OutputFormat(FormatKind.GRAMMAR, "root ::= " + "(" * 5000), "no grammar in GBNF"),
    ],
)
def test_what_is_too_large_or_makes_no_sense_is_refused(format: OutputFormat, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        constraint(format)
    assert refused.value.param == "format" and len(refused.value.message) < 700


def test_a_long_chain_of_rules_is_gone_through_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, is_terminal = list[str](), RuleRefNode.is_terminal

    def counted(node: RuleRefNode) -> bool:
        asked.append(node.name)
        return is_terminal(node)

    monkeypatch.setattr(RuleRefNode, "is_terminal", counted)
    rules = [f"r{number} ::= r{number + 1}" for number in range(1000)]
    grammar = constraint(OutputFormat(FormatKind.GRAMMAR, "\n".join(['root ::= r0 | "(" root ")"', *rules, 'r1000 ::= "x" # the end'])))
    assert len(asked) < 5 * len(rules)
    assert accepts(grammar, "((x))") and not accepts(grammar, "(x")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(INFO)
    yield checker
    await checker.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("format", "says"),
    [
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"$ref": "http://example.com/schema"}), "example.com"),
        (schema({"$ref": "#"}), "no text satisfies it"),
        (schema({"enum": []}), "nsatisfiable"),
        (OutputFormat(FormatKind.REGEX, "(?=a)b"), "look-ahead"),
        (OutputFormat(FormatKind.REGEX, "("), "unclosed"),
        (OutputFormat(FormatKind.GRAMMAR, "start: missing"), "missing"),
        (OutputFormat(FormatKind.GRAMMAR, "?? nothing"), "expecting rule"),
        (OutputFormat(FormatKind.GRAMMAR, "\n" * MAX_SOURCE_CHARACTERS), "cannot be"),
    ],
)
async def test_what_cannot_be_compiled_is_refused_by_name(checker: GrammarChecker, format: OutputFormat, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        await checker.check(constraint(format), "response_format", "one")
    assert refused.value.param == "response_format" and refused.value.message.startswith("response_format cannot be")


@pytest.mark.asyncio(loop_scope="module")
async def test_what_would_take_for_ever_is_given_up_and_holds_up_nobody_else(checker: GrammarChecker) -> None:
    """An intersection of expressions that has more states than there is time for."""
    good = constraint(schema(OBJECT))
    assert not checker.good(good)
    first = asyncio.create_task(checker.check(endless(0), "guided_grammar", "one"))
    await asyncio.sleep(0)
    await checker.check(good, "response_format", "one")
    assert checker.good(good)
    with pytest.raises(InvalidRequest, match="guided_grammar cannot be compiled within"):
        await first
    with pytest.raises(InvalidRequest, match="guided_grammar cannot be compiled within"):
        await checker.check(endless(0), "guided_grammar", "one")


def endless(number: int) -> Grammar:
    """Each another one."""
    return lark_constraint(f'start: "{number}" A\nA: ' + " & ".join(f"/.*a.{{{i}}}/" for i in range(1, 40)))


@pytest.mark.asyncio(loop_scope="module")
async def test_whoever_sends_slow_ones_waits_for_oneself(checker: GrammarChecker) -> None:
    ended = list[str]()

    async def check(name: str, grammar: Grammar, tenant: str) -> None:
        with contextlib.suppress(InvalidRequest):
            await checker.check(grammar, name, tenant)
        ended.append(name)

    slow = [asyncio.create_task(check(f"slow {number}", endless(number), "slow")) for number in range(1, 4)]
    await asyncio.sleep(0)
    quick = [asyncio.create_task(check(f"quick {i}", constraint(OutputFormat(FormatKind.REGEX, f"x{i}")), "quick")) for i in range(3)]
    shared = asyncio.create_task(check("slow 3, of another", endless(3), "other"))
    await asyncio.gather(*slow, *quick, shared)
    assert len(ended) == 7 and ended[0] == "slow 1", "that had begun when the others came"
    assert ended[-1] == "slow 2", "what another has asked as well goes before it"


async def test_a_tenant_may_have_so_many_waiting_and_others_find_place_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MOST_WAITING_OF_A_TENANT", 2)
    checker, grammars = GrammarChecker(INFO), [constraint(OutputFormat(FormatKind.REGEX, f"x{i}")) for i in range(5)]
    waiting = [asyncio.create_task(checker.check(grammar, "guided_regex", "one")) for grammar in grammars[:2]]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="too many grammars") as refused:
        await checker.check(grammars[2], "guided_regex", "one")
    assert refused.value.retry_after_s
    await asyncio.gather(*waiting, checker.check(grammars[3], "guided_regex", "another"), checker.check(grammars[0], "guided_regex", "one"))
    await checker.check(grammars[2], "guided_regex", "one")
    await checker.close()


async def test_whoever_waits_when_it_ends_is_told() -> None:
    checker = GrammarChecker(INFO)
    waiting = [asyncio.create_task(checker.check(endless(number), "guided_grammar", "one")) for number in range(3)]
    await asyncio.sleep(0)
    await checker.close()
    assert {type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)} == {Unavailable}


async def test_what_is_asked_about_is_remembered_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "_REMEMBERED", 2)
    checker = GrammarChecker(INFO)
    first, second, third = (constraint(OutputFormat(FormatKind.REGEX, source)) for source in "abc")
    await checker.check(first, "guided_regex", "one")
    await checker.check(second, "guided_regex", "one")
    assert checker.good(first)
    await checker.check(third, "guided_regex", "one")
    assert checker.good(first) and checker.good(third) and not checker.good(second)
    await checker.close()


async def test_the_process_is_there_before_the_first_grammar_and_is_the_only_one() -> None:
    checker, good = GrammarChecker(INFO), constraint(schema(OBJECT))
    await asyncio.gather(checker.warm_up(), checker.check(good, "response_format", "one"))
    process = checker._process
    assert process is not None
    await checker.warm_up()
    assert checker._process is process and process.ended_within(0.0) is None
    await checker.close()
    assert checker._process is None and process.ended_within(0.0) is not None


async def test_a_process_that_cannot_start_is_tried_once_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []

    class Broken:
        def __init__(self) -> None:
            starts.append(1)
            raise OSError("no more processes")

    monkeypatch.setattr(grammar_checks, "_Process", Broken)
    checker = GrammarChecker(INFO)
    for key in "abc":
        with pytest.raises(Unavailable):
            await checker.check(constraint(schema({"type": "object", "properties": {key: {}}})), "response_format", "one")
    assert len(starts) == 3
    await checker.close()


async def test_nothing_is_left_of_a_process_whose_gateway_ends_while_it_starts() -> None:
    checker = GrammarChecker(INFO)
    warming = asyncio.create_task(checker.warm_up())
    while checker._process is None:  # noqa: ASYNC110 - nothing signals it
        await asyncio.sleep(0)
    process = checker._process
    await checker.close()
    await warming
    assert checker._process is None and process.ended_within(0.0) is not None


async def test_a_process_may_have_no_more_memory_than_its_gateway_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ulimit -v`, that of a shell or a scheduler's."""
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/sh\nulimit -v {3 << 20} && exec {sys.executable} "$@"\n')
    limited.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(limited))
    checker = GrammarChecker(INFO)
    await checker.check(constraint(schema(OBJECT)), "response_format", "one")
    await checker.close()


async def test_a_process_that_is_killed_is_started_anew() -> None:
    checker = GrammarChecker(INFO)
    await checker.warm_up()
    for key in "abc":
        assert checker._process is not None
        checker._process.kill()
        try:
            await checker.check(constraint(schema({"type": "object", "properties": {key: {}}})), "response_format", "one")
        except Unavailable:  # it was still dying
            await checker.check(constraint(schema({"type": "object", "properties": {key: {}}})), "response_format", "one")
    await checker.close()


async def test_who_goes_away_leaves_the_answer_to_others_who_asked_the_same() -> None:
    checker, good = GrammarChecker(INFO), constraint(schema(OBJECT))
    first, second = (asyncio.create_task(checker.check(good, "response_format", "one")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert checker.good(good) and first.cancelled()
    await checker.close()


async def test_a_process_that_cannot_start_is_no_fault_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    checker, good = GrammarChecker(INFO), constraint(schema(OBJECT))
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/bin/false")
        await checker.warm_up()
        with pytest.raises(Unavailable):
            await checker.check(good, "response_format", "one")
    await checker.check(good, "response_format", "one")
    await checker.close()
