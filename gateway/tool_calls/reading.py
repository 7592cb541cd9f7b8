"""How the outputs of one request are read: their reasoning first, then answer and calls."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.output import CallArguments, CallBegun, Content, Part, Reasoning
from gateway.tool_calls.base import PartReader, content
from gateway.tool_calls.families import ToolFamily
from gateway.tool_calls.reasoning import ReasoningMarkers, ReasoningReader


@dataclass(frozen=True, slots=True)
class Reading:
    """How the outputs of one request are read."""

    reasoning: ReasoningMarkers | None = None
    reasoning_begun: bool = False
    """By the end of the prompt."""
    tools: ToolFamily | None = None
    tool_names: tuple[str, ...] = ()
    parallel: bool = True
    """More than one call is an answer's; else the first one is."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that are looked for, and may be special tokens."""
        reasoning = () if self.reasoning is None else (self.reasoning.begin, self.reasoning.end)
        return (*reasoning, *(() if self.tools is None else self.tools.markers))

    def new_reader(self) -> PartReader:
        """For one output."""
        tools = None if self.tools is None else self.tools.new_reader(self.tool_names)
        if tools is not None and not self.parallel:
            tools = _FirstCallReader(tools)
        reasoning = None if self.reasoning is None else ReasoningReader(self.reasoning, self.reasoning_begun)
        if reasoning is None:
            return _PlainReader() if tools is None else tools
        return reasoning if tools is None else _BothReader(reasoning, tools)


PLAIN = Reading()
"""All of an output is its answer."""


class _PlainReader:
    def push(self, text: str) -> list[Part]:
        return content(text)

    def finish(self) -> list[Part]:
        return []


class _FirstCallReader:
    """Leaves out the calls after the first."""

    def __init__(self, tools: PartReader) -> None:
        self._tools = tools

    def push(self, text: str) -> list[Part]:
        return self._first(self._tools.push(text))

    def finish(self) -> list[Part]:
        return self._first(self._tools.finish())

    @staticmethod
    def _first(parts: list[Part]) -> list[Part]:
        return [part for part in parts if not (isinstance(part, (CallBegun, CallArguments)) and part.number > 0)]


class _BothReader:
    """What is not reasoning may be calls."""

    def __init__(self, reasoning: ReasoningReader, tools: PartReader) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> list[Part]:
        return self._read(self._reasoning.push(text))

    def finish(self) -> list[Part]:
        return [*self._read(self._reasoning.finish()), *self._tools.finish()]

    def _read(self, parts: list[Part]) -> list[Part]:
        read: list[Part] = []
        for part in parts:
            match part:
                case Reasoning():
                    read.append(part)
                case Content(text):
                    read += self._tools.push(text)
        return read
