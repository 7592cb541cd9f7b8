"""Rank 0: a ModelRunner whose layers are shared out among processes."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import ForkingPickler, send_handle
from pathlib import Path

import torch

from engine.batch import LayerHooks, SequenceChunk
from engine.device.base import Device
from engine.device.streams import DeviceWork
from engine.formats.files import read_config
from engine.loader import load_model
from engine.runner import Arena, ModelRunner, SharedArena
from engine.shard import Shard, check_degree
from engine.tensor_parallel.batches import BatchWriter
from engine.tensor_parallel.orders import ComputeLogits, Forget, LeaveArena, LoadModel, RankOrder, RunLayers, UseArena, UseScratch
from engine.tensor_parallel.process_group import ProcessRanks
from engine.tensor_parallel.steps import LeadingHooks
from springtide.modelinfo import KVSpec, ModelInfo
from springtide.process import start_python

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 2.5
"""For all other ranks together to end."""
START_GRACE_S = 5.0
"""For rank 0 to find out by itself why another ended before all were there: what is wrong with the model, each of them finds."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """A rank on each of the `devices` (None: on the CPU), with `threads` each, of which one waits for another for `timeout_s` at most. They
    find each other through the file `meeting`, which is theirs alone. `on_lost` is called once, from any thread, when passes cannot be
    completed any more, or not even the start: a rank has died, or they are out of step."""

    devices: Sequence[Device | None]
    threads: int
    timeout_s: float
    meeting: Path
    on_lost: Callable[[], None]


class TensorParallelRunner(ModelRunner):
    """Made by `start`. A pass that needs a rank that has died raises RuntimeError."""

    def __init__(self, ranks: ProcessRanks, others: Others, load: LoadModel, arena: Arena, num_slots: int) -> None:
        self._ranks = ranks
        self._others = others
        self._batches = BatchWriter()
        model = load_model(load.info, load.dtype, load.layers, load.kernels, ranks, load.device)
        super().__init__(model, load.kv_spec, arena, num_slots)

    @classmethod
    def start(
        cls,
        info: ModelInfo,
        dtype: str,
        kv_spec: KVSpec,
        arena: Arena,
        num_slots: int,
        parallel: Parallel,
        layers: tuple[int, int] | None = None,
        kernels: str = "auto",
    ) -> TensorParallelRunner:
        """Starts the other ranks and returns when all have met; they load at the same time as this one. Raises as load_model does."""
        size = len(parallel.devices)
        check_degree(read_config(Path(info.path)), size)
        with ExitStack() as undone:
            others = undone.enter_context(Others(parallel.on_lost))
            # What ranks of earlier times left there would mislead these.
            parallel.meeting.unlink(missing_ok=True)
            meeting = str(parallel.meeting)
            loads = [
                LoadModel(info, dtype, layers, kernels, kv_spec, rank, size, meeting, parallel.timeout_s, parallel.threads, device)
                for rank, device in enumerate(parallel.devices)
            ]
            for load in loads[1:]:
                others.start(load)
            ranks = ProcessRanks(meeting, Shard(0, size), parallel.timeout_s, loads[0].device)
            undone.callback(ranks.close)
            runner = cls(ranks, others, loads[0], arena, num_slots)
            undone.pop_all()
        others.started = True
        return runner

    @property
    def rank_pids(self) -> list[int]:
        """The processes of the other ranks."""
        return self._others.pids

    def set_arena(self, arena: Arena, num_slots: int) -> None:
        """Memory that is not shared (SharedArena) each rank has for itself, which is the same as long as nobody else reads it."""
        self._others.use(arena, num_slots)
        super().set_arena(arena, num_slots)

    def leave_arena(self) -> None:
        super().leave_arena()
        self._others.tell(LeaveArena())

    @property
    def activations_device(self) -> torch.device | None:
        """The host's memory, from which every rank gets them."""
        return None

    @property
    def loads_ahead(self) -> bool:
        """False: rank 0 would know of its own copies alone when they are done."""
        return False

    def load_ahead(self, slots: Sequence[int]) -> DeviceWork | None:
        """Loads nothing ahead: all ranks alike load in the pass what it needs."""
        return None

    def forget(self, slots: Sequence[int]) -> None:
        super().forget(slots)
        self._others.tell(Forget(tuple(slots)))

    def forward_layers(self, batch: Sequence[SequenceChunk], hidden: torch.Tensor | None, hooks: LayerHooks | None = None) -> torch.Tensor:
        # What is refused is refused before the others hear of it.
        planned = self._planned(batch)
        leading = None if hooks is None else LeadingHooks(self._ranks, hooks, self.model.end - self.model.begin)
        with self._in_step(leading):
            self._others.tell(RunLayers(self._batches.write(batch), hidden is not None, hooks is not None))
            if hidden is not None:
                self._ranks.spread(hidden)
            return self._run(batch, planned, hidden, leading)

    def logits(self, batch: Sequence[SequenceChunk], hidden: torch.Tensor) -> torch.Tensor:
        with self._in_step(None):
            self._others.tell(ComputeLogits())
            return super().logits(batch, hidden)

    def logits_between(self, hidden: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        with self._in_step(None):
            self._others.tell(ComputeLogits((begin, end)))
            return super().logits_between(hidden, begin, end)

    def close(self) -> None:
        super().close()
        self._others.close()
        self._ranks.close()

    @contextmanager
    def _in_step(self, leading: LeadingHooks | None) -> Iterator[None]:
        """An error here that the other ranks do not know of leaves them in the middle of the pass: nothing can follow it."""
        try:
            yield
        except BaseException as error:
            if leading is None or leading.announced is not error:
                logger.critical("the ranks are out of step: %r", error)
                self._others.lose()
            raise


class Others:
    """The other ranks' processes, the death of one of which is told."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self.started = False
        """All are there."""
        self._on_lost = on_lost
        self._ranks: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._lock = threading.Lock()
        self._over = threading.Event()

    def __enter__(self) -> Others:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._ranks]

    def start(self, load: LoadModel) -> None:
        """The process ends when the calling thread does."""
        ours, theirs = Pipe()
        with theirs:
            process = start_python("engine.tensor_parallel.rank", str(theirs.fileno()), pass_fds=[theirs.fileno()])
        self._ranks.append((process, ours))
        threading.Thread(target=self._watch, args=(process,), name=f"rank process {process.pid}", daemon=True).start()
        ours.send(load)

    def tell(self, order: RankOrder) -> None:
        """Raises RuntimeError when one has died."""
        message = ForkingPickler.dumps(order)
        try:
            for _, pipe in self._ranks:
                pipe.send_bytes(message)
        except OSError as error:
            raise RuntimeError(f"a rank of the tensor parallel group has ended: {error}") from error

    def use(self, arena: Arena, num_slots: int) -> None:
        if not isinstance(arena, SharedArena):
            self.tell(UseScratch(num_slots))
            return
        self.tell(UseArena(num_slots, arena.offset, arena.memory.nbytes, arena.token_fd is not None))
        for _, pipe in self._ranks:
            for fd in (arena.memory_fd, arena.token_fd):
                if fd is not None:
                    send_handle(pipe, fd, None)

    def lose(self) -> None:
        with self._lock:
            was_over = self._over.is_set()
            self._over.set()
        if not was_over:
            self._on_lost()

    def close(self) -> None:
        """Ends them. Idempotent."""
        with self._lock:
            self._over.set()
        for _, pipe in self._ranks:
            pipe.close()
        deadline = time.monotonic() + END_TIMEOUT_S
        for process, _ in self._ranks:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("rank process %d does not end and is killed", process.pid)
                process.kill()
                process.wait()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._over.wait(0.0 if self.started else START_GRACE_S):
            logger.critical("a rank of the tensor parallel group ended with %d", code)
            self.lose()
