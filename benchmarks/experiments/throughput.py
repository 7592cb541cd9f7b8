"""Figures 9 to 11: disaggregated clusters beside coupled ones of as many instances, these with the chunk that is best for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.experiments.pages import Result, number, percent, play, table, write_page
from simulator.hardware import Hardware, load
from simulator.run import SIMULATED_CHUNK_TOKENS, Plan
from simulator.workload import Workload, generate


class Factors(NamedTuple):
    """Objectives as multiples of what a request alone takes; for 90% of first tokens."""

    name: str
    ttft: float
    tbt: float


PAPERS = Factors("", 10.0, 5.0)
"""Of figures 9 and 10."""
TIGHT = Factors("both objectives tight", 5.0, 2.0)
TIGHT_WORKLOADS = ("ArXiv summarization", "L-Eval")
TIGHT_GAIN = 1.3
"""What is wanted there over the better of both architectures (arXiv 2508.01989 has such gains)."""
TBT_PERCENTILES = 90, 99
"""Those of all times between tokens that are looked at. The paper's is 90."""
PICTURED = 90
SPEEDS = (1.0, 2.0, 3.0)
"""How many times as fast as it came the trace is played."""
LEAST_S, LEAST_REQUESTS = 600.0, 600
"""A run lasts until both have passed: with long prompts a queue takes its time to grow."""
CHUNKS = (256, 512, 1024, 2048, 4096, 8192)
"""Tokens that a coupled instance may have in a step."""
WHOLE_PROMPT_TOKENS = 1 << 17
WITHOUT_SPLIT = "Springtide [4]"
SPRINGTIDE: Mapping[str, Mapping[str, int]] = {
    "Springtide [3P+1D]": {"prefill": 3, "decode": 1},
    "Springtide [2P+2D]": {"prefill": 2, "decode": 2},
    WITHOUT_SPLIT: {"prefill": 0, "decode": 0, "instances": 4},
}
COUPLED, UNCHUNKED = "coupled [4M]", "unchunked [4M]"


def _in_chunks(chunk_tokens: int) -> str:
    return f"{COUPLED}, {chunk_tokens:,}"


CLUSTERS: Mapping[str, Mapping[str, int]] = {
    **SPRINGTIDE,
    **{_in_chunks(chunk_tokens): {"coupled": 4, "chunk_tokens": chunk_tokens} for chunk_tokens in CHUNKS},
    UNCHUNKED: {"coupled": 4, "chunk_tokens": WHOLE_PROMPT_TOKENS},
}
WORKLOADS: Mapping[str, tuple[str, Mapping[str, float], Sequence[float]]] = {
    "ArXiv summarization": ("poisson", {}, (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5)),
    "L-Eval": ("documents", {}, (1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0)),
    "16k": (
        "poisson",
        {"input_tokens": 16_384, "input_cv": 0.01, "output_tokens": 512, "output_cv": 0.01},
        (0.2, 0.4, 0.8, 1.0, 1.2, 1.5, 1.8, 2.1),
    ),
    "32k": (
        "poisson",
        {"input_tokens": 32_768, "input_cv": 0.01, "output_tokens": 512, "output_cv": 0.01},
        (0.1, 0.2, 0.4, 0.5, 0.6, 0.7, 0.9, 1.1),
    ),
    "64k": (
        "poisson",
        {"input_tokens": 65_536, "input_cv": 0.01, "output_tokens": 512, "output_cv": 0.01},
        (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5),
    ),
    "128k": (
        "poisson",
        {"input_tokens": 130_000, "input_cv": 0.001, "output_tokens": 512, "output_cv": 0.01},
        (0.02, 0.04, 0.06, 0.08, 0.1, 0.12, 0.16, 0.2),
    ),
}
"""Figure 9's two datasets by their mean lengths, figure 10's simulated ones: generator, options, requests a second."""
PAPER = {"ArXiv summarization": "+20%", "L-Eval": "+40%"} | dict.fromkeys(("16k", "32k", "64k", "128k"), "+50% to +525%")
"""arXiv 2407.00079, section 8.1."""

Found = Mapping[str, Mapping[int, float]]
"""System -> percentile of the times between tokens -> highest rate within the objectives."""


