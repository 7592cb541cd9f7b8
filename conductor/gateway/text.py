"""From output tokens to text: detokenised as they come, cut at the first stop string, held back while one may be in the making."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.detokenizer import StreamingDetokenizer
from springtide.sampling import SampledToken


@dataclass(frozen=True, slots=True)
class PlacedToken:
    token: SampledToken
    offset: int
    """Where its text begins, in characters from the start of the output."""


@dataclass(frozen=True, slots=True)
class Piece:
    """More of the output. Its tokens are those whose text is out in full, with this piece or before."""

    text: str
    tokens: tuple[PlacedToken, ...]
    stopped: bool = False
    """A stop string ended the text, which does not contain it."""


class TextAssembler:
    def __init__(self, detokenizer: StreamingDetokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
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
            self._held += self._detokenizer.push(token.token_id)
            self._pending.append((token, begin, self._released + len(self._held)))
            if (found := self._find_stop()) is not None:
                return self._cut(found)
        if self._stopped:
            return Piece("", (), stopped=True)
        return self._release(len(self._held) - partial_stop(self._held, self._stop))

    def finish(self) -> Piece:
        """The rest, when the output has ended by itself."""
        if self._stopped:
            return Piece("", (), stopped=True)
        self._held += self._detokenizer.finish()
        if (found := self._find_stop()) is not None:
            return self._cut(found)
        return self._release(len(self._held), everything=True)

    def _find_stop(self) -> int | None:
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
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


def partial_stop(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of `text` that is the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(text), len(stop) - 1), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
