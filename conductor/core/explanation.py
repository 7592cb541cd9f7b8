"""Estimates of a decision as people are shown them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from conductor.core.types.arrays import Floats, Ints
from conductor.core.types.decision import Alternatives, Decision, Placement
from conductor.core.types.estimates import DecodeEstimate, DecodeEstimates, InlineEstimate, PrefillEstimate, PrefillEstimates
from springtide.protocol.scheduling import Estimate

SHOWN = 8
"""Instances of each side that a decision is explained with."""


def estimates(alternatives: Alternatives) -> tuple[Estimate, ...]:
    """Of every instance."""
    return (
        *map(_prefill, alternatives.prefills),
        *map(_decode, alternatives.decodes),
        *map(_inline, alternatives.inlines),
    )


@dataclass(frozen=True, slots=True)
class LeadingEstimates:
    """Of each side the chosen instance, and the best. Columns, until somebody asks: of many decisions they are kept, and Python's collector
    of reference cycles would look at each estimate."""

    placed: Placement | None
    prefills: PrefillEstimates
    decodes: DecodeEstimates
    inlines: Sequence[InlineEstimate]

    @classmethod
    def of(cls, alternatives: Alternatives, decision: Decision) -> LeadingEstimates:
        """The best by the time to the first token, and by the time between tokens, of those that have room for it before the others."""
        prefills, decodes = alternatives.prefills, alternatives.decodes
        full = (decodes.slots_free < alternatives.expected_blocks) | ~decodes.place_in_batch()
        return cls(
            decision if isinstance(decision, Placement) else None,
            prefills.picked(_least(prefills.ttft_ms)),
            decodes.picked(_least(decodes.tbt_ms + 1e9 * full)),
            alternatives.inlines[:SHOWN],
        )

    def told(self) -> tuple[tuple[Estimate, ...], tuple[Estimate, ...], tuple[Estimate, ...]]:
        """Of prefill instances, of decode nodes, and of those that could compute the prompt themselves: the chosen one, then the others."""
        placed, inlines = self.placed, [_inline(each) for each in self.inlines]
        inlined = placed is not None and placed.inlined
        own_prefill = () if placed is None or inlined else (_prefill(placed.prefill),)
        own_decode = () if placed is None else (_decode(placed.decode),)
        if placed is not None and inlined:
            inlines.sort(key=lambda each: each.instance_id != placed.prefill.instance_id)
        return _led_by(own_prefill, map(_prefill, self.prefills)), _led_by(own_decode, map(_decode, self.decodes)), tuple(inlines)


def _led_by(own: tuple[Estimate, ...], others: Iterable[Estimate]) -> tuple[Estimate, ...]:
    chosen = {each.instance_id for each in own}
    return (*own, *(each for each in others if each.instance_id not in chosen))[:SHOWN]


def _least(column: Floats) -> Ints:
    """The rows of the least values, in that order."""
    count = min(SHOWN, len(column))
    if not count:
        return np.zeros(0, np.int64)
    rows = np.argpartition(column, count - 1)[:count]
    return np.asarray(rows[np.argsort(column[rows], kind="stable")])


def _prefill(row: PrefillEstimate) -> Estimate:
    return Estimate(
        instance_id=row.instance_id,
        prefix_blocks=row.local_blocks,
        queue_ms=row.queue_ms,
        transfer_ms=row.transfer_ms,
        prefill_ms=row.prefill_ms,
        ttft_ms=row.ttft_ms,
        note=f"fetch {row.source_blocks - row.local_blocks} blocks from {row.source_id}" if row.source_id is not None else row.branch,
    )


def _decode(row: DecodeEstimate) -> Estimate:
    return Estimate(
        instance_id=row.instance_id,
        prefix_blocks=row.prefix_blocks,
        tbt_ms=row.tbt_ms,
        note=f"batch {row.batch}, {row.slots_free} of {row.slots_total} slots free",
    )


def _inline(row: InlineEstimate) -> Estimate:
    return Estimate(
        instance_id=row.instance_id,
        prefix_blocks=row.prefix_blocks,
        queue_ms=row.wait_ms,
        prefill_ms=row.step_ms,
        ttft_ms=row.ttft_ms,
        tbt_ms=row.step_ms,
        note=f"inlined: {row.new_tokens} tokens in a step",
    )
