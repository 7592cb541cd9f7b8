"""What an answer is made of, whichever API it is written for. A façade writes each `Delta` of an answer in its own words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from springtide.protocol.outputs import Finish, SampledToken
from springtide.protocol.usage import Usage


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """An output token and its place in the text."""

    token: SampledToken
    offset: int
    """Where its text begins, in characters from the start of the output."""


@dataclass(frozen=True, slots=True)
class Content:
    """A further piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A further piece of what the model says to itself first."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a tool: its `number`-th call of this choice, from 0. Its arguments follow."""

    number: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further piece of a call's arguments, JSON text. All pieces of a call come before the next call begins."""

    number: int
    text: str


Part = Content | Reasoning | CallBegun | CallArguments


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ended."""

    finish: Finish
    called: bool = False
    """It has called tools."""
    stop: str | int | None = None
    """The stop string or stop token that ended it; None when the model's own end token did, or its length."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A further piece of choice `index`; the last one of a choice says how it ended."""

    index: int
    parts: tuple[Part, ...]
    tokens: tuple[PlacedToken, ...] = ()
    """Those whose text is out in full, with this piece or before: for log-probabilities."""
    ending: Ending | None = None

    @property
    def text(self) -> str:
        """Of the contents alone."""
        return "".join(part.text for part in self.parts if isinstance(part, Content))


@dataclass(frozen=True, slots=True)
class Choice:
    """One of an answer's outputs, whole. Neighbouring parts of one kind are one."""

    index: int
    parts: tuple[Part, ...]
    tokens: tuple[PlacedToken, ...]
    ending: Ending

    @property
    def text(self) -> str:
        """Of the contents alone."""
        return "".join(part.text for part in self.parts if isinstance(part, Content))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def calls(self) -> tuple[tuple[CallBegun, str], ...]:
        """The calls of tools, each with its arguments."""
        arguments = {part.number: part.text for part in self.parts if isinstance(part, CallArguments)}
        return tuple((part, arguments.get(part.number, "")) for part in self.parts if isinstance(part, CallBegun))


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    choices: tuple[Choice, ...]
    """By their index."""
    usage: Usage


@dataclass(slots=True)
class _Gathered:
    parts: list[Part] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Of the last of `parts`, in pieces."""
    tokens: list[PlacedToken] = field(default_factory=list)
    ending: Ending | None = None

    def add(self, part: Part) -> None:
        if isinstance(part, CallBegun):
            self._close()
            self.parts.append(part)
            return
        last = self.parts[-1] if self.parts else None
        if type(last) is not type(part) or (
            isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.number != last.number
        ):
            self._close()
            self.parts.append(part)
        self.texts.append(part.text)

    def _close(self) -> None:
        text = "".join(self.texts)
        self.texts.clear()
        match self.parts[-1:]:
            case [Content()]:
                self.parts[-1] = Content(text)
            case [Reasoning()]:
                self.parts[-1] = Reasoning(text)
            case [CallArguments(number)]:
                self.parts[-1] = CallArguments(number, text)

    def choice(self, index: int) -> Choice:
        self._close()
        assert self.ending is not None, f"choice {index} has no end"
        return Choice(index, tuple(self.parts), tuple(self.tokens), self.ending)


def gathered(deltas: Iterable[Delta], usage: Usage) -> Answer:
    """The answer that came as these deltas, all of them."""
    choices: dict[int, _Gathered] = {}
    for delta in deltas:
        choice = choices.setdefault(delta.index, _Gathered())
        for part in delta.parts:
            choice.add(part)
        choice.tokens += delta.tokens
        choice.ending = delta.ending or choice.ending
    return Answer(tuple(choice.choice(index) for index, choice in sorted(choices.items())), usage)
