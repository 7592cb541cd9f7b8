"""Measures what a pass takes in a group of stages, and how much of that in its slowest one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from engine.batch import SequenceChunk
from engine.profiling import prefill_samples
from node_runtime.loading import SCRATCH_TOKENS
from prefill_node.core.actions import PassRow, RunPass
from prefill_node.core.events import PassDone, PassEnded, PassLeft
from prefill_node.server.formation import Formation, FormationArena
from prefill_node.server.group import StageGroup
from prefill_node.server.passes import Launch
from springtide.cost import PrefillCost
from springtide.errors import PeerLost, SpringtideError
from springtide.ids import AttemptId
from springtide.protocol.stages import StagePassEnded
from springtide.supervision import first_of

BUDGET_S = 4.0
"""What further rounds may take: the first is taken whatever it takes."""
_MOST_ROUNDS = 4


async def measure_group(group: StageGroup, max_tokens: int, context_length: int) -> PrefillCost:
    """The cost model of a group of several stages, from passes alone in it, in scratch memory. Times are of the processors of the threads
    that run the layers, as other engines may be starting on the same ones. Raises PeerLost, SpringtideError."""
    capacity = min(SCRATCH_TOKENS, context_length)
    num_slots = group.scratch_slots
    formation = await group.form(FormationArena(num_slots))
    try:
        samples = prefill_samples(capacity, max_tokens)
        best: dict[tuple[int, int], list[float]] = {}
        until, pass_id = time.perf_counter() + BUDGET_S, 0
        await _stage_times(formation, RunPass(pass_id, (_row(samples[0], num_slots),), ()))  # to warm up
        for round_number in range(_MOST_ROUNDS):
            for sample in samples:
                if round_number and time.perf_counter() > until:
                    break
                pass_id += 1
                times_ms = await _stage_times(formation, RunPass(pass_id, (_row(sample, num_slots),), ()))
                best[sample] = [min(both) for both in zip(times_ms, best.get(sample, times_ms), strict=True)]
    finally:
        await group.at_rest()
    cost = PrefillCost.fit([(new, cached, sum(times_ms)) for (new, cached), times_ms in best.items()])
    longest = best[samples[-1]]
    return replace(cost, slowest_share=max(longest) / sum(longest))


def _row(sample: tuple[int, int], num_slots: int) -> PassRow:
    new, cached = sample
    return PassRow(AttemptId("measured"), SequenceChunk((0,) * new, cached, tuple(range(num_slots))), None)


async def _stage_times(formation: Formation, run: RunPass) -> list[float]:
    """What the pass takes in each stage, in milliseconds."""
    ended: asyncio.Future[PassEnded] = asyncio.get_running_loop().create_future()
    times_ms: list[float] = []

    def tell(_: RunPass, event: PassLeft | PassEnded) -> None:
        if not isinstance(event, PassLeft):
            ended.set_result(event)

    def take(results: Sequence[StagePassEnded]) -> None:
        times_ms.extend(result.busy_ms for result in results)

    formation.launch(Launch(run, None, tell, take))
    outcome = await first_of(asyncio.shield(ended), formation.broken())
    if isinstance(outcome, PeerLost):
        raise outcome
    if not isinstance(outcome, PassDone):
        raise SpringtideError(f"the group cannot be measured: {outcome}")
    return times_ms
