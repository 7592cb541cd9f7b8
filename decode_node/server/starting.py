"""From a configuration to a decode server that is ready to run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from decode_node.server.server import DecodeServer
from engine.profiling import measure_decode
from engine.runner import ModelRunner
from engine.sampling.grammars import Grammars
from node_runtime import process
from node_runtime.loading import Parts, load_runner, measured_cost
from node_runtime.model_thread import ModelThread
from springtide.clock import MonotonicClock
from springtide.cost import DecodeCost
from springtide.process import ProcessArguments
from springtide.protocol.instances import Role

MEASURE_BUDGET_S = 2.0


async def serve(arguments: ProcessArguments, stop: asyncio.Event) -> None:
    """Runs the engine of a decode node, as `node_runtime.process.serve` does."""
    threads = arguments.config.decode_node.threads
    await process.serve(arguments, Role.DECODE, threads, lambda thread: _prepare(arguments, thread), stop)


async def _prepare(arguments: ProcessArguments, thread: ModelThread) -> DecodeServer:
    grammars = Grammars(arguments.model_info)
    grammars.load()
    runner = await thread.run(load_runner, arguments, Role.DECODE)
    cost = await thread.run(_cost, arguments, runner)
    return DecodeServer(Parts(arguments, runner, thread, MonotonicClock()), cost, grammars)


def _cost(arguments: ProcessArguments, runner: ModelRunner) -> DecodeCost:
    def measure(scratch: Sequence[int]) -> DecodeCost:
        return DecodeCost.fit(measure_decode(runner, scratch, arguments.config.decode_node.max_batch, MEASURE_BUDGET_S))

    return measured_cost(arguments, DecodeCost, Role.DECODE, runner, measure)
