"""What an answer is made of, whichever API it is written for. A façade writes each `Delta` of an answer in its own words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from springtide.protocol.outputs import Finish, PromptLogprobs, SampledToken, TokenLogprob
from springtide.protocol.usage import Usage


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """An output token and its place in the text."""

    token: SampledToken
    offset: int
    """Where its text begins, in characters from the start of the output."""


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """What an answer tells of a prompt."""

    token_ids: Sequence[int]
    text: str = ""
    """With which the answer is to begin; empty where it is not."""
    offsets: Sequence[int] = ()
    """Where each token's text begins in it, in characters; empty where the answer does not begin with it."""
    logprobs: PromptLogprobs | None = None
    """Of its tokens after the first, where they are wanted."""

    def scored(self, num_top: int) -> Iterator[tuple[int, SampledToken]]:
        """Each token's rank (PromptLogprobs) and, of a prompt with log-probabilities, these, with those of the `num_top` likeliest at most.
        The first token has none."""
        assert self.logprobs is not None, "they are asked for before they are read"
        own, ranks, top_ids, tops = self.logprobs.columns()
        yield 0, SampledToken(self.token_ids[0])
        for row, token_id in enumerate(self.token_ids[1:]):
            top = map(TokenLogprob, top_ids[row, :num_top].tolist(), tops[row, :num_top].tolist())
            yield int(ranks[row]), SampledToken(token_id, float(own[row]), tuple(top))

    def placed(self, num_top: int) -> Iterator[PlacedToken]:
        """The same tokens in a text that begins with the prompt."""
        return (PlacedToken(token, offset) for offset, (_, token) in zip(self.offsets, self.scored(num_top), strict=True))


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
    prompt: PromptOutput | None = None
    """The choice's, where anything is to be told of it: alone, before all else of the choice."""

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
    prompt: PromptOutput | None = None
    """Where anything is to be told of it."""

    @property
    def text(self) -> str:
        """Of the contents alone."""
        return "".join(part.text for part in self.parts if isinstance(part, Content))

    @property
    def mean_logprob(self) -> float:
        """Of its tokens, where these have log-probabilities. Nothing is never the likeliest output."""
        if not self.tokens:
            return -math.inf
        return sum(placed.token.logprob or 0.0 for placed in self.tokens) / len(self.tokens)

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

    def likeliest(self, n: int, best_of: int) -> Answer:
        """The same with the `n` choices of each prompt whose tokens are the likeliest in the mean, of the `best_of` that it has."""
        kept: list[Choice] = []
        for begin in range(0, len(self.choices), best_of):
            ranked = sorted(self.choices[begin : begin + best_of], key=lambda choice: choice.mean_logprob, reverse=True)
            kept += [replace(choice, index=len(kept) + number) for number, choice in enumerate(ranked[:n])]
        return replace(self, choices=tuple(kept))


@dataclass(slots=True)
class _Gathered:
    parts: list[Part] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Of the last of `parts`, in pieces."""
    tokens: list[PlacedToken] = field(default_factory=list)
    ending: Ending | None = None
    prompt: PromptOutput | None = None

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
        return Choice(index, tuple(self.parts), tuple(self.tokens), self.ending, self.prompt)


def gathered(deltas: Iterable[Delta], usage: Usage) -> Answer:
    """The answer that came as these deltas, all of them."""
    choices: dict[int, _Gathered] = {}
    for delta in deltas:
        choice = choices.setdefault(delta.index, _Gathered())
        for part in delta.parts:
            choice.add(part)
        choice.tokens += delta.tokens
        choice.ending = delta.ending or choice.ending
        choice.prompt = delta.prompt or choice.prompt
    return Answer(tuple(choice.choice(index) for index, choice in sorted(choices.items())), usage)
