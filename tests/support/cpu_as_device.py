"""The CPU in the place of a card, for a whole process: `use()`; as a program, a stage of a prefill group that has it."""

from __future__ import annotations

import torch

from engine.device.base import Device
from node_runtime import devices

MOST_PAGES = 200


def use() -> None:
    """From now on every engine of this process that looks for a card finds one."""
    devices.count_cards = lambda kind: 1
    devices.find = lambda kind, number=0, memory_share=1.0, step_graphs=0: Device(torch.device("cpu"), memory_share, MOST_PAGES)


if __name__ == "__main__":
    from prefill_node.stage.__main__ import main

    use()
    main()
