"""The layer stream to the decode side: which slabs go together, and which are due with a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prefill_node.core.attempt import PrefillAttempt
from springtide.ids import AttemptId
from springtide.protocol.storage import Push
from springtide.values import value_class


@value_class(frozen=True, slots=True)
class LayerGroups:
    """Slabs in units. Layer-wise streaming pays only where there is much to send: a unit has at least `unit_bytes`, as long as there are
    layers left, so that the fewer the blocks the more layers go together, and a short prompt goes in one unit."""

    layers: int
    bytes_per_slab: int
    unit_bytes: int

    @property
    def bytes_per_slot(self) -> int:
        return self.layers * self.bytes_per_slab

    def layers_per_unit(self, num_blocks: int) -> int:
        return min(self.layers, max(1, -(-self.unit_bytes // (num_blocks * self.bytes_per_slab))))

    def in_one_unit(self, num_blocks: int) -> bool:
        """Whether all layers of so many blocks fit in a unit: without the last it is not full."""
        return (self.layers - 1) * num_blocks * self.bytes_per_slab < self.unit_bytes

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
        """The units of layers [layer_begin, layer_end) of blocks [block_begin, block_end), in the order of layers. Unless `whole`, a last
        group smaller than a unit is left for later, except at the model's last layer."""
        end = self.layers if layer_end is None else layer_end
        if block_begin >= block_end:
            return
        step = self.layers_per_unit(block_end - block_begin)
        for begin in range(layer_begin, end, step):
            stop = min(begin + step, end)
            if stop - begin < step and stop < self.layers and not whole:
                return
            yield Push(attempt_id, begin, stop, block_begin, block_end)


def due_pushes(chosen: Sequence[tuple[PrefillAttempt, int]], groups: LayerGroups, block_tokens: int) -> tuple[Push, ...]:
    """The units of slabs that become final by a pass of the next tokens of each attempt, sorted by their last layer."""
    pushes = [
        push
        for attempt, num_tokens in chosen
        if not attempt.start.stays
        for push in groups.units(
            attempt.attempt_id,
            _unsent_begin(attempt, groups, block_tokens),
            pushable_blocks(attempt, attempt.launched + num_tokens, groups, block_tokens),
        )
    ]
    return tuple(sorted(pushes, key=lambda push: push.layer_end))


def pushable_blocks(attempt: PrefillAttempt, computed: int, groups: LayerGroups, block_tokens: int) -> int:
    """How many blocks are final and due to be handed over once so many tokens are computed: the full ones, at the prompt's end also the
    partial one; of a short prompt none before its end."""
    request = attempt.request
    if computed >= request.num_tokens:
        return request.num_blocks
    return 0 if groups.in_one_unit(request.num_blocks) else computed // block_tokens


def _unsent_begin(attempt: PrefillAttempt, groups: LayerGroups, block_tokens: int) -> int:
    """The first block that nobody has handed over yet. The reused prefix is as it becomes readable, except that a short prompt goes as a
    whole; the passes in flight hand over what they fill."""
    if groups.in_one_unit(attempt.request.num_blocks):
        return attempt.pushed_blocks
    return max(attempt.pushed_blocks, attempt.reused_blocks, pushable_blocks(attempt, attempt.launched, groups, block_tokens))
