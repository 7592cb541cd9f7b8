"""What an answer is made of, whichever API it is written for. A façade writes each `Delta` of an answer in its own words."""

from __future__ import annotations

from dataclasses import dataclass

from springtide.protocol.outputs import Finish, SampledToken


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
