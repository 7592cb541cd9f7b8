"""`springtide simulate`: what a cluster would make of a workload, as a table, JSON and a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from deploy.options import names_of
from simulator.report import write_report
from simulator.run import Plan, find_hardware
from simulator.run import simulate as run
from simulator.workload import Workload, generate, read_trace
from springtide.choices import RoutingName
from springtide.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    trace: Path | None
    workload: str
    rate: float
    duration_s: float
    seed: int
    requests: int | None
    speed: float
    instances: int
    prefill: int
    decode: int
    coupled: int
    routing: str
    hardware: str
    block_tokens: int
    prefill_tokens: int | None
    decode_tokens: int | None
    config: Mapping[str, Any]
    json: Path | None
    report: Path | None


def simulate(options: SimulateOptions) -> None:
    """Raises ConfigError."""
    if not options.instances and not (options.prefill and options.decode) and not options.coupled:
        raise ConfigError("--prefill, --decode: a cluster without --instances needs one of each at least")
    console = Console(highlight=False)
    plan = Plan(
        workload=_workload(options),
        hardware=find_hardware(options.hardware),
        prefill=options.prefill,
        decode=options.decode,
        instances=options.instances,
        coupled=options.coupled,
        routing=_routing(options.routing),
        config=options.config,
        prefill_tokens=options.prefill_tokens,
        decode_tokens=options.decode_tokens,
    )
    with console.status(f"{len(plan.workload.requests)} requests of {plan.workload.name}"):
        result = run(plan)
    result["settings"]["speed"] = options.speed
    console.print(_table(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result))
        console.print(f"wrote {options.json}")
    if options.report is not None:
        write_report(result, options.report)
        console.print(f"wrote {options.report}")


def _workload(options: SimulateOptions) -> Workload:
    try:
        if options.trace is not None:
            workload = read_trace(options.trace, options.block_tokens)
        else:
            workload = generate(options.workload, options.rate, options.duration_s, options.seed, options.block_tokens)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if options.requests is not None:
        workload = workload.first(options.requests)
    return workload.sped_up(options.speed)


def _routing(name: str) -> RoutingName:
    known: tuple[RoutingName, ...] = get_args(RoutingName)
    for routing in known:
        if name == routing:
            return routing
    raise ConfigError(f"--routing: {name!r} is not {names_of(RoutingName)}")


def _table(result: Mapping[str, Any]) -> Table:
    summary, settings = result["summary"], result["settings"]
    cluster = f"{settings['coupled']} coupled" if "coupled" in settings else _split(settings)
    table = Table("", "", title=f"{cluster} on {settings['hardware']}, {settings['policy']}, {settings['admission']}", show_header=False)
    table.columns[1].justify = "right"
    reasons = ", ".join(f"{reason} {count}" for reason, count in summary["rejected_by_reason"].items())
    for name, value in (
        ("requests", f"{summary['requests']:,}"),
        ("completed", f"{summary['completed']:,}"),
        ("rejected", f"{summary['rejected']:,}" + (f" ({reasons})" if reasons else "")),
        (
            f"goodput (TTFT {settings['ttft_slo_ms'] / 1000:g} s, TBT {settings['tbt_slo_ms']:g} ms)",
            f"{summary['goodput_requests']:,}, {summary['goodput_per_s']:.2f}/s",
        ),
        ("TTFT mean, p50, p90, p99", _milliseconds(summary, "ttft_ms", ("mean", "p50", "p90", "p99"))),
        ("TBT p50, p90, p99", _milliseconds(summary, "tbt_ms", ("p50", "p90", "p99"))),
        ("prompt tokens from the cache", f"{summary['hit_rate']:.1%}"),
        ("virtual time, real time", f"{summary['duration_s']:,.0f} s, {summary['wall_s']:.1f} s"),
    ):
        table.add_row(name, value)
    return table


def _split(settings: Mapping[str, Any]) -> str:
    parts = {"prefill": settings["prefill"], "decode": settings["decode"], "without a split": settings["instances"]}
    return " + ".join(f"{count} {name}" for name, count in parts.items() if count)


def _milliseconds(summary: Mapping[str, Any], name: str, figures: tuple[str, ...]) -> str:
    values = [summary[f"{name}_{figure}"] for figure in figures]
    return ", ".join("-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in values) + " ms"
