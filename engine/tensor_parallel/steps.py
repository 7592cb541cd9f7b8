"""Layer by layer together: where rank 0 has hooks, nobody reads a layer's slots before its `before` has returned, and all stop where one of
its hooks raises."""

from __future__ import annotations

import torch

from engine.batch import LayerHooks
from engine.tensor_parallel.process_group import ProcessRanks

_GO, _STOP = 1, 0


class Abandoned(Exception):
    """One of rank 0's hooks has raised."""


class LeadingHooks:
    """The hooks of rank 0. They are called of a layer whose slabs are final: every rank stores its heads before it takes part in the sum
    that follows attention. On a device a sum returns before the others have come to it: engine.kv_cache.paged_pass waits for it, so that
    `after` may be called of a layer when later ones have begun. `announced` is the error of a hook that the other ranks know of, or need
    not: they are ready for another pass."""

    def __init__(self, ranks: ProcessRanks, hooks: LayerHooks, layers: int) -> None:
        self._ranks = ranks
        self._hooks = hooks
        self._layers = layers
        self._begun = 0
        self.announced: BaseException | None = None

    def before(self, layer: int) -> None:
        try:
            self._hooks.before(layer)
        except BaseException as error:
            self._stop(error)
            raise
        self._ranks.spread(torch.tensor([_GO]))
        self._begun = layer + 1

    def after(self, layer: int) -> None:
        try:
            self._hooks.after(layer)
        except BaseException as error:
            if self._begun < self._layers:
                self._stop(error)
            else:
                # Nobody asks any more whether to go on.
                self.announced = error
            raise

    def _stop(self, error: BaseException) -> None:
        self._ranks.spread(torch.tensor([_STOP]))
        self.announced = error


class FollowingHooks:
    def __init__(self, ranks: ProcessRanks) -> None:
        self._ranks = ranks

    def before(self, layer: int) -> None:
        if int(self._ranks.spread(torch.tensor([_STOP]))) == _STOP:
            raise Abandoned

    def after(self, layer: int) -> None:
        pass
