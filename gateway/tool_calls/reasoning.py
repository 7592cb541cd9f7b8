"""What a model says to itself before its answer, between two markers."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.output import Part, Reasoning
from gateway.tool_calls.base import beginning_at_the_end, content

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """What a family of models puts around its reasoning."""

    begin: str
    end: str


class ReasoningReader:
    """Tells the reasoning at an output's beginning from the rest, which comes as content. The space around either belongs to none."""

    def __init__(self, markers: ReasoningMarkers, begun: bool) -> None:
        """`begun`: the prompt ends with the marker that begins it."""
        self._markers = markers
        self._text = ""
        self._state = "reasoning" if begun else "beginning"
        self._said = False
        """Something of the reasoning has been given out."""

    def push(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        if self._state == "beginning":
            self._look_for_the_beginning()
        if self._state == "reasoning":
            parts += self._reasoned()
        if self._state == "after":
            self._text = self._text.lstrip(_SPACE)
            if self._text:
                self._state = "content"
        if self._state == "content":
            parts += content(self._text)
            self._text = ""
        return parts

    def finish(self) -> list[Part]:
        text, self._text = self._text, ""
        if self._state == "after":
            return []
        return self._reasoning(text.rstrip(_SPACE)) if self._state == "reasoning" else content(text)

    def _look_for_the_beginning(self) -> None:
        text = self._text.lstrip(_SPACE)
        if text.startswith(self._markers.begin):
            self._state, self._text = "reasoning", text.removeprefix(self._markers.begin)
        elif not self._markers.begin.startswith(text):
            self._state = "content"

    def _reasoned(self) -> list[Part]:
        at = self._text.find(self._markers.end)
        if at < 0:
            certain = self._text[: len(self._text) - beginning_at_the_end(self._text, self._markers.end)].rstrip(_SPACE)
            self._text = self._text[len(certain) :]
            return self._reasoning(certain)
        thought, self._text = self._text[:at].rstrip(_SPACE), self._text[at + len(self._markers.end) :]
        self._state = "after"
        return self._reasoning(thought)

    def _reasoning(self, text: str) -> list[Part]:
        if not self._said:
            text = text.lstrip(_SPACE)
        if not text:
            return []
        self._said = True
        return [Reasoning(text)]
