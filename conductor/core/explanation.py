"""Estimates of a decision as people are shown them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from conductor.core.types.arrays import Floats
from conductor.core.types.decision import Alternatives, Decision, Placement
from conductor.core.types.estimates import DecodeEstimate, InlineEstimate, PrefillEstimate
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
    """Of each side the chosen instance, then the best of the others."""

    prefills: tuple[Estimate, ...]
    decodes: tuple[Estimate, ...]
    inlines: tuple[Estimate, ...]


def leading_estimates(alternatives: Alternatives, decision: Decision) -> LeadingEstimates:
    """The best by the time to the first token, and by the time between tokens, of those that have room for it before the others."""
    prefills, decodes = alternatives.prefills, alternatives.decodes
    placed = decision if isinstance(decision, Placement) else None
    full = (decodes.slots_free < alternatives.expected_blocks) | ~decodes.place_in_batch()
    decode_rows = _least(decodes.tbt_ms + 1e9 * full)
    inlined = placed is not None and placed.inlined
    own_prefill = () if placed is None or inlined else (_prefill(placed.prefill),)
    own_decode = () if placed is None else (_decode(placed.decode),)
    inlines = [_inline(each) for each in alternatives.inlines[:SHOWN]]
    if placed is not None and inlined:
        inlines.sort(key=lambda each: each.instance_id != placed.prefill.instance_id)
    return LeadingEstimates(
        _led_by(own_prefill, (_prefill(prefills.row(row)) for row in _least(prefills.ttft_ms))),
        _led_by(own_decode, (_decode(decodes.row(row)) for row in decode_rows)),
        tuple(inlines),
    )


def _led_by(own: tuple[Estimate, ...], others: Iterable[Estimate]) -> tuple[Estimate, ...]:
    chosen = {each.instance_id for each in own}
    return (*own, *(each for each in others if each.instance_id not in chosen))[:SHOWN]


def _least(column: Floats) -> list[int]:
    """The rows of the least values, in that order."""
    count = min(SHOWN, len(column))
    if not count:
        return []
    rows = np.argpartition(column, count - 1)[:count]
    ordered: list[int] = rows[np.argsort(column[rows], kind="stable")].tolist()
    return ordered


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
