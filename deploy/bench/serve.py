"""`springtide bench serve`: runs a workload with a progress bar and reports."""

from __future__ import annotations

import asyncio
import json
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deploy.bench.driver import drive
from deploy.bench.statistics import Distribution, RequestRecord, Summary, summarize
from deploy.bench.workload import BenchWorkload
from deploy.local.plan import ClusterPaths
from deploy.local.rundir import find_cluster
from deploy.machine import describe_machine
from springtide.modelinfo import ModelInfo


@dataclass(frozen=True, slots=True)
class BenchOptions:
    url: str
    ca: Path | None
    model: str | None
    ttft_slo_ms: float
    tbt_slo_ms: float
    as_json: bool
    output: Path | None


def local_vocab_size(url: str) -> int | None:
    """The vocabulary of the model that this machine's cluster serves at `url`; None when the cluster runs elsewhere."""
    record = find_cluster(url)
    return ModelInfo.load(ClusterPaths(Path(record.run_dir)).model_info).vocab_size if record is not None else None


def bench_serve(workload: BenchWorkload, options: BenchOptions) -> int:
    """Returns the exit code: 0 when every request was answered in full. Raises Unavailable when nothing answers at `url`."""
    model, records = asyncio.run(_with_progress(workload, options))
    summary = summarize(records, options.ttft_slo_ms, options.tbt_slo_ms)
    document = json.dumps(
        {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "python": platform.python_version(),
            "model": model,
            "workload": asdict(workload),
            "results": asdict(summary),
        },
        indent=2,
    )
    if options.output is not None:
        options.output.write_text(document + "\n")
    if options.as_json:
        print(document)
    else:
        Console().print(_table(model, summary))
    return 0 if summary.completed == summary.requests else 1


async def _with_progress(workload: BenchWorkload, options: BenchOptions) -> tuple[str, list[RequestRecord]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[errors]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=workload.requests, errors="")
        failed = 0

        def on_done(record: RequestRecord) -> None:
            nonlocal failed
            failed += record.error is not None
            progress.update(task, advance=1, errors=f"[red]{failed} failed" if failed else "")

        return await drive(options.url, options.model, workload, on_done, ca=options.ca)


def _table(model: str, summary: Summary) -> Table:
    table = Table(title=f"{model}: {summary.completed} of {summary.requests} requests in {summary.duration_s:.1f} s")
    table.add_column("")
    for name in ("value", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    table.add_row("requests/s", f"{summary.requests_per_s:.2f}")
    table.add_row(
        f"goodput, requests/s (TTFT ≤ {summary.ttft_slo_ms:g} ms, TBT ≤ {summary.tbt_slo_ms:g} ms)", f"{summary.goodput_requests_per_s:.2f}"
    )
    table.add_row("output tokens/s", f"{summary.output_tokens_per_s:.1f}")
    table.add_row("prompt tokens/s", f"{summary.prompt_tokens_per_s:.1f}")
    share = summary.cached_tokens / summary.prompt_tokens if summary.prompt_tokens else 0.0
    table.add_row("cached prompt tokens", f"{summary.cached_tokens} ({share:.0%})")
    table.add_row("TTFT, ms (value: mean)", *_cells(summary.ttft_ms))
    table.add_row("TBT, ms (value: mean)", *_cells(summary.tbt_ms))
    for kind, count in sorted(summary.errors.items()):
        table.add_row(f"[red]error: {kind}", str(count))
    return table


def _cells(values: Distribution | None) -> list[str]:
    return ["-"] * 4 if values is None else [f"{value:.1f}" for value in (values.mean, values.p50, values.p90, values.p99)]
