"""The CPU in the place of a card, for a whole process: `use()`; as a program, a stage of a prefill group that has it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine.device.base import Device
from node_runtime import devices
from prefill_node.stage import ring

MOST_PAGES = 200
Replace = Callable[[Any, str, Any], None]


def share(tensor: torch.Tensor) -> bytes:
    """As engine.device.memory does for a card's memory: torch shares a CPU's with children only."""
    descriptor, size = tensor.untyped_storage()._share_fd_cpu_()
    return json.dumps({"path": f"/proc/{os.getpid()}/fd/{descriptor}", "size": size, "shape": tensor.shape}).encode()


def open_shared(handle: bytes) -> torch.Tensor:
    fields = json.loads(handle)
    memory = torch.from_numpy(np.memmap(fields["path"], np.uint8, "r+", shape=(fields["size"],)))
    elements = int(np.prod(fields["shape"]))
    dtype = {2: torch.bfloat16, 4: torch.float32}[fields["size"] // elements]
    return memory.view(dtype).view(fields["shape"])


def use_sharing(replace: Replace = setattr) -> None:
    replace(ring, "share", share)
    replace(ring, "open_shared", open_shared)


def use(replace: Replace = setattr) -> None:
    """From now on every engine of this process that looks for a card finds one, and no activations may go through the host."""
    replace(devices, "count_cards", lambda kind: 1)
    replace(devices, "find", lambda kind, number=0, memory_share=1.0, step_graphs=0: Device(torch.device("cpu"), memory_share, MOST_PAGES))
    use_sharing(replace)
    replace(ring.Ring, "_slice", None)


if __name__ == "__main__":
    from prefill_node.stage.__main__ import main

    use()
    main()
