"""A cluster at work, in the words in which its engines and gateways tell of it.

There are as many prefill instances as decode nodes, each with a store of its own, named as those of `drivers.select_springtide`. The
attempts that live are spread evenly over them: of those of a decode node every tenth is still in prefill, at the prefill instance of the
same number, and the others decode. None of them ends: who measures decisions adds to them and takes away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.drivers.select_springtide import LOADS
from springtide.blocks import blocks_for
from springtide.ids import AttemptId, GatewayId, InstanceId
from springtide.protocol.attempts import LiveAttempt, Phase, Prediction, Renew
from springtide.protocol.instances import Load, Role

BLOCK_TOKENS = 64
IN_PREFILL = 10
"""Every so many-th of a decode node's attempts."""
PROMPT_TOKENS, OUTPUT_TOKENS = 6000, 1000
QUEUED_MS = 300.0
"""Of work that each attempt in prefill is at its instance."""
ATTEMPTS_A_GATEWAY = 1000
REPORTS = 8
"""Different ones of each engine, in turn: those of a real one differ, too."""
PREDICTION = Prediction(500.0, 200.0, 0.0, QUEUED_MS, 25.0, 300.0, 200.0)


def instance_id(role: Role, number: int) -> InstanceId:
    return InstanceId(f"{role.value}-{number}")


@dataclass(frozen=True, slots=True)
class LiveCluster:
    """`workers` of each role, and `live` attempts on them."""

    workers: int
    live: int

    def attempts_of(self, role: Role, number: int) -> list[LiveAttempt]:
        """Those at the instance of that role and number. A decode node has those in prefill, too: their slots are reserved there."""
        here = [self._attempt(attempt) for attempt in range(number, self.live, self.workers)]
        return here if role is Role.DECODE else [attempt for attempt in here if attempt.phase is Phase.PREFILL]

    def reports_of(self, role: Role, number: int) -> list[Load]:
        """What the engine reports, one after the other and again from the first; one only, where it has no work."""
        here, load = self.attempts_of(role, number), LOADS[role]
        if not here:
            return [load]
        taken = sum(blocks_for(attempt.num_tokens, BLOCK_TOKENS) for attempt in here)
        attempt_ids = frozenset(attempt.attempt_id for attempt in here)
        load = replace(load, slots_available=load.slots_total - taken, attempt_ids=attempt_ids)
        if role is Role.PREFILL:
            tokens, queue_ms = sum(attempt.num_tokens for attempt in here), QUEUED_MS * len(here)
            working = replace(load, running=1, waiting=len(here) - 1)
            return [replace(working, tokens=tokens - 512 * done, queue_ms=queue_ms * (1 - done / (2 * REPORTS))) for done in range(REPORTS)]
        batch = [attempt.num_tokens for attempt in here if attempt.phase is Phase.DECODE]
        assert load.decode_cost is not None
        contexts = [sum(batch) + step * len(batch) for step in range(REPORTS)]
        return [
            replace(load, running=len(batch), tokens=context, step_ms=load.decode_cost.predict_ms(len(batch), context))
            for context in contexts
        ]

    def renewals(self) -> Sequence[Renew]:
        """What each gateway tells every two seconds: all of its attempts."""
        gateways = [range(first, min(first + ATTEMPTS_A_GATEWAY, self.live)) for first in range(0, self.live, ATTEMPTS_A_GATEWAY)]
        return [
            Renew(GatewayId(f"gateway-{number}"), tuple(self._attempt(attempt) for attempt in attempts))
            for number, attempts in enumerate(gateways)
        ]

    def _attempt(self, number: int) -> LiveAttempt:
        worker, turn = number % self.workers, number // self.workers
        return LiveAttempt(
            attempt_id=AttemptId(f"attempt-{number:024x}"),
            prefill_id=instance_id(Role.PREFILL, worker),
            decode_id=instance_id(Role.DECODE, worker),
            phase=Phase.PREFILL if turn % IN_PREFILL == 0 else Phase.DECODE,
            num_tokens=PROMPT_TOKENS + 100 * (turn % IN_PREFILL),
            max_new_tokens=OUTPUT_TOKENS,
            prediction=PREDICTION,
        )
