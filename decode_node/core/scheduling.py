"""Who takes part in the next step, and how much of a prompt that is inlined fits into it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from decode_node.core.attempt import DecodeAttempt
from node_runtime.slot_claims import within_pages
from springtide.cost import DecodeCost, most_with_idle_ms

LEAST_PROMPT_TOKENS = 8
"""A step that computes any of a prompt computes so much of it, whatever the objective: it must come to its end."""


def most_missing(inline_tokens: int) -> int:
    """The most tokens of an inlined prompt that are computed here. The Conductor finds that at most `inline_tokens` are missing; of more
    than twice as many, blocks it counted on have gone since, and steps would be long for too long."""
    return 2 * max(inline_tokens, LEAST_PROMPT_TOKENS)


def choose(
    attempts: Collection[DecodeAttempt],
    cost: DecodeCost,
    max_batch: int,
    block_tokens: int,
    inline_tokens: int,
    pages: int | None = None,
    idle_slowdown: float = 0.0,
) -> list[tuple[DecodeAttempt, int]]:
    """The attempts of the next step, the first of `attempts` as far as the batch has places, and the device `pages` for the slots of all
    of them, with the tokens of their prompts: 0 for those that run, which need a slot for the token. One prompt at a time is computed, of
    which no step is in flight: the oldest. Those in idle capacity come last, as far as they lengthen the step by no more than
    `idle_slowdown`."""
    chosen: list[DecodeAttempt] = []
    prompt: int | None = None
    for attempt in attempts:
        if attempt.idle:
            chosen += _idle_ones(attempts, chosen, cost, max_batch - len(chosen), block_tokens, idle_slowdown)
            break
        if attempt.phase == "running" and attempt.continues and not attempt.lacks_slot(block_tokens):
            chosen.append(attempt)
        elif attempt.phase == "prefilling" and prompt is None and not attempt.ahead:
            prompt = len(chosen)
            chosen.append(attempt)
        if len(chosen) == max_batch:
            break
    batch = within_pages(chosen, lambda attempt: attempt.slots, pages)
    prompt_tokens = 0
    if prompt is not None and prompt < len(batch):
        first = batch[prompt]
        prompt_tokens = min(first.remaining_tokens, _room(cost, batch, first, inline_tokens))
    return [(attempt, prompt_tokens if place == prompt else 0) for place, attempt in enumerate(batch)]


def _idle_ones(
    attempts: Collection[DecodeAttempt], others: Sequence[DecodeAttempt], cost: DecodeCost, places: int, block_tokens: int, slowdown: float
) -> list[DecodeAttempt]:
    """The attempts in idle capacity, in their order, that a step with these others has time for. With none of the others it is not begun
    when one is on its way here, which would have to wait for its end; when none is, it has one of them in any case."""
    chosen: list[DecodeAttempt] = []
    runnable = [one for one in attempts if one.idle and one.phase == "running" and one.continues and not one.lacks_slot(block_tokens)]
    if not runnable or (not others and not next(iter(attempts)).idle):
        return chosen
    sequences, context = len(others), sum(attempt.context_tokens for attempt in others)
    objectives = [attempt.tbt_slo_ms for attempt in (*others, *runnable) if attempt.tbt_slo_ms > 0]
    others_ms = cost.predict_ms(sequences, context) if others else 0.0
    most_ms = most_with_idle_ms(others_ms, min(objectives, default=0.0), slowdown)
    for attempt in runnable[:places]:
        sequences, context = sequences + 1, context + attempt.context_tokens
        if cost.predict_ms(sequences, context) > most_ms and (chosen or others):
            break
        chosen.append(attempt)
    return chosen


def to_load(attempts: Collection[DecodeAttempt], in_flight: Collection[str], pages: int | None = None) -> Sequence[DecodeAttempt]:
    """The attempts whose prompts are to be loaded now, those in flight excepted: as in `choose` the oldest, as far as there are device
    `pages` for all of them, whether they compute, are being loaded or wait for that. An older one's step comes first even where younger
    ones have the pages yet."""

    def waits(attempt: DecodeAttempt) -> bool:
        return attempt.phase == "loading" and attempt.attempt_id not in in_flight

    if not any(waits(attempt) for attempt in attempts):
        return ()
    here = [attempt for attempt in attempts if attempt.has_begun or attempt.phase == "prefilling"]
    return [attempt for attempt in within_pages(here, lambda attempt: attempt.slots, pages) if waits(attempt)]


def _room(cost: DecodeCost, batch: Sequence[DecodeAttempt], prompt: DecodeAttempt, inline_tokens: int) -> int:
    """How many tokens of the prompt, which is in the batch, the step may compute within the objectives of all who are in it, each taking as
    long as a sequence more of the same context, which is no less than it does."""
    most = max(LEAST_PROMPT_TOKENS, inline_tokens)
    objectives = [attempt.tbt_slo_ms for attempt in batch if attempt.tbt_slo_ms > 0]
    token_ms = cost.per_sequence_ms + cost.per_context_token_ms * prompt.context_tokens
    if not objectives or token_ms <= 0:
        return most
    left_ms = min(objectives) - cost.predict_ms(len(batch), sum(attempt.context_tokens for attempt in batch))
    return min(max(LEAST_PROMPT_TOKENS, 1 + int(left_ms / token_ms)), most)
