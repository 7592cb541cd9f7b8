"""Copies that go on beside computing: the interface, and what does them at once."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """The times of one pass's copies, in milliseconds. What was waited for is what computing did not hide."""

    load_ms: float = 0.0
    load_waited_ms: float = 0.0
    """The layers stood still until their slabs had come."""
    store_ms: float = 0.0
    store_waited_ms: float = 0.0
    """From the end of the last layer to that of the last copy."""


class DeviceWork(ABC):
    """Something that a device is to do, or has done."""

    @abstractmethod
    def done(self) -> bool:
        """May be asked from any thread."""

    @abstractmethod
    def wait(self) -> None:
        """Returns when it is done. The thread waits, the device does not."""


class SlabCopy(DeviceWork):
    """Copying of one or more slabs."""


class Streams(ABC):
    """The order of computing and copying on one device. Called from one thread, in which everything that is computed is launched."""

    @abstractmethod
    def begin(self, ahead: Sequence[SlabCopy]) -> None:
        """A pass begins, after those loads ahead: what was computed before is over before anything is copied into a page. Times
        count from here."""

    @abstractmethod
    def load(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> SlabCopy:
        """Copies from the host to the device; `sources` must not change until it is done."""

    @abstractmethod
    def load_ahead(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> SlabCopy:
        """Copies as `load` does, but for a later pass, beside those that come before it, and in no pass's times: after all that has been
        computed so far, in the order of these calls. Where it raises, nothing of it is on its way any more."""

    @abstractmethod
    def hold(self, loading: SlabCopy) -> None:
        """What is computed from now on comes after that."""

    @abstractmethod
    def store(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> SlabCopy:
        """Copies from the device to the host what has been computed so far."""

    @abstractmethod
    def launched(self) -> DeviceWork:
        """The work of all that has been launched so far to be computed: sums with other ranks, which may return before these have
        come to them, too."""

    @abstractmethod
    def end(self) -> None:
        """Notes that all of the pass has been launched."""

    @abstractmethod
    def times(self) -> CopyTimes:
        """The times of the last pass; returns when that is through."""


class _Done(SlabCopy):
    def done(self) -> bool:
        return True

    def wait(self) -> None: ...


class ImmediateStreams(Streams):
    """Streams where device and host are one: everything is done when it is asked for, and nothing of it is hidden."""

    def __init__(self) -> None:
        self._times = [0.0, 0.0]

    def begin(self, ahead: Sequence[SlabCopy]) -> None:
        self._times = [0.0, 0.0]

    def load(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> SlabCopy:
        return self._copy(0, targets, sources)

    def load_ahead(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> SlabCopy:
        copy_all(targets, sources)
        return _Done()

    def hold(self, loading: SlabCopy) -> None: ...

    def store(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> SlabCopy:
        return self._copy(1, targets, sources)

    def launched(self) -> DeviceWork:
        return _Done()

    def end(self) -> None: ...

    def times(self) -> CopyTimes:
        load_ms, store_ms = self._times
        return CopyTimes(load_ms, load_ms, store_ms, store_ms)

    def _copy(self, kind: int, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> SlabCopy:
        began = time.perf_counter()
        copy_all(targets, sources)
        self._times[kind] += (time.perf_counter() - began) * 1000
        return _Done()


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies without waiting, where memory and stream allow that."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