def run(trace: Workload, output: Path) -> None:
    hardware = load("a100-llama2-70b")
    parts: list[str] = []
    best = {}
    for name in WORKLOADS:
        best[name], part = _compare(name, hardware, output)
        parts += part
    parts += _real(trace, hardware)
    tight = {}
    for name in TIGHT_WORKLOADS:
        tight[name], part = _compare(name, hardware, output, TIGHT)
        parts += part
    parts += _tight(tight)
    write_page(output, "throughput", "Figures 9 to 11: throughput under objectives", [_preface(), *_overview(best), *parts])


def _preface() -> str:
    chunks = ", ".join(f"{chunk_tokens:,}" for chunk_tokens in CHUNKS)
    return (
        "LLaMA2-70B, instances of eight A100 each. `coupled`: each instance batches decoding with chunks of prefill and keeps a prefix "
        "cache beside its weights; requests go to the one with the least to do with them, what it has of their prefix counted. Its chunk "
        f"is the best of {chunks} tokens a step, for each workload and percentile by itself: the one with which the highest rate is "
        f"within the objectives (of several the smallest). Springtide's is not swept: {SIMULATED_CHUNK_TOKENS:,}. `unchunked` is `coupled` "
        "with whole prompts, as the paper's vLLM of 2024 had them. `[4]` has no split: each of its "
        "instances prefills, decodes or does both, as each request is served best. Springtide is told the objectives, which are as the "
        "paper sets them: 90% of first tokens within "
        f"{PAPERS.ttft:g} times, of the times between tokens within {PAPERS.tbt:g} times what a request alone takes."
    )


def _best_chunk(found: Found, percentile: int) -> int:
    return max(CHUNKS, key=lambda chunk_tokens: found[_in_chunks(chunk_tokens)][percentile])


def _overview(best: Mapping[str, Found]) -> list[str]:
    """`best`: by workload."""
    parts = ["Highest rate within the objectives, requests a second, of the rates that were tried; what `[4]` gains."]
    for percentile in TBT_PERCENTILES:
        rows = []
        for name, systems in best.items():
            most, chunk = WORKLOADS[name][2][-1], _best_chunk(systems, percentile)
            shown = {**dict.fromkeys(SPRINGTIDE, ""), _in_chunks(chunk): f" ({chunk:,})", UNCHUNKED: ""}
            rates = {system: systems[system][percentile] for system in shown}
            cells = [f"{rate:g}{'' if rate < most else ' or more'}{shown[system]}" for system, rate in rates.items()]
            ours = rates[WITHOUT_SPLIT]
            gains = [f"{ours / rates[peer] - 1:+.0%}" if rates[peer] else "-" for peer in (_in_chunks(chunk), UNCHUNKED)]
            rows.append([name, *cells, *gains, PAPER[name]])
        header = (
            "workload",
            *SPRINGTIDE,
            f"{COUPLED} (its best chunk)",
            UNCHUNKED,
            "over coupled",
            "over unchunked",
            "paper, over its vLLM",
        )
        parts += [f"{percentile}% of all times between tokens within the objective:", table(header, rows)]
    return [
        *parts,
        "How the percentiles tell. A chunk stalls decoding for about as long whatever the prompt that it is part of, and every token that "
        "is decoded meanwhile comes late by that: small chunks keep the objective and take more time in all. Whole prompts stall decoding "
        "for seconds, but seldom: nine tokens of ten may come in time all the same, which the 90th percentile takes for good service. The "
        "99th percentile shows the stalls, but not the rare ones of the longest prompts. The paper's baseline is the vLLM of its day, and "
        "we do not know over what its percentile of the times between tokens was taken. L-Eval's documents fit into the pool's DRAM and "
        "not beside the weights.",
    ]


def _plan(workload: Workload, hardware: Hardware, cluster: Mapping[str, int], objectives: Mapping[str, float] | None = None) -> Plan:
    cluster = dict(cluster)
    chunk_tokens = cluster.pop("chunk_tokens", SIMULATED_CHUNK_TOKENS)
    config = {"conductor.admission": "baseline", "prefill_node.chunk_tokens": chunk_tokens, **(objectives or {})}
    return Plan(workload, hardware, config=config, **cluster)


