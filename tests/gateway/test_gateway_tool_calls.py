"""Calls of tools and reasoning in what models write, in whatever pieces it comes."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.output import CallArguments, CallBegun, Content, Delta, Ending, Part, Reasoning, gathered
from gateway.tool_calls.families import REASONING_FAMILIES, TOOL_FAMILIES
from gateway.tool_calls.reading import Reading
from springtide.protocol.outputs import Finish
from springtide.protocol.usage import Usage

NAMES = ("weather", "time")
VALUES = {"city": 'São {Paulo} "x" [1]', "days": [1, {"a": None}], "ok": True, "tag": "</tool_call>; ]"}
ARGUMENTS = json.dumps(VALUES, ensure_ascii=False)
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
TIME = '{"name": "time", "arguments": {}}'

Expected = list[tuple[str, str] | str]
"""Texts, and calls with their arguments."""


def read(reading: Reading, pieces: list[str]) -> list[Part]:
    reader = reading.new_reader()
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    return list(gathered([Delta(0, tuple(parts), (), Ending(Finish.STOP))], Usage(0, 0, 0)).choices[0].parts)


def said(reading: Reading, pieces: list[str]) -> Expected:
    choice = gathered([Delta(0, tuple(read(reading, pieces)), (), Ending(Finish.STOP))], Usage(0, 0, 0)).choices[0]
    found: Expected = [part.text for part in choice.parts if isinstance(part, Content)]
    return [*found, *((call.name, arguments) for call, arguments in choice.calls)]


def of(name: str) -> Reading:
    return Reading(tools=TOOL_FAMILIES[name], tool_names=NAMES)  # type: ignore[index]


CASES: list[tuple[str, str, Expected]] = [
    ("hermes", "Just text.", ["Just text."]),
    ("hermes", f"Let me look.\n<tool_call>\n{CALL}\n</tool_call>", ["Let me look.", ("weather", ARGUMENTS)]),
    ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{TIME}</tool_call>", [("weather", ARGUMENTS), ("time", "{}")]),
    ("hermes", f"<tool_call>[{CALL}, {TIME}]</tool_call>", [("weather", ARGUMENTS), ("time", "{}")]),
    ("hermes", f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "weather"}}</tool_call> Done.', ["Done.", ("weather", ARGUMENTS)]),
    ("hermes", '<tool_call>{"name": "time"}</tool_call>', [("time", "{}")]),
    ("hermes", '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>', [("time", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": 1', [("time", '{"a": 1')]),
    ("hermes", "<tool_call>no call</tool_call>", ["<tool_call>no call</tool_call>"]),
    ("hermes", f"<tool_call>{CALL}\n{TIME}</tool_call> Done.", ["Done.", ("weather", ARGUMENTS), ("time", "{}")]),
    ("hermes", f"<tool_call>{CALL}, [{TIME}]", [("weather", ARGUMENTS), ("time", "{}")]),
    ("hermes", f'<tool_call>{TIME}; {{"a": 1}}</tool_call>', ['; {"a": 1}</tool_call>', ("time", "{}")]),
    ("hermes", f"<tool_call>{TIME}\n<tool_call>{TIME}</tool_call>", [("time", "{}"), ("time", "{}")]),
    ("hermes", "Write \n\n<tool_call> around it.", ["Write \n\n<tool_call> around it."]),
    ("hermes", 'So:\n<tool_call>{"a": 1}', ['So:\n<tool_call>{"a": 1}']),
    ("hermes", "1 < 2 and <tool_cal", ["1 < 2 and <tool_cal"]),
    ("hermes", '<tool_call>{"na', ['<tool_call>{"na']),
    ("hermes", f'<tool_call>{{"name": {"[" * 5000 + "]" * 5000}}}', [f'<tool_call>{{"name": {"[" * 5000 + "]" * 5000}}}']),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {\n"city": "Ro\nme\t"}}</tool_call>',
        [("weather", '{\n"city": "Ro\\nme\\t"}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Ro\nme\\"}"}</tool_call>',
        [("weather", '{"city": "Ro\\nme"}')],
    ),
    ("llama3", f' {{"name": "weather", "parameters": {ARGUMENTS}}}', [("weather", ARGUMENTS)]),
    ("llama3", f"<|python_tag|>{CALL}; {TIME}", [("weather", ARGUMENTS), ("time", "{}")]),
    ("llama3", '{"name": "Anna", "age": 3}', ['{"name": "Anna", "age": 3}']),
    ("llama3", '{"answer": 42} is it.', ['{"answer": 42} is it.']),
    ("llama3", f"It is {CALL}", [f"It is {CALL}"]),
    ("llama3", "<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
    ("mistral", f"[TOOL_CALLS][{CALL}, {TIME}]", [("weather", ARGUMENTS), ("time", "{}")]),
    ("mistral", f"Well. [TOOL_CALLS]weather{ARGUMENTS}[TOOL_CALLS]time[ARGS]{{}}", ["Well.", ("weather", ARGUMENTS), ("time", "{}")]),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abc123XYZ[ARGS]{ARGUMENTS}", [("weather", ARGUMENTS)]),
    ("mistral", "[TOOL_CALLS]ns:get/one{}", [("ns:get/one", "{}")]),
    ("mistral", "[TOOL_CALLS] what?", ["[TOOL_CALLS] what?"]),
    ("mistral", "See  [TOOL_CALLS] what?", ["See  [TOOL_CALLS] what?"]),
    ("mistral", "See [TOOL_CALLS]weather[ARGS]", ["See [TOOL_CALLS]weather[ARGS]"]),
    ("mistral", "[1] A list.", ["[1] A list."]),
    ("pythonic", "[weather(city='Rome', days=[1, -2]), time()]", [("weather", '{"city": "Rome", "days": [1, -2]}'), ("time", "{}")]),
    ("pythonic", '<|python_start|>[time(zone="a)b", on=true)]<|python_end|>', [("time", '{"zone": "a)b", "on": true}')]),
    ("pythonic", "<|python_start|>[time()]<|python_end|> Done.", ["Done.", ("time", "{}")]),
    ("pythonic", "[1, 2, 3]", ["[1, 2, 3]"]),
    ("pythonic", "[exit()]", ["[exit()]"]),
    ("pythonic", "[time(1)]", ["[time(1)]"]),
    ("pythonic", "[time(x=1e999)]", ["[time(x=1e999)]"]),
    ("pythonic", "[time(), exit()]", [", exit()]", ("time", "{}")]),
    ("pythonic", "[time(x=1])]", ["[time(x=1])]"]),
    ("pythonic", "[weather(city='Rome', days=[1, 2", [("weather", '{"city": "Rome"')]),
    ("pythonic", "[weather(city='Ro", [("weather", "")]),
    ("pythonic", "[time(), weather(", [("time", "{}"), ("weather", "")]),
    ("pythonic", "[time(), wea", [("time", "{}")]),
    ("pythonic", "[time(1, zone=2", ["[time(1, zone=2"]),
    ("pythonic", "[wea", ["[wea"]),
    ("pythonic", "No call.", ["No call."]),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_are_found_in_what_a_family_writes(name: str, text: str, expected: Expected) -> None:
    assert said(of(name), [text]) == expected
    assert said(of(name), list(text)) == expected


MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "<think>", "</think>"]
SIGNS = ["[", "]", "{", "}", ", ", ": ", ";", " ", "\n", '"', "\\", "(", ")", "=", "<"]
FRAGMENTS = st.sampled_from([*MARKERS, *SIGNS, CALL, TIME, '"name"', '"weather"', "weather", "1", "x", "time()"])


@given(
    name=st.sampled_from(sorted(TOOL_FAMILIES)),
    reasoning=st.sampled_from([None, *REASONING_FAMILIES.values()]),
    begun=st.booleans(),
    fragments=st.lists(FRAGMENTS, max_size=12),
    borders=st.lists(st.integers(0, 400), max_size=12),
)
@example("mistral", None, False, ["[TOOL_CALLS]", "weather", " ", "{"], [13])
def test_however_a_text_is_split_it_has_the_same_parts(
    name: str, reasoning: object, begun: bool, fragments: list[str], borders: list[int]
) -> None:
    text = "".join(fragments)
    reading = Reading(reasoning, begun, TOOL_FAMILIES[name], NAMES)  # type: ignore[arg-type, index]
    marks = sorted({0, len(text), *(border for border in borders if border < len(text))})
    whole, pieces = read(reading, [text]), read(reading, [text[begin:end] for begin, end in itertools.pairwise(marks)])

    def without_ids(parts: list[Part]) -> list[object]:
        return [getattr(part, "name", part) for part in parts]

    assert without_ids(pieces) == without_ids(whole) == without_ids(read(reading, list(text)))


@given(
    name=st.sampled_from(sorted(TOOL_FAMILIES)),
    fragments=st.lists(FRAGMENTS, max_size=12),
)
@example(name="llama3", fragments=[" ", "[", "<tool_call>"])
def test_a_text_without_calls_comes_out_as_it_is(name: str, fragments: list[str]) -> None:
    text = "".join(fragments)
    parts = read(of(name), [text])
    if not any(isinstance(part, CallBegun) for part in parts):
        assert "".join(part.text for part in parts if isinstance(part, Content)) == text


WORDS = st.text(st.characters(categories=("Lu", "Ll", "Nd"), include_characters=" \"'\\/\n{}[](),;:<"), max_size=9)
VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**6), 10**6), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=6,
)
WRITTEN_CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.sampled_from(["city", "days", "zone"]), VALUE, max_size=3)), min_size=1, max_size=3
)


def written(family: str, calls: list[tuple[str, dict[str, object]]]) -> str:
    if family == "pythonic":
        keywords = [", ".join(f"{key}={value!r}" for key, value in values.items()) for _, values in calls]
        return f"[{', '.join(f'{name}({within})' for (name, _), within in zip(calls, keywords, strict=True))}]"
    field = "parameters" if family == "llama3" else "arguments"
    objects = [json.dumps({"name": name, field: values}) for name, values in calls]
    if family == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    return f"[TOOL_CALLS][{', '.join(objects)}]" if family == "mistral" else "; ".join(objects)


@given(
    family=st.sampled_from(sorted(TOOL_FAMILIES)),
    calls=WRITTEN_CALLS,
    cut=st.floats(0, 1),
    borders=st.lists(st.integers(0, 400), max_size=6),
)
def test_of_a_text_that_is_cut_off_the_calls_are_the_beginning_of_those_that_are_written(
    family: str, calls: list[tuple[str, dict[str, object]]], cut: float, borders: list[int]
) -> None:
    def found(pieces: list[str]) -> tuple[list[tuple[str, str]], str]:
        parts = read(of(family), pieces)
        names = [part.name for part in parts if isinstance(part, CallBegun)]
        arguments = ["".join(p.text for p in parts if isinstance(p, CallArguments) and p.number == n) for n in range(len(names))]
        return list(zip(names, arguments, strict=True)), "".join(part.text for part in parts if isinstance(part, Content))

    text = written(family, calls)
    whole, no_text = found([text])
    assert [(name, json.loads(arguments)) for name, arguments in whole] == calls and not no_text
    begun = text[: round(cut * len(text))]
    marks = sorted({0, len(begun), *(border for border in borders if border < len(begun))})
    told, rest = found([begun])
    assert (told, rest) == found([begun[start:end] for start, end in itertools.pairwise(marks)]) == found(list(begun))
    assert [name for name, _ in told] == [name for name, _ in whole[: len(told)]]
    assert all(full.startswith(arguments) for (_, arguments), (_, full) in zip(told, whole, strict=False))
    assert told[:-1] == whole[: len(told[:-1])], "only the last one is not whole"
    # What has come of a call before its name is known is text, in the place where it is.
    assert begun.endswith(rest) and (len(rest) < 40 or not told)
    assert not (told and rest) or family in ("hermes", "llama3")


def test_arguments_come_as_the_model_writes_them() -> None:
    reader = of("hermes").new_reader()
    parts = [part for character in f"<tool_call>{CALL}" for part in reader.push(character)]
    assert len(parts) == 1 + len(ARGUMENTS)


@pytest.mark.parametrize(
    ("begun", "text", "reasoning", "answer"),
    [
        (False, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (True, "\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (False, "Yes.", "", "Yes."),
        (False, " <think></think>Yes.", "", "Yes."),
        (True, "Hm, and", "Hm, and", ""),
        (False, "<thin", "", "<thin"),
    ],
)
def test_reasoning_is_told_from_the_answer(begun: bool, text: str, reasoning: str, answer: str) -> None:
    for pieces in ([text], list(text)):
        parts = read(Reading(REASONING_FAMILIES["think"], begun), pieces)
        assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == reasoning
        assert "".join(part.text for part in parts if isinstance(part, Content)) == answer


def test_a_call_within_reasoning_is_none() -> None:
    reading = Reading(REASONING_FAMILIES["think"], True, TOOL_FAMILIES["hermes"], NAMES)
    text = f"<tool_call>{TIME}</tool_call></think>\n<tool_call>{CALL}</tool_call>"
    assert said(reading, list(text)) == [("weather", ARGUMENTS)]
