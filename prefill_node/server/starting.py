"""From a configuration to a prefill server that is ready to run, with the stages of its group."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from engine.layer_costs import measure_layers
from engine.profiling import measure_prefill
from engine.runner import ModelRunner
from node_runtime import process
from node_runtime.devices import devices_of
from node_runtime.loading import SCRATCH_TOKENS, Parts, cost_model, load_runner, measured_cost
from node_runtime.model_thread import ModelThread
from prefill_node.core.split import split
from prefill_node.server.group import StageGroup
from prefill_node.server.measuring import measure_group
from prefill_node.server.server import PrefillServer
from springtide.clock import MonotonicClock
from springtide.cost import PrefillCost
from springtide.ids import InstanceId
from springtide.process import ProcessArguments
from springtide.protocol.instances import Role
from springtide.stage_layers import configured_split

logger = logging.getLogger(__name__)

MEASURE_BUDGET_S = 2.0


async def serve(arguments: ProcessArguments, stop: asyncio.Event) -> None:
    """Runs the engine of a prefill group, as `node_runtime.process.serve` does."""
    threads = arguments.config.prefill_node.threads
    names = {Role.PREFILL: InstanceId(arguments.instance_id)}
    await process.serve(arguments, names, threads, lambda thread: _prepare(arguments, thread), stop)


async def _prepare(arguments: ProcessArguments, thread: ModelThread) -> PrefillServer:
    group = StageGroup(arguments, thread)
    try:
        ranges = configured_split(arguments.config.prefill_node, arguments.model_info.layers)
        await group.start()
        if ranges is None:
            ranges = await thread.run(_measured_split, arguments)
        alone = len(ranges) == 1
        if not alone:
            logger.info("layers of the stages: %s", ", ".join(str(len(layers)) for layers in ranges))
        runner = await thread.run(load_runner, arguments, Role.PREFILL, None if alone else (ranges[0].start, ranges[0].stop))
        await group.load(ranges, runner)
        if alone:
            cost = await thread.run(cost_alone, arguments, runner)
        else:
            cost = await _cost_of_group(arguments, group)
        return PrefillServer(Parts(arguments, runner, thread, MonotonicClock()), cost, group)
    except BaseException:
        await group.close()
        raise


def _measured_split(arguments: ProcessArguments) -> tuple[range, ...]:
    """The split by what layers cost in a chunk that others have gone before."""
    config, info = arguments.config, arguments.model_info
    context = min(SCRATCH_TOKENS, info.context_length)
    new_tokens = min(config.prefill_node.chunk_tokens, context // 2)
    device = devices_of(arguments, Role.PREFILL)[0]
    costs = measure_layers(info, config.dtype, config.kv.block_tokens, new_tokens, context - new_tokens, config.kernels, device)
    logger.info("layers take %.2f to %.2f ms, embedding %.2f, head %.2f", min(costs.layers), max(costs.layers), costs.embedding, costs.head)
    return split(costs.layers, config.prefill_node.stages, costs.embedding, costs.head)


def cost_alone(arguments: ProcessArguments, runner: ModelRunner) -> PrefillCost:
    """What passes take in one stage, measured without the group's ado: it is all that there is to measure."""

    def measure(scratch: Sequence[int]) -> PrefillCost:
        return PrefillCost.fit(measure_prefill(runner, scratch, arguments.config.prefill_node.chunk_tokens, MEASURE_BUDGET_S))

    return measured_cost(arguments, PrefillCost, Role.PREFILL, runner, measure)


async def _cost_of_group(arguments: ProcessArguments, group: StageGroup) -> PrefillCost:
    """What passes take in the group as a whole, of which `profile` has no word but of all layers in one process."""
    started = time.perf_counter()
    measured = await measure_group(group, arguments.config.prefill_node.chunk_tokens, arguments.model_info.context_length)
    profiled = cost_model(PrefillCost, Role.PREFILL, arguments.config.profile, lambda: measured)
    cost = replace(profiled, slowest_share=measured.slowest_share)
    logger.info("%s in %.1f s", cost, time.perf_counter() - started)
    return cost
