"""Memory of a device, written by a process that is nobody's child or parent in torch's eyes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from engine.device.sharing import open_shared, share

WRITER = """
import sys, torch
from engine.device.sharing import open_shared
buffers = open_shared(sys.stdin.buffer.read())
buffers[1, :2].copy_(torch.full((2, 5), 3.0))
if buffers.is_cuda:
    torch.cuda.synchronize(buffers.device)
"""
OWNER = """
import sys, torch
from engine.device.sharing import share
sys.stdout.buffer.write(share(torch.zeros(4)))
"""


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")])],
)
def test_what_another_process_writes_is_there(device: str) -> None:
    buffers = torch.zeros(3, 4, 5, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        buffers.zero_()
        subprocess.run([sys.executable, "-c", WRITER], input=share(buffers), check=True)
        assert bool((buffers[1, :2] == 3).all()) and int((buffers != 0).sum()) == 10


def test_memory_whose_owner_is_gone_cannot_be_opened() -> None:
    handle = subprocess.run([sys.executable, "-c", OWNER], capture_output=True, check=True).stdout
    with pytest.raises(RuntimeError):
        open_shared(handle)
