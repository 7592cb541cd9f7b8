"""The pictures of one run, or of several over one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulator.report.drawing import (
    Floats,
    Result,
    count_axis,
    cumulative_share,
    figure,
    legend_above,
    legend_on_top,
    limit_across,
    limit_upright,
    milliseconds_axis,
    nothing,
    numbers,
    over_time,
    percent_axis,
    thinned,
    time_unit,
)
from simulator.report.style import RC, SERIES, line

Runs = Mapping[str, Result]
_WINDOWS = 60


@dataclass(frozen=True, slots=True)
class Picture:
    name: str
    """Of the file, without its ending."""
    title: str
    caption: str
    """What is to be seen in it, of one run."""
    caption_of_several: str
    draw: Callable[[Runs], Figure]


def write_pictures(result: Mapping[str, Any], directory: Path) -> list[Path]:
    """Writes a PNG for each of PICTURES in `directory`, which is made if need be; returns their paths. `result` is the parsed JSON of
    `springtide simulate`. Raises KeyError where a part of it is missing, OSError where a file cannot be written."""
    return compare_pictures({"": result}, directory)


def compare_pictures(results: Mapping[str, Mapping[str, Any]], directory: Path) -> list[Path]:
    """Writes the same as `write_pictures`, several runs in each picture, named by their keys."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for picture in PICTURES:
        path = directory / f"{picture.name}.png"
        with mpl.rc_context(RC):
            picture.draw(results).savefig(path, dpi=150, facecolor="white", metadata={"Software": None})
        written.append(path)
    return written


def _load(runs: Runs) -> Figure:
    made, (upper, lower) = figure(2, 1, 5.4, share_x=True)
    longest_s = _longest_s(runs)
    if len(runs) == 1:
        (run,) = runs.values()
        panels = [
            (upper, "Load (1 = SLO just met)", [("prefill pool", run, "prefill_load"), ("decode pool", run, "decode_load")]),
            (lower, "Requests in each pool", [("in prefill", run, "prefill_queued"), ("in decode", run, "decode_running")]),
        ]
    else:
        panels = [
            (upper, "Load of the prefill pool (1 = SLO just met)", [(name, run, "prefill_load") for name, run in runs.items()]),
            (lower, "Load of the decode pool (1 = SLO just met)", [(name, run, "decode_load") for name, run in runs.items()]),
        ]
    for axes, title, lines in panels:
        axes.set_title(title)
        _lines_over_time(axes, lines, longest_s, restless=True)
        if "SLO" in title:
            limit_across(axes, 1.0, "SLO")
        axes.set_ylim(bottom=0.0)
    if len(runs) == 1:
        legend_above(upper)
        legend_above(lower)
        count_axis(lower)
    else:
        legend_on_top(made, upper)
    over_time(lower, longest_s)
    return made


def _latencies(runs: Runs) -> Figure:
    made, panels = figure(1, 2, 3.7)
    for axes, column, title in zip(panels, ("ttft_ms", "tbt_ms"), ("Time to first token", "Time between tokens"), strict=True):
        axes.set_title(title)
        drawn = 0
        for index, (name, run) in enumerate(runs.items()):
            values = numbers(run["requests"][column])
            # A request with one token of output has no time between tokens, and no logarithm.
            values = values[values > 0.0]
            if len(values):
                xs, shares = cumulative_share(values)
                axes.step(np.concatenate((xs[:1], xs)), np.concatenate(([0.0], shares)), where="post", label=name, **line(index))
                drawn += 1
        if not drawn:
            nothing(axes, "no request was served")
            continue
        for limit in sorted({float(run["settings"][column.replace("_ms", "_slo_ms")]) for run in runs.values()}):
            limit_upright(axes, limit, "SLO")
        milliseconds_axis(axes)
        percent_axis(axes)
        axes.set_ylim(0.0, 1.02)
        axes.set_xlabel("latency at most")
    panels[0].set_ylabel("share of requests served")
    if len(runs) > 1:
        legend_on_top(made, panels[0])
    return made


