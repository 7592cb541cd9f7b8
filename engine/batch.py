"""The engine's interface to its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from springtide.protocol.sampling import SamplingParams

Int32Array = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """A sequence's share of a batch: compute `token_ids` at positions `start`, `start + 1`, …, writing their K and V into `slots` (slot i
    holds positions [i * block_tokens, (i + 1) * block_tokens)) and attending to everything before in them. A batch has one chunk of a
    sequence at most."""

    token_ids: Sequence[int]
    start: int
    slots: Sequence[int] | Int32Array
    wants_logits: bool = True
    """Of the last token."""
    wants_all: bool = False
    """Of every token, by `ModelRunner.logits_between`."""
    drafted: int = 0
    """So many of its last tokens are guesses: logits of each are wanted, too, after those of the token before them."""

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("a SequenceChunk needs at least one token")

    @property
    def num_wanted(self) -> int:
        """Of how many of its tokens, the last ones, logits are wanted."""
        return len(self.token_ids) if self.wants_all else self.wants_logits * (1 + self.drafted)

    def wanted(self) -> SequenceChunk:
        """Those tokens alone, of which there are some."""
        if self.wants_all:
            return self
        count = self.num_wanted
        return replace(self, token_ids=self.token_ids[-count:], start=self.start + len(self.token_ids) - count)


class LayerHooks(Protocol):
    """Called around each layer of a forward pass, in order, on the thread that runs it."""

    def before(self, layer: int) -> None: ...

    def after(self, layer: int) -> None: ...


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SamplingRow:
    """What the sampler needs to know for one row of logits. A sequence that is sampled step after step has the same one in each: what the
    sampler keeps of it is kept for as long as that lives."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    """The original prompt."""
    output_ids: Sequence[int]
    """Everything generated since; the next token's output position is its length."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """What is wanted to know of a chunk's tokens: how likely the token after each of them was."""

    next_ids: Sequence[int]
    """These tokens. There is one less where the chunk ends its prompt."""
    num_top: int
    """How many of the likeliest tokens are wanted beside."""
