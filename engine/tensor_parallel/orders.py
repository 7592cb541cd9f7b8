"""What rank 0 tells the others, over a pipe that they inherit."""

from __future__ import annotations

from dataclasses import dataclass

from engine.device.base import Device
from engine.tensor_parallel.batches import SentChunk
from springtide.modelinfo import KVSpec, ModelInfo


@dataclass(frozen=True, slots=True)
class LoadModel:
    """First of all: as whom to load what. `meeting` is a file through which the ranks find each other; one waits for another in a pass for
    `timeout_s` at most."""

    info: ModelInfo
    dtype: str
    layers: tuple[int, int] | None
    kernels: str
    kv_spec: KVSpec
    rank: int
    size: int
    meeting: str
    timeout_s: float
    threads: int
    device: Device | None


@dataclass(frozen=True, slots=True)
class UseScratch:
    """Compute in memory of your own."""

    num_slots: int


@dataclass(frozen=True, slots=True)
class UseArena:
    """Compute in the memory behind the file descriptor that follows, from `offset` on. A second one, the token, is kept open for as
    long."""

    num_slots: int
    offset: int
    num_bytes: int
    has_token: bool


@dataclass(frozen=True, slots=True)
class RunLayers:
    """`batch` is a BatchWriter's. `from_stage`: hidden states of the batch come first, from rank 0. `in_step`: rank 0 says before each
    layer whether to go on."""

    batch: tuple[SentChunk, ...]
    from_stage: bool
    in_step: bool


@dataclass(frozen=True, slots=True)
class ComputeLogits:
    """Compute logits of the batch of the last RunLayers."""

    rows: tuple[int, int] | None = None
    """Those of rows [begin, end); None: of the tokens that want them, as `ModelRunner.logits` has it."""


@dataclass(frozen=True, slots=True)
class LeaveArena:
    """Unmap it and close its token; another place to compute in follows before the next pass."""


@dataclass(frozen=True, slots=True)
class Forget:
    """See ModelRunner.forget."""

    slots: tuple[int, ...]


RankOrder = LoadModel | UseScratch | UseArena | RunLayers | ComputeLogits | LeaveArena | Forget
