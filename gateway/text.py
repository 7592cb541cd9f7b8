"""From output tokens to text: detokenised as they come, cut at the first stop string, held back while one may be in the making."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.tokenizer.detokenizer import StreamingDetokenizer
from springtide.protocol.outputs import SampledToken


@dataclass(frozen=True, slots=True)
class PlacedToken:
    token: SampledToken
    offset: int
    """Where its text begins, in characters from the start of the output."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A further piece of the output. Its tokens are those whose text is out in full, with this piece or before."""

    text: str
    tokens: tuple[PlacedToken, ...]
    stopped: bool = False
    """A stop string ended the text, which does not contain it."""


class StopStrings:
    """Made once for a request, as its choices look for the same ones."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        self._borders = [_borders(text) for text in self.texts]

    def advance(self, begun: list[int], text: str) -> None:
        """`begun` has for each stop string how much of its beginning is the end of what has come so far; now `text` has come too, and none
        has come in full. Takes time in proportion to `text` alone (Knuth, Morris and Pratt)."""
        for index, (stop, borders) in enumerate(zip(self.texts, self._borders, strict=True)):
            length = begun[index]
            for character in text:
                while length and stop[length] != character:
                    length = borders[length - 1]
                length += stop[length] == character
            begun[index] = length


def _borders(text: str) -> list[int]:
    """For each beginning of `text` the length of its longest proper end that is a beginning too."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[length] != text[index]:
            length = borders[length - 1]
        length += text[length] == text[index]
        borders[index] = length
    return borders


class TextAssembler:
    def __init__(self, detokenizer: StreamingDetokenizer, stop: StopStrings) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._begun = [0] * len(stop.texts)
        self._released = 0
        self._held = ""
        self._pending: deque[tuple[SampledToken, int, int]] = deque()
        """Tokens not yet given out, with the begin and end of their text."""
        self._stopped = False
        self.num_tokens = 0
        """Taken in, up to the one that completed a stop string."""

    def push(self, tokens: Iterable[SampledToken]) -> Piece:
        for token in tokens:
            if self._stopped:
                break
            self.num_tokens += 1
            begin = self._released + len(self._held)
            text = self._detokenizer.push(token.token_id)
            self._held += text
            self._pending.append((token, begin, self._released + len(self._held)))
            if (found := self._find_stop()) is not None:
                return self._cut(found)
            self._stop.advance(self._begun, text)
        if self._stopped:
            return Piece("", (), stopped=True)
        return self._release(len(self._held) - max(self._begun, default=0))

    def finish(self) -> Piece:
        """The rest, when the output has ended by itself."""
        if self._stopped:
            return Piece("", (), stopped=True)
        self._held += self._detokenizer.finish()
        if (found := self._find_stop()) is not None:
            return self._cut(found)
        return self._release(len(self._held), everything=True)

    def _find_stop(self) -> int | None:
        found = [at for stop in self._stop.texts if (at := self._held.find(stop)) >= 0]
        return min(found, default=None)

    def _cut(self, at: int) -> Piece:
        self._stopped = True
        end = self._released + at
        tokens = tuple(PlacedToken(token, begin) for token, begin, _ in self._pending if begin < end)
        text, self._held = self._held[:at], ""
        self._pending.clear()
        return Piece(text, tokens, stopped=True)

    def _release(self, length: int, everything: bool = False) -> Piece:
        text, self._held = self._held[:length], self._held[length:]
        self._released += length
        tokens = []
        while self._pending and (everything or self._pending[0][2] <= self._released):
            token, begin, _ = self._pending.popleft()
            tokens.append(PlacedToken(token, begin))
        return Piece(text, tuple(tokens))
