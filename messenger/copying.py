"""Copies a plan between two mapped regions, fenced piece by piece. numpy lets go of the GIL for every piece of more than some bytes."""

from __future__ import annotations

import numpy as np

from messenger.base import Region
from messenger.plan import Plan


class CopyJob:
    """One plan on its way. `run` may be called from several threads at once for different ranges of pieces."""

    def __init__(self, plan: Plan, local: np.ndarray, remote: Region, inward: bool) -> None:
        """`inward`: from `remote` to `local`, which are mapped until every `run` has returned."""
        self.stale = np.zeros(plan.num_pieces, np.bool_)
        """Pieces whose generation was wrong before or after the copy, bool [pieces]. What is marked already is not copied."""
        self._plan = plan
        self._local = local
        self._remote = remote
        self._inward = inward
        self._stopped = False

    def stop(self) -> None:
        """Lets `run` return before its next piece."""
        self._stopped = True

    def run(self, pieces: slice) -> None:
        plan, generations, remote_memory, local_memory = self._plan, self._remote.generations, self._remote.memory, self._local
        columns = (plan.local, plan.remote, plan.length, plan.granule, plan.generation)
        rows = zip(*(column[pieces].tolist() for column in columns), strict=True)
        for piece, (local, remote, length, granule, generation) in enumerate(rows, pieces.start):
            if self._stopped:
                return
            if self.stale[piece] or generations[granule] != generation:
                self.stale[piece] = True
                continue
            here, there = local_memory[local : local + length], remote_memory[remote : remote + length]
            if self._inward:
                np.copyto(here, there)
            else:
                np.copyto(there, here)
            if generations[granule] != generation:
                self.stale[piece] = True
