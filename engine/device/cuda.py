"""What is peculiar to CUDA: streams, events, and memory of the host that the device can copy from while the host goes on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import torch

from engine.device.streams import CopyTimes, DeviceWork, SlabCopy, Streams, copy_all

logger = logging.getLogger(__name__)

_WARM_UP_RUNS = 2
_ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered."""


class _CudaCopy(SlabCopy):
    def __init__(self, stream: torch.cuda.Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Launches it on `stream`."""
        self.began, self.ended = _event(), _event()
        with torch.cuda.stream(stream):
            self.began.record(stream)
            copy_all(targets, sources)
            self.ended.record(stream)

    def done(self) -> bool:
        return bool(self.ended.query())

    def wait(self) -> None:
        self.ended.synchronize()

    @property
    def ms(self) -> float:
        """Once it is done."""
        return float(self.began.elapsed_time(self.ended))


class _CudaWork(DeviceWork):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        """All that is on `stream` by now."""
        self._ended = torch.cuda.Event()
        self._ended.record(stream)

    def done(self) -> bool:
        return bool(self._ended.query())

    def wait(self) -> None:
        self._ended.synchronize()


class CudaStreams(Streams):
    """Streams of one card: one for each direction beside the one that computes, so that both directions of the bus are used at once, and
    one for loads ahead, which no pass that does not need them waits for. Streams wait for each other by events alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in = torch.cuda.Stream(device)
        self._out = torch.cuda.Stream(device)
        self._ahead = torch.cuda.Stream(device)
        self._ended: torch.cuda.Event | None = None
        self._forget_times()

    def begin(self, ahead: Sequence[SlabCopy]) -> None:
        self._forget_times()
        for loading in ahead:
            self.hold(loading)
        computed = _event()
        computed.record(self._computing)
        self._in.wait_event(computed)

    def load(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> SlabCopy:
        copy = _CudaCopy(self._in, targets, sources)
        self._loads.append(copy)
        return copy

    def load_ahead(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> SlabCopy:
        computed = _event()
        computed.record(self._computing)
        self._ahead.wait_event(computed)
        try:
            return _CudaCopy(self._ahead, targets, sources)
        except BaseException:
            self._ahead.synchronize()
            raise

    def hold(self, loading: SlabCopy) -> None:
        assert isinstance(loading, _CudaCopy)
        reached, goes_on = _event(), _event()
        reached.record(self._computing)
        self._computing.wait_event(loading.ended)
        goes_on.record(self._computing)
        self._holds.append((reached, goes_on))

    def store(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> SlabCopy:
        computed = _event()
        computed.record(self._computing)
        self._out.wait_event(computed)
        copy = _CudaCopy(self._out, targets, sources)
        self._stores.append(copy)
        return copy

    def launched(self) -> DeviceWork:
        return _CudaWork(self._computing)

    def end(self) -> None:
        ended = _event()
        ended.record(self._computing)
        self._ended = ended

    def times(self) -> CopyTimes:
        """Zeros where the pass was not completed."""
        if self._ended is None:
            return CopyTimes()
        for event in (self._ended, *(copy.ended for copy in (*self._loads, *self._stores))):
            event.synchronize()
        last = self._stores[-1].ended if self._stores else self._ended
        return CopyTimes(
            load_ms=sum(copy.ms for copy in self._loads),
            load_waited_ms=sum(float(reached.elapsed_time(goes_on)) for reached, goes_on in self._holds),
            store_ms=sum(copy.ms for copy in self._stores),
            store_waited_ms=max(0.0, float(self._ended.elapsed_time(last))),
        )

    @property
    def _computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _forget_times(self) -> None:
        self._ended = None
        self._loads: list[_CudaCopy] = []
        self._stores: list[_CudaCopy] = []
        self._holds: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class Pinned:
    """Memory of the host that is somebody else's, registered with CUDA from here to `release`. Where that is refused, copies are slower,
    and the thread waits for them, but they are right."""

    def __init__(self, address: int, num_bytes: int, device: torch.device) -> None:
        """Raises RuntimeError where something at these addresses is registered: what was mapped there before may be meant, and copies would
        go to that."""
        self._address = address
        error = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
        if error == _ALREADY_REGISTERED:
            raise RuntimeError(f"of the arena at {address:#x}, {num_bytes >> 20} MiB, something is registered with CUDA already")
        self._registered = error == 0
        if not self._registered:
            logger.warning("the arena of %d MiB cannot be pinned (CUDA error %d): copies are slower", num_bytes >> 20, error)
            # torch finds the error when it next launches something, and would take it for that one's.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)

    def release(self) -> None:
        """Unpins the memory: nothing is copied from or to it any more. Idempotent."""
        if self._registered:
            self._registered = False
            error = int(torch.cuda.cudart().cudaHostUnregister(self._address))
            if error:
                logger.warning("the arena could not be unpinned (CUDA error %d)", error)


def room_bytes(device: torch.device, share: float) -> int:
    """What this process may still take where `share` of the device's memory is its own, and no more than is free."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return min(int(total * share) - torch.cuda.memory_allocated(device), free)


class GraphRecorder:
    """Records what is never replayed at the same time, so that all of it shares the memory of what is computed on the way."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Runs `compute` until all that it does for the first time is done, records it once, and returns what replays it: into the same
        memory each time. Raises RuntimeError where something in it cannot be recorded."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
