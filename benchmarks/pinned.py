"""Ours beside a peer, with either kept to one core and with either free to use all of them.

Some bindings hand each call to a thread of their own. Where that thread is woken on another core, the call costs what waking it costs, and
most of what is measured is that. So the comparison that counts is the one on one core; the other stands beside it, and so does the cost of
a call that does nothing, in either. It is subtracted from nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.driven import Bench, Driver, Job, Scale, compared
from benchmarks.results import Row

PINNED, FREE = "one core", "all cores"


@dataclass(frozen=True, slots=True)
class Operation:
    """What both drivers are asked to do, `times` times a round."""

    name: str
    row: str
    times: int
    scale: Scale
    wanted: float | None = None
    """Of the ratio on one core."""


def on_one_core_and_all(ours: Driver, peer: Driver, count: int, size: int, operations: Sequence[Operation]) -> tuple[list[Row], list[str]]:
    """Both drivers twice, all four measured in turn in every round. Returns also why the peer was left out."""
    jobs = [
        [Job(replace(driver, name=f"{driver.name}, {where}", pinned=where == PINNED), count, size) for where in (PINNED, FREE)]
        for driver in (ours, peer)
    ]
    rows = []
    with Bench(*jobs) as bench:
        for operation in operations:
            seconds = bench.rounds(operation.name, operation.times)
            for where in (PINNED, FREE):
                mine, theirs = seconds[f"{ours.name}, {where}"], seconds.get(f"{peer.name}, {where}")
                if theirs is not None:
                    wanted = operation.wanted if where == PINNED else None
                    rows.append(replace(compared(operation.row, operation.scale, mine, theirs, peer.name, wanted), case=where))
    return rows, bench.left_out
