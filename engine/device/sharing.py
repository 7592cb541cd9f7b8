"""Memory of a device that another process of this machine writes into as if it were its own: CUDA IPC, as torch has it."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing

_NAMED = "file_system"
"""Torch's way of sharing a CPU's memory with processes that are not each other's children."""


def share(tensor: torch.Tensor) -> bytes:
    """For `open_shared` in another process, as long as the tensor lives. Raises RuntimeError where the device, its driver or the container
    that it is in has no way to do so."""
    if tensor.device.type == "cpu":
        torch.multiprocessing.set_sharing_strategy(_NAMED)  # type: ignore[no-untyped-call]
    return bytes(ForkingPickler.dumps(tensor))


def open_shared(handle: bytes) -> torch.Tensor:
    """The tensor's memory, on its owner's device. To be opened once and for good; `handle` is trusted as code is. Raises RuntimeError as
    `share` does, and when the owner is gone."""
    tensor = pickle.loads(handle)
    assert isinstance(tensor, torch.Tensor)
    return tensor