def _rejections(runs: Runs) -> Figure:
    made, (axes,) = figure(1, 1, 3.2)
    longest_s = _longest_s(runs)
    unit_s, _ = time_unit(longest_s)
    axes.set_title("Requests rejected so far")
    if len(runs) == 1:
        (run,) = runs.values()
        # The largest lies at the bottom, where its course is read most easily.
        counts_of = {reason: numbers(counts) for reason, counts in run["series"]["rejected"].items()}
        reasons = sorted(counts_of.items(), key=lambda item: -item[1][-1:].sum())
    else:
        reasons = [(name, _all_rejected(run)) for name, run in runs.items()]
    if not any(counts.any() for _, counts in reasons):
        nothing(axes, "no request was rejected")
    elif len(runs) == 1:
        times = numbers(run["series"]["time_s"])
        columns = [thinned(times, counts) for _, counts in reasons]
        colours = [SERIES[index % len(SERIES)].light for index in range(len(reasons))]
        labels = [f"{name} ({counts[-1]:,.0f})" for name, counts in reasons]
        axes.stackplot(columns[0][0] / unit_s, *[counts for _, counts in columns], labels=labels, colors=colours, alpha=0.85, linewidth=0)
        legend_on_top(made, axes)
        count_axis(axes)
    else:
        for index, (name, counts) in enumerate(reasons):
            times, values = thinned(numbers(runs[name]["series"]["time_s"]), counts)
            axes.plot(times / unit_s, values, label=f"{name} ({counts[-1] if len(counts) else 0:,.0f})", **line(index))
        legend_on_top(made, axes)
        count_axis(axes)
    axes.set_ylim(bottom=0.0)
    over_time(axes, longest_s)
    return made


def _hit_rate(runs: Runs) -> Figure:
    made, (axes,) = figure(1, 1, 3.2)
    longest_s = _longest_s(runs)
    axes.set_title("Prompt tokens served from the cache")
    if len(runs) == 1:
        (run,) = runs.values()
        _windowed_hit_rate(axes, run, longest_s)
        _lines_over_time(axes, [("so far", run, "hit_rate")], longest_s)
        legend_above(axes)
    else:
        _lines_over_time(axes, [(name, run, "hit_rate") for name, run in runs.items()], longest_s)
        legend_on_top(made, axes)
    percent_axis(axes)
    axes.set_ylim(bottom=0.0)
    over_time(axes, longest_s)
    return made


PICTURES = (
    Picture(
        "load",
        "Load of both pools",
        "Above 1 a pool misses its SLO. Where one pool's load rises while the other's falls, and then the other way round, admission is "
        "swinging: requests are let in by the state of a pool that has changed by the time they reach it.",
        "Above 1 a pool misses its SLO. The steadier and the closer to 1 a line stays from below, the better its pool is used.",
        _load,
    ),
    Picture(
        "latency",
        "Latencies",
        "For each latency on the horizontal axis, the share of the served requests that had at most that. What lies to the right of the "
        "dashed line missed its SLO. The time between tokens is each request's mean.",
        "For each latency on the horizontal axis, the share of the served requests that had at most that: further to the left is better, "
        "but a run that rejects more serves fewer. What lies to the right of the dashed line missed its SLO. The time between tokens is "
        "each request's mean.",
        _latencies,
    ),
    Picture(
        "rejections",
        "Rejections",
        "How many requests had been rejected by each moment, by reason. A steep stretch is an overload; its reason says which pool.",
        "How many requests had been rejected by each moment, for whatever reason. Fewer is better only if goodput is not lower for it.",
        _rejections,
    ),
    Picture(
        "hit-rate",
        "Hit rate",
        "The share of prompt tokens that were not computed again: of everything so far, and of the requests that arrived in each sixtieth "
        "of the run. It climbs while the cache fills, and falls where what is asked for was evicted or had not been seen.",
        "The share of prompt tokens so far that were not computed again.",
        _hit_rate,
    ),
)


def _lines_over_time(axes: Axes, lines: list[tuple[str, Result, str]], longest_s: float, restless: bool = False) -> None:
    unit_s, _ = time_unit(longest_s)
    if not any(len(run["series"]["time_s"]) for _, run, _ in lines):
        nothing(axes, "nothing was sampled")
    for index, (label, run, column) in enumerate(lines):
        times, values = thinned(numbers(run["series"]["time_s"]), numbers(run["series"][column]))
        axes.plot(times / unit_s, values, label=label, **line(index, restless))


def _windowed_hit_rate(axes: Axes, run: Result, longest_s: float) -> None:
    arrivals = numbers(run["requests"]["arrival_s"])
    served = np.array([reason is None for reason in run["requests"]["rejected"]], bool)
    edges = np.linspace(0.0, longest_s or 1.0, _WINDOWS + 1)
    inputs, cached = (
        np.histogram(arrivals[served], edges, weights=numbers(run["requests"][column])[served])[0]
        for column in ("input_tokens", "cached_tokens")
    )
    rates: Floats = np.divide(cached, inputs, out=np.full(_WINDOWS, np.nan), where=inputs > 0)
    unit_s, _ = time_unit(longest_s)
    axes.stairs(rates, edges / unit_s, label="by time of arrival", color=SERIES[4].light, linewidth=1.2, fill=False, baseline=None)


def _all_rejected(run: Result) -> Floats:
    counts = [numbers(column) for column in run["series"]["rejected"].values()]
    return np.sum(counts, axis=0) if counts else np.zeros(len(run["series"]["time_s"]))


def _longest_s(runs: Runs) -> float:
    return max((float(run["series"]["time_s"][-1]) for run in runs.values() if run["series"]["time_s"]), default=0.0)
