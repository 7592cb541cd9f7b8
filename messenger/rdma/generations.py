"""Reading a peer's generations from afar, and comparing them."""

from __future__ import annotations

import numpy as np

WORD = 8
"""Bytes of a generation."""
_GAP = 16
"""Granules that are read along rather than asked for apart: 128 bytes cost less than another request."""


class GenerationCheck:
    """Whether granules still have the generations that the handles of some pieces say."""

    def __init__(self, granules: np.ndarray, wanted: np.ndarray) -> None:
        """int64 [pieces], each a granule of the peer; uint64 [pieces], the generation that it must have. At least one piece."""
        self._wanted = wanted
        distinct, of_piece = np.unique(granules, return_inverse=True)
        heads = np.flatnonzero(np.concatenate(([True], np.diff(distinct) > _GAP)))
        first, last = distinct[heads], distinct[np.append(heads[1:], len(distinct)) - 1]
        counts = last - first + 1
        starts = np.cumsum(counts) - counts
        run = np.searchsorted(heads, np.arange(len(distinct)), side="right") - 1
        self._place = (starts[run] + distinct - first[run])[of_piece]
        self.runs = list(zip(first.tolist(), starts.tolist(), counts.tolist(), strict=True))
        """(first granule, index in the answer, number of granules) of every stretch of the generations that is to be read."""

    @staticmethod
    def most_words(pieces: int) -> int:
        """That the answer for so many pieces can take."""
        return pieces * (_GAP + 1)

    def stale(self, answer: np.ndarray) -> np.ndarray:
        """bool [pieces], from what was read: uint64 [at least the end of the last run]."""
        stale: np.ndarray = answer[self._place] != self._wanted
        return stale
