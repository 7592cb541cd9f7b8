"""From a configuration to a server that is ready to run: alone, or with the stages of its group."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path

from engine.formats.files import read_config
from engine.layer_costs import measure_layers
from node_runtime import process
from node_runtime.costs import cost_model
from node_runtime.devices import devices_of
from node_runtime.model_thread import ModelThread
from node_runtime.process import SCRATCH_TOKENS, Parts, load_runner
from prefill_node.core.split import configured_split, split
from prefill_node.server.group import StageGroup
from prefill_node.server.measuring import measure_group
from prefill_node.server.server import PrefillServer, kind
from springtide.clock import MonotonicClock
from springtide.cost import PrefillCost
from springtide.process import ProcessArguments
from springtide.protocol.instances import Role

logger = logging.getLogger(__name__)


async def serve(arguments: ProcessArguments, stop: asyncio.Event) -> None:
    """As `node_runtime.process.serve`."""
    config = arguments.config.prefill_node
    if config.stages == 1:
        await process.serve(arguments, kind(arguments), stop)
    else:
        await process.serve_node(arguments, Role.PREFILL, config.threads, lambda thread: _prepare(arguments, thread), stop)


async def _prepare(arguments: ProcessArguments, thread: ModelThread) -> PrefillServer:
    group = StageGroup(arguments, thread)
    try:
        given = configured_split(arguments.config.prefill_node, read_config(Path(arguments.model_info.path)).layers)
        await group.start()
        ranges = given if given is not None else await thread.run(_measured_split, arguments)
        logger.info("layers of the stages: %s", ", ".join(str(len(layers)) for layers in ranges))
        runner = await thread.run(load_runner, arguments, Role.PREFILL, (ranges[0].start, ranges[0].stop))
        await group.load(ranges, runner)
        cost = await _cost(arguments, group)
        return PrefillServer(Parts(arguments, runner, thread, MonotonicClock()), cost, group)
    except BaseException:
        await group.close()
        raise


def _measured_split(arguments: ProcessArguments) -> tuple[range, ...]:
    """By what layers cost in a chunk that others have gone before."""
    config, info = arguments.config, arguments.model_info
    context = min(SCRATCH_TOKENS, info.context_length)
    new_tokens = min(config.prefill_node.chunk_tokens, context // 2)
    device = devices_of(arguments, Role.PREFILL)[0]
    costs = measure_layers(info, config.dtype, config.kv.block_tokens, new_tokens, context - new_tokens, config.kernels, device)
    logger.info("layers take %.2f to %.2f ms, embedding %.2f, head %.2f", min(costs.layers), max(costs.layers), costs.embedding, costs.head)
    return split(costs.layers, config.prefill_node.stages, costs.embedding, costs.head)


async def _cost(arguments: ProcessArguments, group: StageGroup) -> PrefillCost:
    """What the group takes as a whole, of which `profile` has no word but of all layers in one process."""
    started = time.perf_counter()
    measured = await measure_group(group, arguments.config.prefill_node.chunk_tokens, arguments.model_info.context_length)
    profiled = cost_model(PrefillCost, Role.PREFILL, arguments.config.profile, lambda: measured)
    cost = replace(profiled, slowest_share=measured.slowest_share)
    logger.info("%s in %.1f s", cost, time.perf_counter() - started)
    return cost
