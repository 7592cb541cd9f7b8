"""How long attempts really wait for their prefill, relative to all the work that lies before them.

A prefill instance does not serve in order of arrival: by least relative slack, a short prompt overtakes long ones and waits for a part of
the work only, while a long one may also wait for what arrives after it. How much each waits is learnt, by the prompt's own work.
"""

from __future__ import annotations

import numpy as np

from conductor import _native
from conductor.core.types.arrays import Floats

_CLASSES = 24
"""Of own work, and of the work ahead, by powers of two of a millisecond: the last one begins at 70 minutes."""
_REMEMBERED = 0.98
"""What a class keeps with each new attempt: some 50 count."""
_DOUBTED, _DOUBT_KEPT = 5.0, 0.9
"""What the same prompts wait behind half of the work counts as so many attempts, with each attempt less."""
_LEAST, _MOST = 0.01, 4.0
_LEAST_AHEAD_MS = 10.0
"""Of less work ahead there is nothing to be learnt: how long one waits then has other causes."""


class QueueBias:
    """What part of the work ahead is waited for, by classes of own work and of work ahead: the more is ahead, the smaller the part that is
    waited for. Who is predicted to wait too long is refused, so nobody ever sees how long that would have been: a class that has seen
    little believes the one below it."""

    def __init__(self) -> None:
        shape = (_CLASSES, _CLASSES)
        self._ahead_ms, self._waited_ms = np.zeros(shape), np.zeros(shape)
        self._doubt = np.tile(_DOUBTED * 2.0 ** np.arange(_CLASSES), (_CLASSES, 1))
        """Weight (ms of work ahead) of what the class below says."""
        self.table: Floats = np.ones(shape)
        """The factors by which to multiply the work ahead, by the classes of own work and of work ahead."""

    def factors(self, own_ms: Floats, ahead_ms: Floats) -> Floats:
        """The factors by which to multiply the work ahead for prompts of so much work of their own."""
        factors = np.empty(len(own_ms))
        _native.queue_factors(own_ms, ahead_ms, self.table, factors)
        return factors

    def observe(self, own_ms: float, ahead_ms: float, waited_ms: float) -> None:
        """Learns that an attempt waited so long, with so much work ahead when it was placed."""
        if ahead_ms < _LEAST_AHEAD_MS:
            return
        own, ahead = _native.queue_class(own_ms, _CLASSES), _native.queue_class(ahead_ms, _CLASSES)
        self._ahead_ms[own, ahead] = self._ahead_ms[own, ahead] * _REMEMBERED + ahead_ms
        self._waited_ms[own, ahead] = self._waited_ms[own, ahead] * _REMEMBERED + waited_ms
        self._doubt[own, ahead] *= _DOUBT_KEPT
        factor = 1.0
        rows = zip(self._ahead_ms[own].tolist(), self._waited_ms[own].tolist(), self._doubt[own].tolist(), strict=True)
        for column, (seen_ms, waited, doubt) in enumerate(rows):
            factor = min(max((waited + doubt * factor) / (seen_ms + doubt), _LEAST), _MOST)
            self.table[own, column] = factor
