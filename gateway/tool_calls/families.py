"""The families of models, by how they write calls of tools and reasoning: what reads them, and which one a chat template is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gateway.api_request import Tool
from gateway.tool_calls import beside_text, forced
from gateway.tool_calls.base import Calls, PartReader
from gateway.tool_calls.readers import BareReader, MarkedReader, PythonicReader
from gateway.tool_calls.reasoning import ReasoningMarkers
from springtide.choices import ReasoningParserName, ToolParserName


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """How a family of models writes calls."""

    reader: Callable[[Calls], PartReader]
    markers: tuple[str, ...]
    """Texts that may be special tokens, which have to be read all the same."""
    grammar: Callable[[Sequence[Tool], bool, forced.Literal, forced.Schema], str]
    """Of an output that is calls: one, or several."""
    beside_text: Callable[[Sequence[Tool], bool, forced.Literal, forced.Schema, str], str]
    """Of an output that may be text or calls, of which those of strict tools fit these. The text does not begin with the last argument,
    with which reasoning does."""
    id_length: int = 0
    """Of a call's id, where templates want one of so many letters."""

    def new_reader(self, tools: Sequence[str]) -> PartReader:
        """For one output; `tools` are the names of those there are."""
        return self.reader(Calls(tools, self.id_length))


_PYTHON_TAGS = ("<|python_start|>", "<|python_end|>")
TOOL_FAMILIES: Mapping[ToolParserName, ToolFamily] = {
    "hermes": ToolFamily(
        lambda calls: MarkedReader(calls, "<tool_call>", "</tool_call>"),
        ("<tool_call>", "</tool_call>"),
        forced.hermes,
        beside_text.hermes,
    ),
    "llama3": ToolFamily(lambda calls: BareReader(calls, ("<|python_tag|>",)), ("<|python_tag|>",), forced.llama3, beside_text.llama3),
    "mistral": ToolFamily(
        lambda calls: MarkedReader(calls, "[TOOL_CALLS]"),
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        forced.mistral,
        beside_text.mistral,
        id_length=9,
    ),
    "pythonic": ToolFamily(lambda calls: PythonicReader(calls, *_PYTHON_TAGS), _PYTHON_TAGS, forced.pythonic, beside_text.pythonic),
}
REASONING_FAMILIES: Mapping[ReasoningParserName, ReasoningMarkers] = {
    "think": ReasoningMarkers("<think>", "</think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
}


def tool_parser_of(template: str, knows_tools: bool) -> ToolParserName:
    """The family that a template is of. One that knows no tools is told of them in Hermes' form."""
    if not knows_tools or "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters"' in template:
        return "llama3"
    if "<|python_start|>" in template or "func_name1(" in template:
        return "pythonic"
    return "hermes"


def reasoning_parser_of(template: str) -> ReasoningParserName | None:
    """The family that a template is of; None: it says nothing of reasoning."""
    return next((name for name, markers in REASONING_FAMILIES.items() if markers.end in template), None)
