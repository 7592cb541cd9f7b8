"""What gets into a device's memory: small arrays that the host makes for a pass, brought there together, and what another process of this
machine writes there as if it were its own (CUDA IPC, as torch has it)."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # it teaches the pickler what a tensor's memory is

Integers = np.ndarray[Any, np.dtype[np.int32]] | np.ndarray[Any, np.dtype[np.int64]] | Sequence[int]

Float32 = np.ndarray[Any, np.dtype[np.float32]]


def upload(arrays: Sequence[Integers], device: torch.device) -> list[torch.Tensor]:
    """Brings arrays as int64 tensors on `device`: to an accelerator in one copy, which the host does not wait for."""
    if device.type == "cpu":
        return [torch.from_numpy(np.asarray(array, np.int64)) for array in arrays]
    packed = torch.from_numpy(np.concatenate([np.asarray(array, np.int64) for array in arrays])).pin_memory()
    return list(packed.to(device, non_blocking=True).split([len(array) for array in arrays]))


def upload_floats(rows: Sequence[Sequence[float] | Float32], device: torch.device) -> torch.Tensor:
    """Brings rows as one float64 tensor [rows, …] on `device`, in the same way."""
    packed = torch.from_numpy(np.asarray(rows, np.float64))
    return packed if device.type == "cpu" else packed.pin_memory().to(device, non_blocking=True)


def share(tensor: torch.Tensor) -> bytes:
    """A handle for `open_shared` in another process, good as long as the tensor lives. Raises RuntimeError where the device, its driver or
    the container that it is in has no way to do so."""
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
