"""When the collector of reference cycles looks at what, in a process that follows a large cluster.

A thousand members are a quarter of a million objects that stay, and Python's default is to look at all of them whenever there are a quarter
more: a pause of 150 ms. So what the members need is taken out of the collector's sight once they are connected.

What is young takes long, too, for Python looks at it when there is so much more of it than before: of a thousand engines that report all
the time there is not, for each report takes the place of the last one, so that before long thousands of objects are looked at in one go.
So the collector goes by time instead: it looks often, when little has come since, for a tenth of a millisecond or two (2 cores AMD EPYC,
1000 instances, 200 decisions a second; by Python's default 4 ms now and then). What outlives that is looked at once more within seconds,
for some 3 ms, then left alone, and every minute taken out of sight as well. What of that turns to cycles that nobody needs stays for
longer: a collection of all, which is the long pause, is made when it may be much.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from typing import Protocol

_YOUNG_EVERY_S = 0.025
_YOUNG_A_LOOK = 200
"""How often what is new is looked at until what has outlived that is looked at once more, and the members are."""
_LOOKS_A_FREEZE = 12
"""Until what has come since is out of sight, too, though the members are the same or have no rest."""
_THRESHOLDS = 50_000, 1000, 1000
"""`gc.set_threshold`: for when so much comes at once, as with new members, that it cannot wait for its time."""
_GONE_SHARE = 0.25
"""Of the members that are followed: when more than so many have gone, what they may have left in cycles is worth a long pause."""
_GROWTH = 1.5
"""By which what is out of sight may have grown since all was collected, whoever has come."""


class Followed(Protocol):
    """Members: how many were begun to be followed so far, and how many of them are followed no longer."""

    @property
    def joined(self) -> int: ...

    @property
    def left(self) -> int: ...


class GcTuner:
    """Collects what is young, and freezes the heap whenever the cluster has changed and then been the same for a while, and now and then
    else. There is one in a process."""

    def __init__(self, followed: Followed) -> None:
        self._followed = followed
        self._seen = self._frozen = (0, 0)
        self._left_at_full = 0
        self._looks = 0
        """Since what was there was last frozen."""
        self._kept = 0
        """Objects that were out of sight when all was collected last, or at first."""

    async def run(self) -> None:
        """Tunes until cancelled; then the collector is as it was."""
        thresholds = gc.get_threshold()
        gc.set_threshold(*_THRESHOLDS)
        try:
            for time in itertools.count(1):
                await asyncio.sleep(_YOUNG_EVERY_S)
                if time % _YOUNG_A_LOOK:
                    gc.collect(0)
                else:
                    self.look()
        finally:
            gc.set_threshold(*thresholds)
            gc.unfreeze()

    def look(self) -> None:
        """Collects what has outlived the first look at it, and freezes what stays when that is due. To be called at intervals: what has
        changed since the last look is given time until the next."""
        before, self._seen = self._seen, (self._followed.joined, self._followed.left)
        self._looks += 1
        changed = self._seen != self._frozen
        if not (changed and self._seen == before) and self._looks < _LOOKS_A_FREEZE:
            gc.collect(1)
            return
        joined, left = self._frozen = self._seen
        self._looks = 0
        grown = 0 < _GROWTH * self._kept < gc.get_freeze_count()
        if full := grown or left - self._left_at_full > _GONE_SHARE * (joined - left):
            self._left_at_full = left
            gc.unfreeze()
            gc.collect()
        else:
            gc.collect(1)
        gc.freeze()
        if full or not self._kept:
            self._kept = gc.get_freeze_count()
