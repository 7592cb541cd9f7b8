"""The index of the pool: memory and rates at ten million blocks, and beside others' indexes (`make bench-index`, after `make peers`)."""

from __future__ import annotations

import json
import subprocess

from benchmarks.driven import CHECKOUT, OURS, Driver, Scale, console, microseconds, others_at_work, with_remarks, within
from benchmarks.drivers.prompts import LOOKED_UP
from benchmarks.filled_pool import LOOK_UPS, Figures
from benchmarks.pinned import PINNED, Operation, on_one_core_and_all
from benchmarks.results import Row, show, write

BLOCKS = 100
"""Of each prompt."""
FULL, COMPARED = 10_000_000, 1_000_000
MEMORY_LIMIT_GIB = 2.0
TIMES = 10
MEMORY, COMPARED_LOOK_UPS = "memory, 10 million blocks", f"look-ups of {BLOCKS} blocks, 1 million held"
NOTES = (
    f"Prompts of {BLOCKS} blocks that have nothing in common, stored through the pool (acquire, commit, release) with the default policy. "
    "Memory: what the process grows by from before the pool is made until it is full, the table of slots and generations included. "
    f"Look-up: the longest held prefix of a prompt that is held in full, {LOOK_UPS} of them, of prompts chosen at random. Beside others: "
    f"{COMPARED} blocks each, all in one process with the caller. Dynamo's RadixTree answers with how many "
    "blocks each worker has (here one), not with the blocks, and has keys of 64 bits. Its Python binding hands each call to a thread, as "
    "the router in Rust that it is made for does not. So either side is kept to one core, and a call that does nothing is shown as "
    "well: the look-up of a prompt without blocks. Beside it, both free to use all cores."
)


def filled(num_blocks: int) -> Figures:
    command = [OURS, "-m", "benchmarks.filled_pool", str(num_blocks // BLOCKS), str(BLOCKS)]
    return Figures(**json.loads(subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, check=True).stdout))


def at_ten_million() -> list[Row]:
    figures = filled(FULL)
    return [
        within(MEMORY, "GiB", [figures.memory_bytes / (1 << 30)], MEMORY_LIMIT_GIB),
        Row(f"look-ups of {BLOCKS} blocks, 10 million held", "1/s", figures.look_ups_per_s),
        Row("the same, p50", "us", figures.look_up_p50_s * 1e6),
        Row("the same, p99", "us", figures.look_up_p99_s * 1e6),
        Row("storing while there is room", "blocks/s", figures.stored_per_s),
        Row("storing when full, each evicting another", "blocks/s", figures.replaced_per_s),
    ]


def look_ups() -> tuple[list[Row], list[str]]:
    """The rows of look-ups, and why the peer was left out."""
    ours, peer = Driver("Springtide", "index_springtide", OURS), Driver("Dynamo RadixTree", "index_dynamo")
    operations = [
        Operation("look_up", COMPARED_LOOK_UPS, TIMES, Scale("1/s", LOOKED_UP)),
        Operation("empty", "a look-up of no blocks", TIMES, microseconds(LOOKED_UP)),
    ]
    return on_one_core_and_all(ours, peer, COMPARED // BLOCKS, BLOCKS, operations)


def main() -> None:
    remark = others_at_work()
    console.print("look-ups beside others")
    rows, left_out = look_ups()
    console.print("ten million blocks; takes some minutes")
    rows += at_ten_million()
    show("index", rows)
    print(write("index", "make bench-index", rows, with_remarks(NOTES, left_out, remark), (MEMORY, f"{COMPARED_LOOK_UPS}: {PINNED}")))


if __name__ == "__main__":
    main()
