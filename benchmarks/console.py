"""What the console costs a browser (`make bench-console`): script of each frame and memory of its page, view by view, before a cluster of
1,000 instances with 50 requests a second.

An hour of the cluster is played, of which the last part in real time before a page that is open; the page has the history of the whole.
`make bench-console ARGS="--live 60 --hour 120"` is a shorter look; the file of results is written by runs of five minutes and an hour,
or more. `--live 3600` has the page open for the whole hour.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.results import LIMIT, Row, show, write
from tests.support.browser import Page, browser
from tests.support.console_pictures import STARTED, VIEWS, played
from tests.support.console_pictures import show as show_view
from tests.support.played_cluster import PlayedCluster

INSTANCES = 1000
RATE = 50.0
HOUR_S, LIVE_S = 3600.0, 300.0
SCRIPT_LIMIT_MS, MEMORY_LIMIT_MB = 16.0, 150.0
CATEGORIES = ("devtools.timeline", "disabled-by-default-devtools.timeline", "v8")
SCRIPT = frozenset(
    ("FunctionCall", "EvaluateScript", "RunMicrotasks", "v8.compile", "v8.compileModule", "v8.evaluateModule", "MinorGC", "MajorGC")
)
"""What the browser calls the running of scripts; collecting their garbage is part of it."""
FRAME = "Commit"
KEEP_DRAWING = "(() => { const on = () => requestAnimationFrame(on); on(); })()"
"""So that there are frames where nothing changes, too."""
NOTES = (
    f"{INSTANCES} instances, half of either role, {RATE:g} requests/s of three tenants, played to a Conductor's own core and services; a "
    "gateway before it; Chromium, headless and without a GPU, on the same machine and its cores. The page is at one view after another, "
    "1440 x 900 pixels, and is never loaded anew. A frame's script is all that ran since the frame before, garbage collected meanwhile "
    "included, by Chromium's own trace: the time of the page's thread on a processor; beside it, by the clock, in which others on the "
    "same cores had turns. A view's first frames, in which it is made, are among its frames. Memory is the heap of the scripts, what "
    "the browser keeps for the page's elements and buffers, after a collection; the highest is of looks once a second without one."
)


@dataclass(frozen=True, slots=True)
class Frames:
    """Milliseconds of script of each frame of a view: on a processor, and by the clock."""

    cpu: Sequence[float]
    wall: Sequence[float]


def frames_of(events: Iterable[Mapping[str, Any]]) -> Frames:
    """From the events of a trace: of the thread that has most of scripts. What runs within what runs is counted once."""
    threads: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for event in events:
        if event["name"] == FRAME or (event["name"] in SCRIPT and event["ph"] == "X"):
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    if not threads:
        return Frames((), ())
    own = max(threads.values(), key=len)
    cpu, wall, until = [0.0], [0.0], 0.0
    for event in sorted(own, key=lambda event: (event["ts"], -event.get("dur", 0))):
        if event["name"] == FRAME:
            cpu.append(0.0)
            wall.append(0.0)
        elif event["ts"] >= until:
            until = event["ts"] + event.get("dur", 0)
            wall[-1] += event.get("dur", 0) / 1000
            cpu[-1] += event.get("tdur", event.get("dur", 0)) / 1000
    return Frames(cpu, wall)


async def memory_mb(page: Page) -> float:
    used = await page.call("Runtime.getHeapUsage")
    return sum(used.get(name, 0) for name in ("usedSize", "embedderHeapUsedSize", "backingStorageSize")) / 1e6


async def collected_mb(page: Page) -> float:
    await page.call("HeapProfiler.collectGarbage")
    return await memory_mb(page)


async def watch(page: Page, view: str, seconds: float) -> tuple[Frames, float]:
    """The frames of so many seconds at the view, and the most memory that was seen."""
    highest, until = 0.0, time.monotonic() + seconds
    async with page.traced(CATEGORIES) as events:
        await show_view(page, view)
        while (left := until - time.monotonic()) > 0:
            highest = max(highest, await memory_mb(page))
            await asyncio.sleep(min(1.0, left))
    return frames_of(events), highest


async def measured(arguments: argparse.Namespace) -> list[Row]:
    cluster = PlayedCluster(arguments.instances // 2, arguments.instances // 2, rate=arguments.rate)
    began = time.monotonic()
    cluster.play(max(20.0, arguments.hour - arguments.live))
    print(f"played {arguments.hour - arguments.live:g} s of the cluster in {time.monotonic() - began:.0f} s", flush=True)
    seen: dict[str, Frames] = {}
    highest = 0.0
    async with played(cluster) as url, browser() as chromium, chromium.page(f"{url}/console") as page:
        await page.until(STARTED)
        await page.run(KEEP_DRAWING)
        first = await collected_mb(page)
        for view in VIEWS:
            seen[view], most = await watch(page, view, arguments.live / len(VIEWS))
            highest = max(highest, most)
            cpu, wall = seen[view].cpu, seen[view].wall
            print(f"{view}: {len(cpu)} frames, p99 {_p99(cpu):.2f} ms, max {max(cpu):.1f} ms, by the clock {max(wall):.1f}", flush=True)
        last = await collected_mb(page)
        assert not page.errors, page.errors
    rows = [row for view, frames in seen.items() for row in rows_of(view, frames)]
    rows.append(_row("memory, at the start", "MB", first, MEMORY_LIMIT_MB))
    rows.append(_row("memory, at the end", "MB", last, MEMORY_LIMIT_MB))
    rows.append(_row("memory, highest", "MB", highest, MEMORY_LIMIT_MB))
    return rows


def rows_of(view: str, frames: Frames) -> list[Row]:
    return [
        _row("script a frame, median", "ms", float(np.median(frames.cpu)), None, view),
        _row("script a frame, p99", "ms", _p99(frames.cpu), SCRIPT_LIMIT_MS, view),
        _row("script a frame, max", "ms", max(frames.cpu), SCRIPT_LIMIT_MS, view),
        _row("script a frame, max by the clock", "ms", max(frames.wall), None, view),
    ]


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))


def _row(name: str, unit: str, value: float, limit: float | None, case: str = "") -> Row:
    if limit is None:
        return Row(name, unit, value, case=case)
    return Row(name, unit, value, None, limit, LIMIT, limit / max(value, 1e-3), 1.0, value <= limit, case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=INSTANCES)
    parser.add_argument("--rate", type=float, default=RATE, help="requests a second")
    parser.add_argument("--hour", type=float, default=HOUR_S, help="seconds of the cluster that are played in all")
    parser.add_argument("--live", type=float, default=LIVE_S, help="the last of these, in real time, before the page")
    arguments = parser.parse_args()
    rows = asyncio.run(measured(arguments))
    show("console", rows)
    whole = (arguments.instances, arguments.rate) == (INSTANCES, RATE)
    if whole and arguments.hour >= HOUR_S and arguments.live >= LIVE_S:
        headlines = [row.label for row in rows if row.row in ("script a frame, max", "memory, highest")]
        print(write("console", "make bench-console", rows, NOTES, headlines))


if __name__ == "__main__":
    main()
