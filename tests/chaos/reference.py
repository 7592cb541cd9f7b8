"""What every request is answered on a calm cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.chaos.client import Clients
from tests.chaos.history import Answer, Exchange
from tests.chaos.workload import Item

AT_ONCE = 4


async def calm_answers(clients: Clients, gateway: str, items: Sequence[Item]) -> dict[str, Answer]:
    """By item; of one with a deadline, as if it had none."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def ask(item: Item) -> Exchange:
        async with turns:
            return await clients.send("reference", gateway, item.undisturbed)

    exchanges = await asyncio.gather(*map(ask, items))
    return {exchange.item.key: exchange.answer for exchange in exchanges}
