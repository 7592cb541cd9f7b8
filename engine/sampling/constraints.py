"""Which tokens may come next, for the rows of a batch of which not all may: as grammars, `allowed_token_ids`, `bad_words` and `min_tokens`
say.

What a row may get depends on its parameters and its output alone. How far a grammar has been followed is kept for as long as the row lives,
and made anew from the output where it is not: an attempt that is scheduled anew goes on as it would have.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par

from engine.batch import SamplingRow
from engine.sampling.grammars import Grammars, error_of
from springtide.errors import SpringtideError
from springtide.protocol.outputs import Failure, FailureCode
from springtide.protocol.sampling import SamplingParams

COMPILED_WITHIN_S = 5.0
"""A grammar has been compiled when a row of it is sampled: its node does so before it lets the attempt into a step. A further stage, which
compiles at the same time as the others compute, may have to wait."""
MAX_FOLLOWED = 256
"""So many outputs are followed beyond those of a step, those that were sampled last. What a matcher has built up may take megabytes; to
follow an output anew takes some 11 us a token."""
TokenMask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the rows of a batch may get, by their index; who is in neither may get any token."""

    masks: Mapping[int, TokenMask]
    """[vocab]: True for the tokens that may come next, of which there is one at least."""
    refused: Mapping[int, Failure]
    """Why a row cannot go on. INVALID, unless another try may come further."""


@dataclass(slots=True)
class _Followed:
    """An output that follows a grammar."""

    row: weakref.ref[SamplingRow]
    matcher: LLMatcher
    num_tokens: int = 0
    """How many of the output it has taken in."""

    def catch_up(self, output_ids: Sequence[int]) -> bool:
        """Takes in what the output has more; whether that follows the grammar. After its end an output may take part in one step more, of
        which nothing is used."""
        new = output_ids[self.num_tokens :]
        self.num_tokens += len(new)
        if not new or self.matcher.is_stopped():
            return not self.matcher.is_error()
        return self.matcher.consume_tokens(list(new))


def _invalid(message: str) -> Failure:
    return Failure(FailureCode.INVALID, message)


class Constraints:
    """How far outputs have followed their grammars: of each for as long as its row lives, whether or not it takes part in every step.
    For one thread; rows may be let go on another."""

    def __init__(self, vocab_size: int, eos_token_ids: Collection[int], grammars: Grammars) -> None:
        self._vocab_size = vocab_size
        self._eos = np.fromiter(eos_token_ids, np.int64)
        self._grammars = grammars
        self._followed: OrderedDict[int, _Followed] = OrderedDict()
        """By the identity of the row, what was sampled last at the end. A row that is let go takes its entry with it, before another can
        have its identity."""
        self._executor: LLExecutor | None = None

    def allowed(self, rows: Sequence[SamplingRow]) -> Allowed:
        """What each of the rows may get next."""
        refused: dict[int, Failure] = {}
        masks = self._by_grammar(rows, refused)
        for index, row in enumerate(rows):
            if not _has_filters(row.params) or index in refused:
                continue
            by_grammar = masks.get(index)
            mask = self._filtered(row, by_grammar)
            if mask.any():
                masks[index] = mask
            elif by_grammar is None or not (ends := self._only_ends(by_grammar)).any():
                refused[index] = _invalid("allowed_token_ids and bad_words leave no token that may come next")
            else:
                # The grammar lets the output end, and nothing else is left: it ends.
                masks[index] = ends
        return Allowed(masks, refused)

    def _by_grammar(self, rows: Sequence[SamplingRow], refused: dict[int, Failure]) -> dict[int, TokenMask]:
        following: list[tuple[int, LLMatcher]] = []
        for index, row in enumerate(rows):
            if not row.params.grammar:
                continue
            try:
                followed = self._follow(row)
            except SpringtideError as error:
                refused[index] = _invalid(str(error))
                continue
            except TimeoutError:
                # It goes on being compiled, and may be by the next time.
                refused[index] = Failure(FailureCode.INTERNAL, f"its grammar is not compiled yet after {COMPILED_WITHIN_S:g} s")
                continue
            if followed.catch_up(row.output_ids):
                following.append((index, followed.matcher))
            else:
                refused[index] = _invalid(f"the output does not follow its grammar: {error_of(followed.matcher)}")
        while len(self._followed) > MAX_FOLLOWED + len(rows):
            self._followed.popitem(last=False)
        if not following:
            return {}
        bits = allocate_token_bitmask(len(following), self._vocab_size)
        if len(following) == 1:
            fill_next_token_bitmask(following[0][1], bits)
        else:
            if self._executor is None:
                self._executor = LLExecutor(len(os.sched_getaffinity(0)))
            fill_next_token_bitmask_par(self._executor, [(matcher, place) for place, (_, matcher) in enumerate(following)], bits)
        unpacked = np.unpackbits(bits.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little").view(np.bool_)
        masks: dict[int, TokenMask] = {}
        for place, (index, matcher) in enumerate(following):
            if matcher.is_error():
                refused[index] = _invalid(f"the output cannot follow its grammar any further: {error_of(matcher)}")
            else:
                masks[index] = unpacked[place]
        return masks

    def _follow(self, row: SamplingRow) -> _Followed:
        """Raises as `Grammars.matcher` does."""
        key, all_followed = id(row), self._followed
        followed = all_followed.get(key)
        if followed is None:
            matcher = self._grammars.matcher(row.params.grammar, COMPILED_WITHIN_S)
            followed = all_followed[key] = _Followed(weakref.ref(row, lambda _: all_followed.pop(key, None)), matcher)
        all_followed.move_to_end(key)
        return followed

    def _filtered(self, row: SamplingRow, by_grammar: TokenMask | None) -> TokenMask:
        """What of the grammar's mask the row's other parameters leave. Of a grammar's end `min_tokens` takes nothing away."""
        params = row.params
        mask = np.ones(self._vocab_size, np.bool_) if by_grammar is None else by_grammar.copy()
        if params.allowed_token_ids:
            among = np.zeros(self._vocab_size, np.bool_)
            among[params.allowed_token_ids.column()] = True
            mask &= among
        for words in params.bad_words:
            *before, last = words.column().tolist()
            if not before or list(row.output_ids[-len(before) :]) == before:
                mask[last] = False
        if len(row.output_ids) < params.min_tokens:
            longer = mask.copy()
            longer[self._eos] = False
            longer[list(params.stop_token_ids)] = False
            if by_grammar is None or longer.any():
                return longer
        return mask

    def _only_ends(self, mask: TokenMask) -> TokenMask:
        """Of the tokens that may come next, those that end the output."""
        ends = np.zeros_like(mask)
        ends[self._eos] = mask[self._eos]
        return ends


def _has_filters(params: SamplingParams) -> bool:
    return bool(params.allowed_token_ids or params.bad_words or params.min_tokens)
