"""The picture of `make bench-serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib as mpl

from benchmarks.driven import CHECKOUT
from benchmarks.serve_load import LONG, SHORT, Objective
from simulator.report import style
from simulator.report.drawing import figure, legend_on_top, limit_across, milliseconds_axis

PICTURE = CHECKOUT / "docs" / "serve.png"


@dataclass(frozen=True, slots=True)
class Curves:
    """What is drawn of one system: a value for each rate."""

    goodput_per_s: Sequence[float]
    documents_ttft_ms: Sequence[float]
    chats_tbt_ms: Sequence[float]


def draw(rates: Sequence[float], systems: Mapping[str, Curves], objectives: Mapping[str, Objective]) -> None:
    with mpl.rc_context(style.RC):
        picture, (goodput, ttft, tbt) = figure(1, 3, 3.2)
        for index, (system, curves) in enumerate(systems.items()):
            drawn = (curves.goodput_per_s, [value / 1e3 for value in curves.documents_ttft_ms], curves.chats_tbt_ms)
            for axes, values in zip((goodput, ttft, tbt), drawn, strict=True):
                axes.plot(rates, values, label=system, marker="o", markersize=4, **style.line(index))
        goodput.set_title("Goodput, requests/s")
        goodput.set_ylim(bottom=0.0)
        ttft.set_title(f"TTFT p90 of {LONG.name}, s")
        ttft.set_ylim(bottom=0.0)
        tbt.set_title(f"TBT p99 of {SHORT.name}")
        milliseconds_axis(tbt, "y")
        limit_across(ttft, objectives[LONG.name].ttft_ms / 1e3, "objective")
        limit_across(tbt, objectives[SHORT.name].tbt_ms, "objective")
        for axes in (goodput, ttft, tbt):
            axes.set_xlabel("requests/s sent")
        legend_on_top(picture, goodput)
        picture.savefig(PICTURE, dpi=150, metadata={"Software": None})
