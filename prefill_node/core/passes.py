"""Builds passes over the model from the chosen chunks."""

from __future__ import annotations

from collections.abc import Sequence

from engine.batch import SamplingRow, SequenceChunk
from prefill_node.core.actions import Row, RunPass
from prefill_node.core.attempt import Attempt
from prefill_node.core.pushing import LayerGroups


def build(pass_id: int, chosen: Sequence[tuple[Attempt, int]], groups: LayerGroups, block_tokens: int, predicted_ms: float) -> RunPass:
    """The next `n` tokens of each attempt, and the units of slabs that become final by it."""
    pushes = [
        push
        for attempt, num_tokens in chosen
        for push in groups.units(
            attempt.attempt_id,
            _unsent_begin(attempt, groups, block_tokens),
            pushable_blocks(attempt, attempt.launched + num_tokens, groups, block_tokens),
        )
    ]
    awaits = next((attempt.attempt_id for attempt, _ in chosen if attempt.fetching), None)
    assert awaits is None or len(chosen) == 1, "an attempt whose prefix arrives runs alone"
    rows = tuple(_row(attempt, num_tokens) for attempt, num_tokens in chosen)
    return RunPass(pass_id, rows, tuple(sorted(pushes, key=lambda push: push.layer_end)), awaits, predicted_ms)


def pushable_blocks(attempt: Attempt, computed: int, groups: LayerGroups, block_tokens: int) -> int:
    """How many blocks are final and due to be handed over once so many tokens are computed: the full ones, at the prompt's end also the
    partial one; of a short prompt none before its end."""
    request = attempt.request
    if computed >= request.num_tokens:
        return request.num_blocks
    return 0 if groups.in_one_unit(request.num_blocks) else computed // block_tokens


def _unsent_begin(attempt: Attempt, groups: LayerGroups, block_tokens: int) -> int:
    """The reused prefix is handed over as it becomes readable, except that a short prompt goes as a whole; the passes under way hand over
    what they fill."""
    if groups.in_one_unit(attempt.request.num_blocks):
        return attempt.pushed_blocks
    return max(attempt.pushed_blocks, attempt.reused_blocks, pushable_blocks(attempt, attempt.launched, groups, block_tokens))


def _row(attempt: Attempt, num_tokens: int) -> Row:
    request = attempt.request
    begin, end = attempt.launched, attempt.launched + num_tokens
    last = end == request.num_tokens
    chunk = SequenceChunk(request.token_ids[begin:end], begin, attempt.slots, wants_logits=last)
    if not last:
        return Row(attempt.attempt_id, chunk, None)
    prompt, output = request.token_ids[: request.num_prompt_tokens], request.token_ids[request.num_prompt_tokens :]
    return Row(attempt.attempt_id, chunk, SamplingRow(request.params, prompt, output))
