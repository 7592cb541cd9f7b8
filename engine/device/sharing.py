"""Memory of a device that another process of this machine writes into as if it were its own: CUDA IPC, as torch has it."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing  # it teaches the pickler what a tensor's memory is


def share(tensor: torch.Tensor) -> bytes:
    """For `open_shared` in another process, as long as the tensor lives. Raises RuntimeError where the device, its driver or the container
    that it is in has no way to do so."""
    return bytes(ForkingPickler.dumps(tensor))


def open_shared(handle: bytes) -> torch.Tensor:
    """The tensor's memory, on its owner's device. Each handle is opened once, and trusted as code is. Raises RuntimeError as
    `share` does, and when the owner is gone."""
    tensor = pickle.loads(handle)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def put(activations: torch.Tensor, target: torch.Tensor) -> None:
    """Returns when they are in `target`, on whatever device that is."""
    target.copy_(activations)
    if activations.is_cuda:
        torch.cuda.synchronize(activations.device)
