"""From a configuration to a model that is ready: its layers over memory of its own, warmed up, with the cost model of this machine; and the
arena in which it computes once there is a store."""

from __future__ import annotations

import json
import logging
import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard, TypeVar

import numpy as np
import torch

from engine.batch import SequenceChunk
from engine.loader import load_model
from engine.runner import ModelRunner, SharedArena
from engine.tensor_parallel.runner import Parallel, TensorParallelRunner
from messenger.arena_memory import SharedMemory
from node_runtime.devices import devices_of
from node_runtime.model_thread import ModelThread
from springtide.blocks import blocks_for
from springtide.clock import Clock
from springtide.cost import DecodeCost, PrefillCost
from springtide.errors import ConfigError
from springtide.process import ProcessArguments, end_process
from springtide.protocol.instances import Role

CostT = TypeVar("CostT", PrefillCost, DecodeCost)

logger = logging.getLogger(__name__)

SCRATCH_TOKENS = 2560
"""The arena in which the model is warmed up and measured holds so many."""
RANK_GRACE_S = 60.0
"""One rank waits so long for another, beside what a pass may wait for."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a server is made of, ready to run."""

    arguments: ProcessArguments
    runner: ModelRunner
    thread: ModelThread
    clock: Clock


def load_runner(arguments: ProcessArguments, role: Role, layers: tuple[int, int] | None = None) -> ModelRunner:
    """The model, or its layers [begin, end), over memory of its own, until there is a store's arena to compute in. On the model's thread:
    further ranks have as many threads as this one. A stage on a node of its own has an arena of its layers alone."""
    started = time.perf_counter()
    info, config = arguments.model_info, arguments.config
    spec = info.kv_spec(config.dtype, config.kv.block_tokens)
    if layers is not None and config.prefill_node.spread_stages:
        spec = replace(spec, layers=layers[1] - layers[0])
    num_slots = blocks_for(SCRATCH_TOKENS, spec.block_tokens)
    scratch = np.zeros(num_slots * spec.bytes_per_slot, np.uint8)
    devices = devices_of(arguments, role)
    if len(devices) == 1:
        model = load_model(info, config.dtype, layers, config.kernels, device=devices[0])
        runner = ModelRunner(model, spec, scratch, num_slots)
    else:
        # A pass may wait for a prefix as long as a lease lasts.
        timeout_s, meeting = config.kv.lease_s + RANK_GRACE_S, arguments.run_dir / f"{arguments.instance_id}.ranks"
        parallel = Parallel(devices, torch.get_num_threads(), timeout_s, meeting, on_lost=end_process)
        runner = TensorParallelRunner.start(info, config.dtype, spec, scratch, num_slots, parallel, layers, config.kernels)
    which = "" if layers is None else f"layers {layers[0]} to {layers[1] - 1} of "
    place = ", ".join(str(device.torch_device) if device is not None else "CPU" for device in devices)
    kernels = runner.model.backend.kernels
    logger.info("loaded %s%s in %.1f s: %s, kernels: %s", which, info.name, time.perf_counter() - started, place, kernels)
    return runner


def measured_cost(
    arguments: ProcessArguments, kind: type[CostT], role: Role, runner: ModelRunner, measure: Callable[[Sequence[int]], CostT]
) -> CostT:
    """The cost model of an engine whose runner has all layers: from the profile, or what `measure` finds in these scratch slots. Warms the
    model up, too: a step and a chunk of a prompt, whose kernels may be others, and may be compiled only when they are used. On the model's
    thread."""
    started = time.perf_counter()
    scratch = range(runner.num_slots)
    for chunk in ([0], [0, 0]):
        runner.forward([SequenceChunk(chunk, 0, scratch)])
    cost = cost_model(kind, role, arguments.config.profile, lambda: measure(scratch))
    logger.info("%s in %.1f s", cost, time.perf_counter() - started)
    return cost


def cost_model(kind: type[CostT], role: Role, profile: Path | None, measure: Callable[[], CostT]) -> CostT:
    """The cost model of this machine: what `measure` finds, or what is in the file of `springtide profile`, a JSON object that has a list
    of three coefficients for each role. Raises ConfigError when it does not."""
    if profile is None:
        return measure()
    try:
        document = json.loads(profile.read_text())
    except OSError as error:
        raise ConfigError(f"profile: cannot read {profile}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"profile: {profile} is not JSON: {error}") from None
    coefficients = document.get(role) if isinstance(document, dict) else None
    if not _are_coefficients(coefficients):
        raise ConfigError(f"profile: {role.value!r} in {profile} must be a list of 3 numbers >= 0, not {coefficients!r}")
    return kind(*map(float, coefficients))


def _are_coefficients(value: object) -> TypeGuard[list[float]]:
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(
            isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number) and number >= 0 for number in value
        )
    )


def shared_arena(memory: SharedMemory, attachment: socket.socket) -> SharedArena:
    """The store's arena as the runner takes it. `attachment` tells the store by its end that nobody writes any more: other ranks of the
    engine keep it open with their mappings."""
    return SharedArena(memory.region.memory, memory.fd, memory.header.data_offset, attachment.fileno())
