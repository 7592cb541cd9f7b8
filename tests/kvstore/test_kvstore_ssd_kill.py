"""A store process that is killed in the midst of writes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ssd_support import open_tier, read
from ssd_writer import CAPACITY_BYTES

ROOT = Path(__file__).parents[2]


def killed_after(directory: Path, seed: int, lines: int) -> tuple[set[int], set[int]]:
    """Lets the writer say so many lines, kills it, and returns what it has put for sure and what it may have."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("ssd_writer.py")), str(directory), str(seed)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert writer.stdout is not None
    said = [writer.stdout.readline() for _ in range(lines)]
    writer.send_signal(signal.SIGKILL)
    said += writer.stdout.readlines()
    writer.communicate()
    held: set[int] = set()
    maybe: set[int] = set()
    for line in said:
        if not line.endswith("\n"):
            continue
        numbers = {int(number) for number in line[1:].split()}
        if line[0] in "+-":
            held -= numbers
            maybe |= numbers
        else:
            maybe -= numbers
            held |= numbers if line[0] == "=" else set()
    return held, maybe


@pytest.mark.parametrize("lines", [3, 40, 260, 333, 501])
async def test_a_killed_store_loses_at_most_what_was_not_acknowledged(tmp_path: Path, lines: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    held, maybe = killed_after(tmp_path, seed, lines)
    tier = await open_tier(tmp_path, CAPACITY_BYTES)
    keys = {int.from_bytes(own, "big") for own, _ in tier.blocks()}
    assert held <= keys <= held | maybe
    assert set(await read(tier, sorted(keys))) == {"right"}
    await tier.close()
