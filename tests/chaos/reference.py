"""What every request is answered on a calm cluster, and by a model that differs from it by little more than rounding."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.chaos.client import Clients
from tests.chaos.history import Answer, Exchange
from tests.chaos.workload import Item

AT_ONCE = 4
NUDGE = 2e-5
"""By which weights are off, as a share of each: logits are by some ten times what the order of float32 sums makes of them. One that is off
as much to the other side goes with it, so that one of both decides a draw the other way."""


async def calm_answers(clients: Clients, gateway: str, items: Sequence[Item]) -> dict[str, Answer]:
    """By item; of one with a deadline, as if it had none."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def ask(item: Item) -> Exchange:
        async with turns:
            return await clients.send("reference", gateway, item.undisturbed)

    exchanges = await asyncio.gather(*map(ask, items))
    return {exchange.item.key: exchange.answer for exchange in exchanges}


def nudged(model: Path, path: Path, sign: int) -> Path:
    """Writes the model once more, with weights that are a little off to one side or, with the other sign, to the other. Returns `path`."""
    shutil.copytree(model, path)
    generator = torch.Generator().manual_seed(0)
    for file in sorted(path.glob("*.safetensors")):
        weights = load_file(file)
        for name in sorted(weights):
            weights[name] *= 1 + sign * NUDGE * torch.randn(weights[name].shape, generator=generator)
        save_file(weights, file, metadata={"format": "pt"})
    return path
