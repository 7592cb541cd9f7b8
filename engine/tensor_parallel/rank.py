"""`python -m engine.tensor_parallel.rank FD`: a rank other than the first. It does what rank 0 does, with its own part of the weights and
heads, until rank 0's end of the pipe closes."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import numpy as np
import torch

from engine.batch import SequenceChunk
from engine.loader import load_model
from engine.runner import ModelRunner
from engine.shard import Shard
from engine.tensor_parallel.batches import BatchReader
from engine.tensor_parallel.orders import ComputeLogits, Forget, LeaveArena, LoadModel, RunLayers, UseArena, UseScratch
from engine.tensor_parallel.process_group import ProcessRanks
from engine.tensor_parallel.steps import Abandoned, FollowingHooks
from springtide.modelinfo import KVSpec
from springtide.process import die_with_parent

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def main() -> None:
    # A rank that is stopped does not see that rank 0's end of the pipe closes, and would keep the arena's slots from everybody.
    die_with_parent()
    # Signals that end a terminal's or a service's processes are for rank 0, whose end ends this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as orders:
        threading.Thread(target=_end_with_rank_0, args=(orders.fileno(),), daemon=True).start()
        try:
            _serve(orders)
        except (EOFError, ConnectionError):
            pass
        except RuntimeError:
            # Of a sum that rank 0 has died in; a rank that fails by itself says why.
            if not _has_ended(orders):
                raise
    # Taking an interpreter with torch apart takes most of a second.
    os._exit(0)


def _end_with_rank_0(fd: int) -> None:
    """Whatever this one is in: a sum on a device is not left by itself when another rank does not come."""
    closing = select.poll()
    closing.register(fd, select.POLLRDHUP)
    closing.poll()
    os._exit(0)


def _has_ended(orders: Connection) -> bool:
    """Whether rank 0's end of the pipe is closed."""
    try:
        while orders.poll(1.0):
            orders.recv()
    except (EOFError, ConnectionError):
        return True
    return False


def _serve(orders: Connection) -> None:
    load = orders.recv()
    assert isinstance(load, LoadModel)
    torch.set_num_threads(load.threads)
    ranks = ProcessRanks(load.meeting, Shard(load.rank, load.size), load.timeout_s, load.device)
    model = load_model(load.info, load.dtype, load.layers, load.kernels, ranks, load.device)
    runner: ModelRunner | None = None
    arena: Bytes | None = None
    let_go: Callable[[], None] = _nothing
    batches = BatchReader()
    batch: Sequence[SequenceChunk] = ()
    hidden: torch.Tensor | None = None
    while True:
        match orders.recv():
            case UseScratch() | UseArena() as order:
                before, (arena, let_go) = let_go, _memory(orders, order, load.kv_spec)
                if runner is None:
                    runner = ModelRunner(model, load.kv_spec, arena, order.num_slots)
                else:
                    runner.set_arena(arena, order.num_slots)
                before()
            case LeaveArena():
                if runner is not None:
                    runner.close()
                runner, arena = None, None
                let_go()
                let_go = _nothing
            case RunLayers(sent, from_stage, in_step):
                assert runner is not None
                batch = batches.read(sent)
                received = ranks.spread(_hidden_for(runner, batch)) if from_stage else None
                with contextlib.suppress(Abandoned):
                    hidden = runner.forward_layers(batch, received, FollowingHooks(ranks) if in_step else None)
            case Forget(slots):
                if runner is not None:
                    runner.forget(slots)
            case ComputeLogits(rows):
                assert runner is not None and hidden is not None
                if rows is None:
                    runner.logits(batch, hidden)
                else:
                    runner.logits_between(hidden, *rows)


def _hidden_for(runner: ModelRunner, batch: Sequence[SequenceChunk]) -> torch.Tensor:
    rows = sum(len(chunk.token_ids) for chunk in batch)
    return torch.empty(rows, runner.model.config.hidden_size, dtype=runner.model.dtype)


def _memory(orders: Connection, order: UseScratch | UseArena, spec: KVSpec) -> tuple[Bytes, Callable[[], None]]:
    """Where to compute, and how to let go of it; a mapping itself goes with the last array that views it."""
    if isinstance(order, UseScratch):
        return np.zeros(order.num_slots * spec.bytes_per_slot, np.uint8), _nothing
    memory_fd = recv_handle(orders)
    token_fd = recv_handle(orders) if order.has_token else None
    mapped = mmap.mmap(memory_fd, 0)
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    os.close(memory_fd)
    arena = np.frombuffer(mapped, np.uint8, order.num_bytes, order.offset)
    return arena, _nothing if token_fd is None else partial(os.close, token_fd)


def _nothing() -> None: ...


if __name__ == "__main__":
    main()
