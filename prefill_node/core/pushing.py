"""Units of the layer stream to the decode side: which slabs go together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from springtide.ids import AttemptId
from springtide.protocol.storage import Push


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Layer-wise streaming pays only where there is much to send: a unit has at least `unit_bytes`, as long as there are layers left, so
    that the fewer the blocks the more layers go together, and a short prompt goes in one unit."""

    layers: int
    bytes_per_slab: int
    unit_bytes: int

    def layers_per_unit(self, num_blocks: int) -> int:
        return min(self.layers, max(1, -(-self.unit_bytes // (num_blocks * self.bytes_per_slab))))

    def in_one_unit(self, num_blocks: int) -> bool:
        """All layers of so many blocks fit in a unit."""
        return self.layers_per_unit(num_blocks) == self.layers

    def units(
        self,
        attempt_id: AttemptId,
        block_begin: int,
        block_end: int,
        layer_begin: int = 0,
        layer_end: int | None = None,
        *,
        whole: bool = True,
    ) -> Iterator[Push]:
        """Covers layers [layer_begin, layer_end) of blocks [block_begin, block_end), in the order of layers. Unless `whole`, a last group
        smaller than a unit is left for later, except at the model's last layer."""
        end = self.layers if layer_end is None else layer_end
        if block_begin >= block_end:
            return
        step = self.layers_per_unit(block_end - block_begin)
        for begin in range(layer_begin, end, step):
            stop = min(begin + step, end)
            if stop - begin < step and stop < self.layers and not whole:
                return
            yield Push(attempt_id, begin, stop, block_begin, block_end)
