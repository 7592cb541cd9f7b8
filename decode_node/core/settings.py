"""What a decode node's decisions depend on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from springtide.cost import DecodeCost


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """What a decode node is told when it is made. `ingest_lease_s`: how long the prefill side may take. Whoever gives up earlier says so
    (the gateway aborts, the store tells that the writer is gone); this bounds what nobody speaks for any more. `slot_wait_s`: how long room
    is waited for here, until it is looked for elsewhere. `overlap`: a step is launched while another runs; without it, which is easier to
    follow, when that one's tokens are known. `inline_tokens`: most tokens of a prompt that are to be computed here; None: any number.
    `loads_ahead`: prompts that were handed over are loaded ahead of the steps that they
    join. `answer_s`: within which a store that lives answers.
    `idle_slowdown`: by how much sequences in idle capacity may lengthen a step of others, and so may idle work of the machine's other
    engines."""

    cost: DecodeCost
    block_tokens: int
    max_batch: int
    eos_token_ids: Collection[int]
    ingest_lease_s: float
    slot_wait_s: float
    overlap: bool = True
    mixes: bool = False
    """Steps are launched when they are asked for (`DecodeCore.launch`): prompts are computed with them."""
    inline_tokens: int | None = None
    loads_ahead: bool = False
    answer_s: float = 2.5
    idle_slowdown: float = 0.05
    most_drafted: int = 0
    """Most tokens of a sequence that are guessed for a step, where that pays."""
    most_foretold: int = 0
    """Most tokens of a sequence that a step computes because they were foretold."""
