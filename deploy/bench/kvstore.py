"""`springtide bench kvstore`: a trace under every eviction policy at several capacities, as a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from deploy.bench.replay import Replayed, TracedPrompt, infinite_hits, read_trace, replay, replay_clairvoyant
from deploy.machine import describe_machine
from kvstore.core.eviction import EVICTION_POLICIES, new_policy
from springtide.choices import EvictionName

OPTIMUM = "Belady's optimum"
Runs = dict[str, dict[int, Replayed]]
"""By policy and capacity."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    path: Path
    capacities: Sequence[int]
    """In blocks."""
    as_json: bool


def bench_kvstore(options: TraceOptions) -> None:
    """Raises ConfigError when the file is no trace."""
    requests = read_trace(options.path)
    runs = _run_all(requests, options.capacities)
    lookups = sum(len(request.keys) for request in requests)
    infinite = infinite_hits(requests) / lookups
    if options.as_json:
        print(json.dumps(_document(options.path, len(requests), lookups, infinite, runs), indent=2))
    else:
        console = Console(highlight=False)
        console.print(f"{options.path.name}: {len(requests)} requests, {lookups} blocks looked up. Hit rates by capacity in blocks:")
        console.print(_table(options.capacities, infinite, runs))
        for capacity, run in runs[OPTIMUM].items():
            if run.refused_requests:
                console.print(f"{run.refused_requests} requests are longer than {capacity:,} blocks, hence all misses there")


def _run_all(requests: Sequence[TracedPrompt], capacities: Sequence[int]) -> Runs:
    replays: dict[str, Callable[[int, Callable[[int], None]], Replayed]] = {
        name: partial(_replay_policy, requests, name) for name in EVICTION_POLICIES
    }
    replays[OPTIMUM] = partial(replay_clairvoyant, requests)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    runs: Runs = {name: {} for name in replays}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(replays) * len(capacities) * len(requests))
        for capacity in capacities:
            for name, run in replays.items():
                progress.update(task, description=f"{name}, {capacity} blocks")
                runs[name][capacity] = run(capacity, partial(progress.advance, task))
    return runs


def _replay_policy(requests: Sequence[TracedPrompt], name: EvictionName, capacity: int, on_progress: Callable[[int], None]) -> Replayed:
    return replay(requests, capacity, new_policy(name, capacity), on_progress)


def _table(capacities: Sequence[int], infinite: float, runs: Runs) -> Table:
    table = Table()
    table.add_column("policy")
    for capacity in capacities:
        table.add_column(f"{capacity:,}", justify="right")
    table.add_column("infinite", justify="right")
    best = {capacity: max(run[capacity].hits for name, run in runs.items() if name != OPTIMUM) for capacity in capacities}
    for name, run in runs.items():
        if name == OPTIMUM:
            table.add_section()
        cells = [_cell(run[capacity], name != OPTIMUM and run[capacity].hits == best[capacity]) for capacity in capacities]
        table.add_row(name, *cells, f"{infinite:.2%}")
    return table


def _cell(run: Replayed, best: bool) -> str:
    return f"[bold]{run.hit_rate:.2%}[/]" if best else f"{run.hit_rate:.2%}"


def _document(path: Path, num_requests: int, lookups: int, infinite: float, runs: Runs) -> dict[str, object]:
    return {
        "trace": path.name,
        "machine": describe_machine(),
        "requests": num_requests,
        "lookups": lookups,
        "infinite_hit_rate": infinite,
        "runs": [
            {"policy": name, "capacity": capacity, "hit_rate": run.hit_rate, **asdict(run)}
            for name, by_capacity in runs.items()
            for capacity, run in by_capacity.items()
        ],
    }
