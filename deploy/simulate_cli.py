"""`springtide simulate`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.options import SettingsOption, names_of, parse_settings
from springtide.choices import AdmissionName, MachineName, PolicyName, RoutingName, WorkloadName


def simulate(
    trace: Annotated[Path | None, typer.Option(help="JSONL of the Mooncake project or CSV; without one, --workload")] = None,
    workload: Annotated[str, typer.Option(help=f"generated when there is no trace: {names_of(WorkloadName)}")] = "chat",
    rate: Annotated[float, typer.Option(min=0.0001, help="requests a second of a generated workload")] = 3.0,
    duration: Annotated[float, typer.Option(min=1.0, help="seconds of a generated workload")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="of a generated workload")] = 0,
    requests: Annotated[int | None, typer.Option(min=1, help="only the first so many")] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="requests arrive so many times as fast")] = 1.0,
    instances: Annotated[int, typer.Option(min=0, help="so many that prefill, decode or do both, as each request is served best")] = 0,
    prefill: Annotated[int | None, typer.Option(min=0, help="prefill instances; default: 8, none with --instances")] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="decode instances; the same")] = None,
    coupled: Annotated[
        int, typer.Option(min=0, help="instead, so many of the other architecture (continuous batching, chunked prefill)")
    ] = 0,
    routing: Annotated[str, typer.Option(help=f"to the coupled instances: {names_of(RoutingName)}")] = "cache-aware",
    policy: Annotated[str, typer.Option(help=names_of(PolicyName))] = "kvcache-centric",
    admission: Annotated[str, typer.Option(help=names_of(AdmissionName))] = "early-rejection-predicted",
    hardware: Annotated[str, typer.Option(help=f"{names_of(MachineName)}, or a file of `springtide profile`")] = "a100-llama2-70b",
    ttft_slo: Annotated[float, typer.Option(min=0.001, help="seconds; the paper's by default")] = 30.0,
    tbt_slo: Annotated[float, typer.Option(min=0.001, help="seconds a token; the paper's by default")] = 0.1,
    block_tokens: Annotated[int, typer.Option(min=8, max=1024, help="tokens of a KV block; 512 in JSONL traces")] = 512,
    prefill_cache: Annotated[int | None, typer.Option(min=1, help="tokens of KV of a prefill node; default: the hardware's")] = None,
    decode_cache: Annotated[int | None, typer.Option(min=1, help="tokens of KV of a decode node; default: the hardware's")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="write summary, series and requests here")] = None,
    report: Annotated[Path | None, typer.Option(help="write a page with pictures here: one HTML file")] = None,
    set_: SettingsOption = None,
) -> None:
    """Play a trace at cluster scale, in virtual time, through the very schedulers that serve."""
    from deploy.commands.simulate import SimulateOptions
    from deploy.commands.simulate import simulate as run

    apart = 0 if instances else 8
    config = {
        "conductor.policy": policy,
        "conductor.admission": admission,
        "slo.ttft_ms": 1000 * ttft_slo,
        "slo.tbt_ms": 1000 * tbt_slo,
        **parse_settings(set_),
    }
    run(
        SimulateOptions(
            trace=trace,
            workload=workload,
            rate=rate,
            duration_s=duration,
            seed=seed,
            requests=requests,
            speed=speed,
            instances=instances,
            prefill=apart if prefill is None else prefill,
            decode=apart if decode is None else decode,
            coupled=coupled,
            routing=routing,
            hardware=hardware,
            block_tokens=block_tokens,
            prefill_tokens=prefill_cache,
            decode_tokens=decode_cache,
            config=config,
            json=json,
            report=report,
        )
    )
