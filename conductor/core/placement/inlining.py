"""When a decode node computes a prompt itself: one of which its own store has all but a few tokens, in one of its steps.

It spares the way over a prefill group: its queue, and the hand-over of what the decode node has already.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conductor.core.placement.columns import DecodeInstances
from conductor.core.types.estimates import DecodeEstimates, InlineEstimate, Ints

MOST_LISTED = 8
"""Alternatives that a decision looks at: those whose first token would come soonest."""
_STEPS_AHEAD = 1.5
"""That are in flight where others run: the rest of one, and the one that is launched behind it."""


def inline_estimates(
    decodes: DecodeEstimates, instances: DecodeInstances, in_dram: Ints, num_tokens: int, block_tokens: int, most_tokens: int
) -> Sequence[InlineEstimate]:
    """Estimates of the nodes that lack at most `most_tokens` of the prompt and have a place in their batch, the soonest first. `instances`
    are those that `decodes` was made from, `in_dram` [instances] the blocks of the prompt that each has.

    A token of a prompt takes no longer than a sequence more of the same context would, one of which `decodes.tbt_ms` has already. A node
    computes one prompt at a time, in the order in which they came: all of them are waited for.
    """
    reused = np.minimum(in_dram, (num_tokens - 1) // block_tokens)
    new_tokens = num_tokens - reused * block_tokens
    max_batch = decodes.max_batch
    rows = ((new_tokens <= most_tokens) & ((max_batch <= 0) | (decodes.batch <= max_batch))).nonzero()[0]
    if not len(rows):
        return ()
    tbt_ms = decodes.tbt_ms[rows]
    token_ms = instances.per_sequence_ms + instances.per_context_token_ms * num_tokens
    step_ms = tbt_ms + token_ms[rows] * (new_tokens[rows] - 1)
    wait_ms = np.where(decodes.batch[rows] > 1, _STEPS_AHEAD * tbt_ms, 0.0) + instances.inlining_ms[rows]
    soonest = np.argsort(wait_ms + step_ms, kind="stable")[:MOST_LISTED].tolist()
    return tuple(
        InlineEstimate(
            row := int(rows[i]), decodes.instance_ids[row], int(reused[row]), int(new_tokens[row]), float(wait_ms[i]), float(step_ms[i])
        )
        for i in soonest
    )
