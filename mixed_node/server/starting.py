"""From a configuration to a mixed server that is ready to run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.profiling import measure_decode
from engine.runner import ModelRunner
from engine.sampling.grammars import Grammars
from mixed_node.server.server import MixedServer
from node_runtime import process
from node_runtime.loading import Parts, load_runner, measured_cost
from node_runtime.model_thread import ModelThread
from prefill_node.server.starting import cost_alone
from springtide.clock import MonotonicClock
from springtide.cost import DecodeCost, PrefillCost
from springtide.ids import InstanceId, prefill_side
from springtide.process import ProcessArguments
from springtide.protocol.instances import Role

MEASURE_BUDGET_S = 2.0


async def serve(arguments: ProcessArguments, stop: asyncio.Event) -> None:
    """Runs the engine, as `node_runtime.process.serve` does: of a decode node, or of an instance that prefills for others, too."""
    threads, own = arguments.config.decode_node.threads, InstanceId(arguments.instance_id)
    names = {Role.DECODE: own, Role.PREFILL: prefill_side(own)} if arguments.prefills else {Role.DECODE: own}

    async def prepare(thread: ModelThread) -> MixedServer:
        grammars = Grammars(arguments.model_info)
        grammars.load()
        runner = await thread.run(load_runner, arguments, Role.DECODE)
        costs = await thread.run(_costs, arguments, runner)
        return MixedServer(Parts(arguments, runner, thread, MonotonicClock()), costs, grammars, names)

    await process.serve(arguments, names, threads, prepare, stop)


def _costs(arguments: ProcessArguments, runner: ModelRunner) -> tuple[PrefillCost, DecodeCost]:
    def measure(scratch: Sequence[int]) -> DecodeCost:
        return DecodeCost.fit(measure_decode(runner, scratch, arguments.config.decode_node.max_batch, MEASURE_BUDGET_S))

    decode = measured_cost(arguments, DecodeCost, Role.DECODE, runner, measure)
    if arguments.prefills or arguments.config.decode_node.inline_tokens:
        return cost_alone(arguments, runner), decode
    # No prompts come here: what they would take need not be measured.
    return PrefillCost(decode.fixed_ms, decode.per_sequence_ms, decode.per_context_token_ms), decode
