"""Guesses of what comes next in a sequence: what followed the last time that it had its last tokens (prompt lookup decoding); and how many
of them pay.

What is done for a step does not grow with the context: what a sequence had before its first guess is looked through bit by bit, the latest
first. What is kept of a sequence is bounded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np

from springtide.cost import DecodeCost

GRAM = 2
"""So many of its last tokens a sequence must have had before."""
MOST_OF_PROMPT = 1 << 17
"""Of a longer prompt, so many tokens at its end are looked through."""
_AT_ONCE = 1 << 13
"""So many older tokens are taken in for a step: half a millisecond."""
_MOST_PLACES = 1 << 18
_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
_WORD = (1 << 64) - 1
_FEW = 32
"""New tokens that are taken in one by one sooner than together."""
MOST_DRAFTED, MOST_FORETOLD = 8, 16
_LATER = 2
_GAIN = 0.3
_FIRST_RATE, _LEAST_RATE, _MOST_RATE = 0.5, 0.005, 0.98
_STEPS_TO_PROBE = 32
_MOST_UNFOUND, _STEPS_TO_LOOK = 4, 4
_LEAST_PRICE = 0.01
"""Of a step's time: a guess is never free, whatever was fitted or measured. It is above _LEAST_RATE, so that who is never right
comes to guess nothing."""
_WINDOW, _ENOUGH = 16, 4
_STEPS_TO_COMPARE, _STEPS_TO_RETRY = 32, 256


class PromptLookup:
    """Where each run of GRAM tokens was last, by its hash: of two with the same hash the later one is kept. The lists are the sequence's
    own, the output grows between calls."""

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int], max_tokens: int) -> None:
        self._prompt_ids, self._output_ids = prompt_ids, output_ids
        self._least = max(GRAM, len(prompt_ids) - MOST_OF_PROMPT)
        """Those that end before this place are too far back in the prompt."""
        self._first = self._indexed = max(self._least, len(prompt_ids) + len(output_ids))
        """All that end from the first of these places on, and before the second, are in `_places`."""
        wanted = 2 * (min(len(prompt_ids), MOST_OF_PROMPT) + max_tokens)
        self._bits = (min(wanted, _MOST_PLACES) - 1).bit_length()
        self._places: np.ndarray[tuple[int], np.dtype[np.int32]] | None = None
        """By hash, the place of the token after the run. 0: there was none."""
        self._back = 0
        """How far back the last guesses were from. 0: there were none."""

    def draft(self, most: int) -> list[int]:
        """At most so many tokens, one at least where the last GRAM tokens have been there before. What followed them may reach up to here:
        then it is taken to go on repeating."""
        end = len(self._prompt_ids) + len(self._output_ids)
        if most < 1 or end <= GRAM:
            return []
        self._index(end)
        assert self._places is not None
        last = self._between(end - GRAM, end)
        # As long as it goes on where it was, that is more likely than where it was like this last.
        back = self._back
        if not back or self._between(end - back - GRAM, end - back) != last:
            place = int(self._places[self._hash(*last)])
            if not place or self._between(place - GRAM, place) != last:
                return []
            back = end - place
        self._back = back
        draft = self._between(end - back, min(end - back + most, end))
        while len(draft) < most:
            draft.append(draft[-back])
        return draft

    def _index(self, end: int) -> None:
        """Takes in all new runs that end before the last token, and some of the older ones."""
        if self._places is None:
            self._places = np.zeros(1 << self._bits, np.int32)
        begin, self._indexed = self._indexed, max(self._indexed, end)
        if end - begin <= _FEW:
            tokens = self._between(begin - GRAM, end - 1)
            for i, place in enumerate(range(begin, end)):
                self._places[self._hash(*tokens[i : i + GRAM])] = place
        else:
            self._places[self._hashes(begin, end)] = np.arange(begin, end, dtype=np.int32)
        end, self._first = self._first, max(self._least, self._first - _AT_ONCE)
        if self._first < end:
            # What came later stays: zeros alone are replaced.
            hashes = self._hashes(self._first, end)
            free = self._places[hashes] == 0
            self._places[hashes[free]] = np.arange(self._first, end, dtype=np.int32)[free]

    def _hashes(self, begin: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Of the runs that end before these places. Where an index comes twice in an assignment, the later value stays."""
        words, count = np.asarray(self._between(begin - GRAM, end - 1), np.uint64), end - begin
        hashes = np.zeros(count, np.uint64)
        for i, factor in enumerate(_FACTORS):
            hashes += words[i : i + count] * np.uint64(factor)
        return hashes >> np.uint64(64 - self._bits)

    def _hash(self, first: int, second: int) -> int:
        return ((first * _FACTORS[0] + second * _FACTORS[1]) & _WORD) >> (64 - self._bits)

    def _between(self, begin: int, end: int) -> list[int]:
        prompt = len(self._prompt_ids)
        return [*self._prompt_ids[begin : min(end, prompt)], *self._output_ids[max(begin - prompt, 0) : max(end - prompt, 0)]]


