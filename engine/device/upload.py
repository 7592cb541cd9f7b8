"""Small arrays that the host makes for a pass, brought to the device together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Integers = np.ndarray[Any, np.dtype[np.int32]] | np.ndarray[Any, np.dtype[np.int64]] | Sequence[int]

Float32 = np.ndarray[Any, np.dtype[np.float32]]


def upload(arrays: Sequence[Integers], device: torch.device) -> list[torch.Tensor]:
    """As int64 tensors on `device`: to an accelerator in one copy, which the host does not wait for."""
    if device.type == "cpu":
        return [torch.from_numpy(np.asarray(array, np.int64)) for array in arrays]
    packed = torch.from_numpy(np.concatenate([np.asarray(array, np.int64) for array in arrays])).pin_memory()
    return list(packed.to(device, non_blocking=True).split([len(array) for array in arrays]))


def upload_floats(rows: Sequence[Sequence[float] | Float32], device: torch.device) -> torch.Tensor:
    """As one float64 tensor [rows, …] on `device`, in the same way."""
    packed = torch.from_numpy(np.asarray(rows, np.float64))
    return packed if device.type == "cpu" else packed.pin_memory().to(device, non_blocking=True)
