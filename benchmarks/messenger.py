"""Messenger beside the Mooncake Transfer Engine, NIXL, a bare socket loop and memcpy (`make bench-messenger`, after `make peers`)."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.driven import OURS, Bench, Driver, Job, compared, console, microseconds, others_at_work, rate, with_remarks, within
from benchmarks.results import Row, show, write

KIB, MIB = 1 << 10, 1 << 20

TCP = Driver("Springtide, tcp", "messenger_pair", OURS, ("tcp",), over_tcp=True)
SHM = Driver("Springtide, shm", "messenger_pair", OURS, ("shm",))
MOONCAKE = Driver("Mooncake TE, tcp", "mooncake_te", over_tcp=True)
NIXL_TCP = Driver("NIXL, tcp", "nixl_ucx", environment={"UCX_TLS": "tcp"}, over_tcp=True)
NIXL = Driver("NIXL, default", "nixl_ucx")
SOCKETS = Driver("socket loop", "socket_loop", OURS, over_tcp=True)
MEMCPY = Driver("one memcpy", "memcpy", OURS)


@dataclass(frozen=True, slots=True)
class Case:
    """`count` slices of `size` bytes in one batch, `times` batches a round; what each peer's ratio is wanted to be."""

    name: str
    count: int
    size: int
    times: int
    ours: Driver
    wanted: tuple[tuple[Driver, float], ...]
    latency: bool = False
    slice_limit_us: float | None = None
    """What one of the slices may cost."""


OVER_TCP = ((MOONCAKE, 1.5), (NIXL_TCP, 1.2), (SOCKETS, 0.9))
FASTER_OVER_TCP = ((MOONCAKE, 1.0), (NIXL_TCP, 1.0))
CASES = (
    Case("64 x 256 KiB", 64, 256 * KIB, 8, TCP, OVER_TCP),
    Case("64 MiB", 1, 64 * MIB, 5, TCP, OVER_TCP),
    Case("4 KiB", 1, 4 * KIB, 500, TCP, FASTER_OVER_TCP, latency=True),
    Case("4 KiB", 1, 4 * KIB, 500, SHM, ((NIXL, 1.0),), latency=True),
    Case("64 x 256 KiB", 64, 256 * KIB, 20, SHM, ((MEMCPY, 0.8),)),
    Case("64 MiB", 1, 64 * MIB, 10, SHM, ((MEMCPY, 0.8),)),
    Case("1000 x 48 KiB", 1000, 48 * KIB, 10, SHM, ((MEMCPY, 0.8),), slice_limit_us=20.0),
)
HEADLINES = ("tcp, 64 x 256 KiB write", "shm, 64 x 256 KiB write")
NOTES = (
    "Two processes on this machine on every side (memcpy: one). A batch's slices lie apart in memory, in another order there than "
    "here. What is timed begins with the call and ends when the bytes are in place: ours `Connection.write` and `read`; Mooncake's "
    "`(batch_)transfer_sync_write` and `read`; NIXL's make_prepped_xfer, transfer, polling and release, its descriptor lists prepared"
    " beforehand (tcp: its UCX backend with UCX_TLS=tcp; default: with what UCX chooses on one host); the socket loop's bytes over "
    "one connection, and for a write a byte back. Bytes are compared once each way before the first measurement. A round's figure is "
    "the median of its repetitions, all systems are measured in every round, and whoever is not being measured is stopped (SIGSTOP)."
)


def run(case: Case) -> tuple[list[Row], list[str]]:
    """The rows of a case, and why peers were left out."""
    transport, num_bytes = case.ours.arguments[0], case.count * case.size
    scale = microseconds() if case.latency else rate(num_bytes)
    rows = []
    peers = [Job(peer, case.count, case.size) for peer, _ in case.wanted]
    with Bench([Job(case.ours, case.count, case.size)], peers) as bench:
        for operation in ("write", "read"):
            seconds = bench.rounds(operation, case.times)
            ours, name = seconds[case.ours.name], f"{transport}, {case.name} {operation}"
            rows += [
                compared(name, scale, ours, seconds[peer.name], peer.name, wanted) for peer, wanted in case.wanted if peer.name in seconds
            ]
            if case.slice_limit_us is not None:
                each_us = [microseconds(case.count).figure(seconds) for seconds in ours]
                rows.append(within(f"{name}, a slab", "us", each_us, case.slice_limit_us))
    return rows, bench.left_out


def main() -> None:
    remark = others_at_work()
    rows, left_out = [], []
    for case in CASES:
        console.print(f"{case.ours.name}: {case.name}")
        of_case, reasons = run(case)
        rows += of_case
        left_out += reasons
    show("Messenger", rows)
    print(write("messenger", "make bench-messenger", rows, with_remarks(NOTES, left_out, remark), HEADLINES))


if __name__ == "__main__":
    main()
