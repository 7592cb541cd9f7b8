"""Who takes part in the next step, and how many tokens of each are guessed."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from decode_node.core.attempt import DecodeAttempt
from decode_node.core.drafting import GuessPrice
from node_runtime.slot_claims import within_pages
from springtide.cost import IDLE_STEP_SHARE, DecodeCost, most_with_idle_ms

_GUESSING_SHARE = 0.85
"""Of the objective for the time between tokens, what a step with guesses in it is planned to take: predictions miss, and clients see the
way of a token, too."""


def choose(
    attempts: Collection[DecodeAttempt],
    cost: DecodeCost,
    max_batch: int,
    block_tokens: int,
    pages: int | None = None,
    idle_slowdown: float = 0.0,
) -> Sequence[DecodeAttempt]:
    """The attempts of the next step, the first of `attempts` that have a slot for their tokens, as far as the batch has places, and the
    device `pages` for the slots of all of them. Those in idle capacity come last, as far as they lengthen the step by no more than
    `idle_slowdown`."""
    chosen: list[DecodeAttempt] = []
    for attempt in attempts:
        if attempt.idle:
            chosen += _idle_ones(attempts, chosen, cost, max_batch - len(chosen), block_tokens, idle_slowdown)
            break
        if attempt.phase == "running" and attempt.continues and not attempt.lacks_slot(block_tokens):
            chosen.append(attempt)
        if len(chosen) == max_batch:
            break
    return within_pages(chosen, lambda attempt: attempt.slots, pages)


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
    objective_ms = min(attempt.objective_ms for attempt in (*others, *runnable))
    others_ms = cost.predict_ms(sequences, context) if others else 0.0
    most_ms = most_with_idle_ms(others_ms, objective_ms, slowdown)
    for attempt in runnable[:places]:
        sequences, context = sequences + 1, context + attempt.context_tokens
        if cost.predict_ms(sequences, context) > most_ms and (chosen or others):
            break
        chosen.append(attempt)
    return chosen


def drafts(batch: Sequence[DecodeAttempt], cost: DecodeCost, price: GuessPrice, most: int, block_tokens: int) -> list[int]:
    """How many tokens of each of a step's sequences may be guessed, at most `most`, or were foretold. A step with guesses gives the more
    tokens in its time, within the objectives of all who are in it; in idle capacity nobody guesses at others' cost. Foretold ones are sure,
    and have precedence; nothing is guessed of a sequence of which there are some."""
    size = len(batch)
    foretold = [max(0, min(count, attempt.draft_room(block_tokens))) if (count := attempt.num_foretold) else 0 for attempt in batch]
    if not most and not any(foretold):
        return foretold
    predicted_ms = cost.predict_ms(size, sum(attempt.context_tokens for attempt in batch))
    row_ms = price.row_ms(cost, predicted_ms)
    objective_ms = min(attempt.objective_ms for attempt in batch)
    idle = batch[0].idle
    left, share = sum(foretold) + most * size, IDLE_STEP_SHARE if idle else _GUESSING_SHARE
    if objective_ms < math.inf:
        left = max(0, int((share * objective_ms - predicted_ms) / row_ms))
    drafted = []
    for count in foretold:
        drafted.append(min(count, left))
        left -= drafted[-1]
    if predicted_ms <= size * row_ms:
        return drafted
    for i, attempt in enumerate(batch):
        if not left or attempt.idle != idle:
            break
        room = min(left, most, attempt.draft_room(block_tokens))
        if room > 0 and not attempt.num_foretold:
            drafted[i] = attempt.guessing.length(room, size * row_ms / predicted_ms)
            left -= drafted[i]
    return drafted


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
