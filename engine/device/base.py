"""Which device a model is on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from springtide.errors import ConfigError

DeviceKind = Literal["auto", "cpu", "cuda"]
MEMORY_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class Device:
    """Weights and the paged cache are in the memory of `torch_device`, apart from the arena. Any torch device will do, the CPU included:
    all that is peculiar to CUDA is in engine.device.cuda."""

    torch_device: torch.device
    memory_share: float = MEMORY_SHARE
    """Of all its memory, for the weights and pages of this process."""
    most_pages: int | None = None
    """Beside that share; None: no such limit."""
    step_graphs: int = 0
    """Decode steps of up to so many sequences are recorded once and replayed (CUDA graphs), where the attention backend can do it."""

    def __post_init__(self) -> None:
        if self.is_cuda and self.torch_device.index is None:
            raise ValueError("a CUDA device has a number: cuda:0, not cuda")

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"


def count_cards(kind: DeviceKind) -> int:
    """The CUDA devices that may be used; 0 where the arena itself is the paged cache, on a CPU.

    Raises ConfigError when `kind` is cuda and there is none."""
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return 0
    if not torch.cuda.is_available():
        raise ConfigError("device: this machine has no CUDA device that torch can use; write cpu, or auto, which takes what there is")
    return torch.cuda.device_count()


def find(kind: DeviceKind, number: int = 0, memory_share: float = MEMORY_SHARE, step_graphs: int = 0) -> Device | None:
    """The CUDA device `number`, counted round where there are not so many; None where `count_cards` finds none. Raises as that does."""
    cards = count_cards(kind)
    return Device(torch.device("cuda", number % cards), memory_share, step_graphs=step_graphs) if cards else None