class Foretold:
    """What an output is bound to come to, for another node has come to it. The core adds to it while who runs the steps looks at it."""

    def __init__(self, most: int) -> None:
        """`most`: that a step computes."""
        self._most = most
        self._known: tuple[int, list[int]] = 0, []
        """The position of the first, and the tokens."""

    @property
    def end(self) -> int:
        """The position behind the last one."""
        begin, tokens = self._known
        return begin + len(tokens)

    def expected(self, position: int) -> int:
        """How many a step may find from this position on, that is launched now: between that and its begin some may be added."""
        return max(0, min(self.end + _LATER - position, self._most)) if position >= self._known[0] else 0

    def add(self, position: int, token_ids: Sequence[int]) -> None:
        """Where some between are not known, those before them are of no more use."""
        begin, tokens = self._known
        if begin <= position <= self.end:
            tokens += token_ids[self.end - position :]
        else:
            self._known = position, list(token_ids)

    def draft(self, position: int, most: int) -> list[int]:
        """At most so many from this position on."""
        begin, tokens = self._known
        return tokens[position - begin : position - begin + most] if position >= begin else []


class Guessing:
    """How often guesses of one sequence were right lately, and so how many of them pay."""

    __slots__ = ("_rate", "_unfound", "_without")

    def __init__(self) -> None:
        self._rate = _FIRST_RATE
        """Of the guesses that were reached: a wrong one ends its draft."""
        self._unfound = 0
        """Steps in a row for which there was nothing to guess by."""
        self._without = 0
        """Steps for which nothing was to be guessed, since something was last."""

    def observe(self, drafted: int, accepted: int) -> None:
        """Of so many that were guessed for a step, so many were right."""
        if drafted:
            self._unfound = self._without = 0
            right = accepted / min(accepted + 1, drafted)
            self._rate = min(max(self._rate + _GAIN * (right - self._rate), _LEAST_RATE), _MOST_RATE)

    def unfound(self) -> None:
        """A step was to have some, but there was nothing to guess by."""
        self._unfound, self._without = self._unfound + 1, 0

    def length(self, most: int, price: float) -> int:
        """At most so many, as far as the last one is right more often than `price`, above 0, in tokens that one more row of the step would
        be. Where none is, or nothing was found lately to guess by, one now and then: the text may repeat itself from here on. To look for
        it costs nothing, but that others do not have the place."""
        if price >= 1:
            return 0
        wanted, found = min(most, int(math.log(price) / math.log(self._rate))), self._unfound < _MOST_UNFOUND
        if wanted and found:
            return wanted
        self._without += 1
        return int(self._without > (_STEPS_TO_LOOK if wanted else _STEPS_TO_PROBE))


class GuessPrice:
    """What each guess lengthens a step by, as steps with guesses lately took; before there are some, what one more sequence does."""

    def __init__(self) -> None:
        self._extras_ms: deque[float] = deque(maxlen=_WINDOW)
        self._with, self._without = 0, 0
        """Steps with guesses since the last one without any, and the other way round."""

    def observe(self, drafted: int, extra_ms: float) -> None:
        """A step with so many guesses has taken so much longer than was predicted of it without them."""
        self._extras_ms.append(extra_ms / drafted)
        self._with, self._without = self._with + 1, 0

    def unguessed(self) -> None:
        """A step had none. Where that goes on, they may be too dear: then they are tried once more, by what they cost at first."""
        self._with, self._without = 0, self._without + 1
        if self._without % _STEPS_TO_RETRY == 0:
            while len(self._extras_ms) >= _ENOUGH:
                self._extras_ms.popleft()

    @property
    def compares(self) -> bool:
        """Whether the next step is to have none: only such ones show what a step takes without them."""
        return self._with >= _STEPS_TO_COMPARE

    def row_ms(self, cost: DecodeCost, predicted_ms: float) -> float:
        """Of a step that is predicted to take so long without any."""
        row_ms = median(self._extras_ms) if len(self._extras_ms) >= _ENOUGH else cost.per_sequence_ms
        return max(row_ms, _LEAST_PRICE * predicted_ms)
