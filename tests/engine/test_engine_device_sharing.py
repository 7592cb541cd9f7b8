"""Memory of a device, written by others than its owner."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from engine.device.memory import open_shared, put, share

WRITER = """
import sys, torch
from engine.device.memory import open_shared, put
put(torch.full((2, 5), 3.0, dtype=torch.bfloat16, device="cuda:0"), open_shared(sys.stdin.buffer.read())[1, :2])
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_what_another_process_writes_is_there() -> None:
    buffers = torch.zeros(3, 4, 5, dtype=torch.bfloat16, device="cuda:0")
    for _ in range(2):
        buffers.zero_()
        subprocess.run([sys.executable, "-c", WRITER], input=share(buffers), check=True)
        assert bool((buffers[1, :2] == 3).all()) and int((buffers != 0).sum()) == 10


def test_what_is_opened_is_the_memory_that_was_shared() -> None:
    """A CPU's, which torch lets its own process open."""
    buffers = torch.zeros(3, 4, 5, dtype=torch.bfloat16)
    opened = open_shared(share(buffers))
    put(torch.full((2, 5), 3.0), opened[1, :2])
    assert bool((buffers[1, :2] == 3).all()) and int((buffers != 0).sum()) == 10
