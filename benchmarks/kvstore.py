"""The KV store beside Mooncake Store and Valkey (`make bench-kvstore`, after `make peers`)."""

from __future__ import annotations

from benchmarks.driven import OURS, Bench, Driver, Job, compared, console, microseconds, others_at_work, rate, with_remarks
from benchmarks.results import Row, show, write

COUNT = 64
LAYERS, KV_HEADS = 30, 3
"""Of SmolLM2-135M-Instruct: a block of 64 tokens in bfloat16 takes 1.4 MiB."""
SLAB_BYTES_PER_HEAD = 16 << 10
"""Of one KV head: 64 tokens, K and V, 64 numbers of two bytes."""
PEERS = (Driver("Mooncake Store", "mooncake_store", over_tcp=True), Driver("Valkey", "valkey_store", over_tcp=True))
WANTED = 1.5
TIMES = 4

HIT_GEOMETRIES = {"0.1 MiB": (2, 3), "1.4 MiB": (LAYERS, KV_HEADS), "8 MiB": (32, 16)}
"""Layers and KV heads of ever larger blocks; the first is what the others are compared with."""
HIT_TIMES = 100
HIT_WANTED = 0.8
"""The cost of a hit must not grow with the size of the block: what is left for noise."""

PUT, GET = (f"{operation} of {COUNT} x 1.4 MiB" for operation in ("put", "get"))
NOTES = (
    f"put and get of {COUNT} blocks of 1.4 MiB between two processes on this machine, over TCP, no replica and nothing persisted. "
    "Ours: put is a hand-over of blocks from one store's arena to another store, from the reservation there until they are committed "
    "and found by everybody; get is an acquire of a prefix that only the other store holds, from the command until every layer is in "
    "the own arena and committed (lease, read, eviction of what makes room). Mooncake Store: batch_put_from and batch_get_into of a "
    "client with registered memory and no segment, a store process with a segment, and the master. Valkey: MSET and MGET of the redis"
    " client with hiredis; MGET ends with bytes objects, and copying them to where they are wanted is not counted. Keys are new to "
    "the store in every put. Local hit: an engine's acquire of a prefix that its own store holds, from the command until the engine "
    "may read the blocks where they lie. Bytes are compared before the first measurement; all systems are measured in every round, "
    "and whoever is not being measured is stopped (SIGSTOP)."
)


def springtide(name: str, layers: int, kv_heads: int) -> Job:
    driver = Driver(name, "springtide_store", OURS, (str(layers), str(kv_heads)), over_tcp=True)
    return Job(driver, COUNT, layers * kv_heads * SLAB_BYTES_PER_HEAD)


def puts_and_gets() -> tuple[list[Row], list[str]]:
    """The rows of both, and why peers were left out."""
    ours = springtide("Springtide", LAYERS, KV_HEADS)
    rows = []
    with Bench([ours], [Job(peer, COUNT, ours.size) for peer in PEERS]) as bench:
        for row, operation in ((PUT, "put"), (GET, "get")):
            seconds = bench.rounds(operation, TIMES)
            rows += [
                compared(row, rate(ours.num_bytes), seconds["Springtide"], seconds[peer.name], peer.name, WANTED)
                for peer in PEERS
                if peer.name in seconds
            ]
    return rows, bench.left_out


def hits() -> list[Row]:
    with Bench([springtide(name, layers, kv_heads) for name, (layers, kv_heads) in HIT_GEOMETRIES.items()]) as bench:
        seconds = bench.rounds("hit", HIT_TIMES)
    smallest, *larger = seconds
    return [
        compared(f"local hit of {COUNT} x {name}", microseconds(), seconds[name], seconds[smallest], f"{COUNT} x {smallest}", HIT_WANTED)
        for name in larger
    ]


def main() -> None:
    remark = others_at_work()
    console.print("put and get")
    rows, left_out = puts_and_gets()
    console.print("local hits")
    rows += hits()
    show("KV store", rows)
    print(write("kvstore", "make bench-kvstore", rows, with_remarks(NOTES, left_out, remark), (PUT, GET)))


if __name__ == "__main__":
    main()
