"""A process that puts and removes blocks until it is killed: `python ssd_writer.py DIRECTORY SEED`. Says what it does: `+1 2 3` before and
`=1 2 3` after blocks were put, `-3 2` before and `~3 2` after they were removed."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from ssd_support import chain, key, open_tier

CHAIN = 6
CAPACITY_BYTES = 4 << 20


def say(what: str, numbers: list[int]) -> None:
    print(what + " ".join(map(str, numbers)), flush=True)


async def main(directory: Path, rng: random.Random) -> None:
    tier = await open_tier(directory, CAPACITY_BYTES)
    say("=", sorted(int.from_bytes(own, "big") for own, _ in tier.blocks()))
    chains: list[list[int]] = []
    first = 0
    while True:
        if tier.counts().free < CHAIN:
            gone = chains.pop(rng.randrange(len(chains)))[::-1]
            say("-", gone)
            await tier.remove([key(number) for number in gone])
            say("~", gone)
        first += CHAIN
        numbers = list(range(first, first + CHAIN))
        say("+", numbers)
        stored = await tier.put(chain(numbers))
        say("=", [number for number, held in zip(numbers, stored, strict=True) if held])
        chains.append(numbers)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), random.Random(int(sys.argv[2]))))
