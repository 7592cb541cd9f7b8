"""How long attempts really wait for their prefill, relative to all the work that lies before them.

A prefill instance does not serve in order of arrival: by least relative slack, a short prompt overtakes long ones and waits for a part of
the work only, while a long one may also wait for what arrives after it. How much each waits is learnt, by the prompt's own work.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_CLASSES = 24
"""Of own work, by powers of two of a millisecond: the last one begins at 70 minutes."""
_REMEMBERED = 0.98
"""What a class keeps with each new attempt: some 50 count."""
_PRIOR_MS = 10_000.0
"""Of work for which, at the start, everybody waits in full."""
_LEAST, _MOST = 0.01, 4.0


class QueueBias:
    def __init__(self) -> None:
        self._ahead_ms = np.full(_CLASSES, _PRIOR_MS)
        self._waited_ms = np.full(_CLASSES, _PRIOR_MS)
        self._factors: Floats = np.ones(_CLASSES)

    def factors(self, own_ms: Floats) -> Floats:
        """By how much to multiply the work ahead for prompts of so much work of their own."""
        return np.asarray(self._factors[np.clip(np.frexp(own_ms)[1], 0, _CLASSES - 1)])

    def observe(self, own_ms: float, ahead_ms: float, waited_ms: float) -> None:
        """With so much work ahead when it was placed, an attempt waited so long."""
        row = int(np.clip(np.frexp(own_ms)[1], 0, _CLASSES - 1))
        self._ahead_ms[row] = self._ahead_ms[row] * _REMEMBERED + ahead_ms
        self._waited_ms[row] = self._waited_ms[row] * _REMEMBERED + waited_ms
        self._factors[row] = min(max(self._waited_ms[row] / max(self._ahead_ms[row], 1.0), _LEAST), _MOST)