def _tight(best: Mapping[str, Found]) -> list[str]:
    """`best`: by workload."""
    splits = [system for system in SPRINGTIDE if system != WITHOUT_SPLIT]
    rows = []
    for name, systems in best.items():
        for percentile in TBT_PERCENTILES:
            rates = {system: systems[system][percentile] for system in (*CLUSTERS,)}
            split, coupled = max(splits, key=rates.__getitem__), max((*map(_in_chunks, CHUNKS), UNCHUNKED), key=rates.__getitem__)
            ours, other = rates[WITHOUT_SPLIT], max(rates[split], rates[coupled])
            gain = f"{ours / other:.2f}" if other else "-"
            met = "yes" if ours >= TIGHT_GAIN * other and ours else "no"
            cells = f"{ours:g}", f"{rates[split]:g} ({split})", f"{rates[coupled]:g} ({coupled})"
            rows.append([name, f"p{percentile}", *cells, gain, f"{TIGHT_GAIN:g}", met])
    header = ("workload", "TBT at", WITHOUT_SPLIT, "the best split", "the best coupled", "over the better", "wanted", "met")
    return [
        "## Both objectives tight",
        f"TTFT within {TIGHT.ttft:g} times, TBT within {TIGHT.tbt:g} times what a request alone takes. An architecture has to be good at "
        "both then: coupled instances keep the time between tokens only by chunks that are too small for the first token, and a split has "
        "the first token wait while those who decode could prefill. Highest rate within the objectives, requests a second:",
        table(header, rows),
    ]


def _compare(name: str, hardware: Hardware, output: Path, factors: Factors = PAPERS) -> tuple[Found, list[str]]:
    """What was found, and the page's part."""
    kind, options, rates = WORKLOADS[name]
    workloads = {rate: generate(kind, rate, max(LEAST_S, LEAST_REQUESTS / rate), seed=7, **options) for rate in rates}
    alone = generate(kind, 0.01, 3000.0, seed=7, **options)
    undisturbed = play({"alone": _plan(alone, hardware, next(iter(SPRINGTIDE.values())))})["alone"]["summary"]
    ttft_ms, tbt_ms = factors.ttft * undisturbed["ttft_ms_p50"], factors.tbt * undisturbed["tbt_ms_p50"]
    title = f"{name}, {factors.name}" if factors.name else name
    objectives = {"slo.ttft_ms": ttft_ms, "slo.tbt_ms": tbt_ms}
    plans = {
        f"{system} {rate:g}": _plan(workload, hardware, cluster, objectives)
        for system, cluster in CLUSTERS.items()
        for rate, workload in workloads.items()
    }
    results = play(plans)
    good = {
        system: {
            percentile: [rate for rate in rates if _within(results[f"{system} {rate:g}"], ttft_ms, tbt_ms, percentile)]
            for percentile in TBT_PERCENTILES
        }
        for system in CLUSTERS
    }
    best = {system: {percentile: max(found, default=0.0) for percentile, found in by.items()} for system, by in good.items()}
    chosen = dict.fromkeys(_in_chunks(_best_chunk(best, percentile)) for percentile in TBT_PERCENTILES)
    rows = []
    for system in (*SPRINGTIDE, *chosen, UNCHUNKED):
        for rate in rates:
            summary = results[f"{system} {rate:g}"]["summary"]
            met = ["yes" if rate in found else "no" for found in good[system].values()]
            figures = number(summary["ttft_ms_p90"]), *(number(summary[f"gap_ms_p{percentile}"], 1) for percentile in TBT_PERCENTILES)
            rows.append([system, f"{rate:g}", *figures, *met])
    picture = f"throughput-{name.split()[0].lower()}{'-tight' if factors is TIGHT else ''}.png"
    drawn = {**dict.fromkeys(SPRINGTIDE), _in_chunks(_best_chunk(best, PICTURED)): None, UNCHUNKED: None}
    _draw(output / picture, title, list(drawn), rates, results, ttft_ms, tbt_ms)
    swept = [[f"{tokens:,}", *(f"{rate:g}" for rate in best[_in_chunks(tokens)].values())] for tokens in CHUNKS]
    return best, [
        f"## {title}",
        f"Objectives: TTFT {ttft_ms:,.0f} ms, TBT {tbt_ms:,.0f} ms.",
        f"![{title}]({picture})",
        table(("system", "requests/s", "TTFT p90, ms", "TBT p90, ms", "TBT p99, ms", "met at p90", "at p99"), rows),
        f"The chunk of {COUPLED}, highest rate within the objectives:",
        table(("tokens a step", *(f"at p{percentile}" for percentile in TBT_PERCENTILES)), swept),
    ]


