"""What the pictures have in common: axes of time, limits, cumulative shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, PercentFormatter, StrMethodFormatter
from numpy.typing import NDArray

from simulator.report.style import LIMIT, MUTED

Floats = NDArray[np.float64]
Result = Any
"""The parsed JSON of one run."""

_MOST_POINTS = 600
"""Of one line: more than a picture has pixels for would only make the page heavier."""


def figure(rows: int, columns: int, height_in: float, share_x: bool = False) -> tuple[Figure, list[Axes]]:
    """Panels of one picture, row by row, 9 inches wide in all."""
    made = Figure(figsize=(9.0, height_in), layout="constrained")
    panels = made.subplots(rows, columns, sharex=share_x, squeeze=False)
    return made, list(panels.ravel())


def numbers(values: Sequence[float | None]) -> Floats:
    """NaN for each None."""
    return np.array([np.nan if value is None else value for value in values], np.float64)


def time_unit(longest_s: float) -> tuple[float, str]:
    """The seconds in the unit that suits such a span, and its name."""
    if longest_s > 3 * 3600:
        return 3600.0, "h"
    return (60.0, "min") if longest_s > 300 else (1.0, "s")


def over_time(axes: Axes, longest_s: float) -> None:
    """Labels the axis of a panel whose times are in `time_unit(longest_s)`."""
    axes.set_xlabel(f"time ({time_unit(longest_s)[1]})")
    axes.set_xlim(0.0, max(longest_s, 1e-9) / time_unit(longest_s)[0])


def thinned(times: Floats, values: Floats) -> tuple[Floats, Floats]:
    """The means of as many equal parts as a picture can show; unchanged where there are no more than that."""
    if len(times) <= _MOST_POINTS:
        return times, values
    parts = np.array_split(np.arange(len(times)), _MOST_POINTS)
    return np.array([times[part].mean() for part in parts]), np.array([values[part].mean() for part in parts])


def cumulative_share(values: Floats) -> tuple[Floats, Floats]:
    """Sorted values, and the share that does not exceed each; at most _MOST_POINTS of them, the extremes always among them."""
    ordered = np.sort(values)
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    if len(ordered) > _MOST_POINTS:
        chosen = np.linspace(0, len(ordered) - 1, _MOST_POINTS).round().astype(np.int64)
        return ordered[chosen], shares[chosen]
    return ordered, shares


def limit_across(axes: Axes, value: float, label: str) -> None:
    """A limit on the vertical axis, named beyond its right end."""
    axes.axhline(value, color=LIMIT.light, linewidth=1.1, linestyle=(0, (4, 3)))
    axes.annotate(
        label,
        (1.0, value),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        color=LIMIT.light,
        fontsize=8.5,
        verticalalignment="center",
    )


def limit_upright(axes: Axes, value: float, label: str) -> None:
    """A limit on the horizontal axis, named at its foot."""
    axes.axvline(value, color=LIMIT.light, linewidth=1.1, linestyle=(0, (4, 3)))
    axes.annotate(
        label,
        (value, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(-3, 2),
        textcoords="offset points",
        color=LIMIT.light,
        fontsize=8.5,
        horizontalalignment="right",
    )


def percent_axis(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def count_axis(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def milliseconds_axis(axes: Axes, which: Literal["x", "y"] = "x") -> None:
    """Logarithmic over what is drawn, in the unit that each tick is read most easily in."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set(**{f"{which}scale": "log"})
    least, most = axis.get_view_interval()
    # Several ticks between powers of ten, where their labels have room.
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0) if most < 50 * least else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e3:g} s" if value >= 1e3 else f"{value:g} ms"))
    axis.set_minor_formatter(FuncFormatter(lambda _, __: ""))


def nothing(axes: Axes, text: str) -> None:
    """Says in the middle of an empty panel why it is empty."""
    axes.grid(False)
    axes.set_yticks([])
    axes.text(0.5, 0.5, text, transform=axes.transAxes, color=MUTED.light, horizontalalignment="center", verticalalignment="center")


def legend_above(axes: Axes) -> None:
    """A legend beside the title of a panel: room for some three short names."""
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, fontsize=9, borderaxespad=0.1)


def legend_on_top(made: Figure, axes: Axes) -> None:
    """A legend of a whole picture, with the lines of one of its panels, whose names may be long."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        made.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 4), fontsize=9)