def _within(result: Result, ttft_ms: float, tbt_ms: float, percentile: int) -> bool:
    summary = result["summary"]
    return summary["ttft_ms_p90"] <= ttft_ms and summary[f"gap_ms_p{percentile}"] <= tbt_ms and summary["rejected"] == 0


def _draw(
    path: Path, title: str, systems: Sequence[str], rates: Sequence[float], results: Mapping[str, Result], ttft_ms: float, tbt_ms: float
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"font.size": 9}):
        figure = Figure(figsize=(9, 3), layout="constrained")
        for axes, quantity, limit in zip(figure.subplots(1, 2), ("ttft_ms", "gap_ms"), (ttft_ms, tbt_ms), strict=True):
            for system, marker in zip(systems, "osDv^", strict=True):
                values = [results[f"{system} {rate:g}"]["summary"][f"{quantity}_p{PICTURED}"] for rate in rates]
                axes.plot(rates, values, marker=marker, markersize=4, label=system)
            axes.axhline(limit, color="black", linestyle=":", label="objective")
            axes.set_yscale("log")
            axes.set_xlabel("requests a second")
            axes.set_ylabel(f"{'TTFT' if quantity == 'ttft_ms' else 'TBT'} p{PICTURED}, ms")
        figure.axes[0].legend(frameon=False)
        figure.suptitle(title)
        figure.savefig(path, dpi=150, metadata={"Software": None})


def _real(trace: Workload, hardware: Hardware) -> list[str]:
    coupled = {chunk_tokens: f"coupled [20M], {chunk_tokens:,}" for chunk_tokens in CHUNKS}
    clusters: Mapping[str, Mapping[str, int]] = {
        "Springtide [10P+10D]": {"prefill": 10, "decode": 10},
        "Springtide [20]": {"prefill": 0, "decode": 0, "instances": 20},
        **{system: {"coupled": 20, "chunk_tokens": chunk_tokens} for chunk_tokens, system in coupled.items()},
        "unchunked [20M]": {"coupled": 20, "chunk_tokens": WHOLE_PROMPT_TOKENS},
    }
    results = play(
        {f"{system} {speed:g}": _plan(trace.sped_up(speed), hardware, cluster) for system, cluster in clusters.items() for speed in SPEEDS}
    )
    attained = {key: result["summary"]["slo_attainment"] for key, result in results.items()}
    rows = []
    for speed in SPEEDS:
        best = max(coupled.values(), key=lambda system, speed=speed: attained[f"{system} {speed:g}"])
        shown = [system for system in clusters if system == best or system not in coupled.values()]
        rows += [_attainment(system, speed, results[f"{system} {speed:g}"]) for system in shown]
    return [
        "## Figure 11: the trace on 20 instances",
        table(("system", "speed", "TTFT within 30 s", "mean TBT within 100 ms", "p99 of mean TBT, ms", "both"), rows),
        "`coupled` with its best chunk at each speed, by the last column. The paper reports that nearly all requests of [10P+10D] met the "
        "TBT objective and 57% of those of its 20 coupled instances.",
    ]


def _attainment(system: str, speed: float, result: Result) -> list[str]:
    requests, slo, summary = result["requests"], result["settings"], result["summary"]
    total = summary["requests"]
    ttft = sum(value is not None and value <= slo["ttft_slo_ms"] for value in requests["ttft_ms"]) / total
    tbt = sum(value is not None and value <= slo["tbt_slo_ms"] for value in requests["tbt_ms"]) / total
    return [system, f"{speed:g} x", percent(ttft), percent(tbt), number(summary["tbt_ms_p99"], 1), percent(summary["slo_attainment"])]
