"""Colours and lines, the same in all pictures and on the page, on light paper and on dark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Colour:
    """`light` is what a picture is drawn with, and different for every colour: on a page it is replaced by the CSS variable `--name`,
    which is `dark` for readers who prefer that."""

    name: str
    light: str
    dark: str


INK = Colour("ink", "#1f2328", "#e6edf3")
MUTED = Colour("muted", "#59636e", "#9aa4af")
GRID = Colour("grid", "#d9dee4", "#343b43")
LIMIT = Colour("limit", "#3d444d", "#c5ced8")

# From the palette of Okabe and Ito, which people with each kind of colour blindness can tell apart; on dark paper lighter where needed.
# Neighbours differ in brightness too, and in the line's pattern.
SERIES = (
    Colour("series-1", "#0072b2", "#4ea8de"),
    Colour("series-2", "#d55e00", "#f58549"),
    Colour("series-3", "#009e73", "#2fd0a0"),
    Colour("series-4", "#9a4f7f", "#dd9cc4"),
    Colour("series-5", "#56b4e9", "#a6dcff"),
    Colour("series-6", "#c69214", "#f0c95a"),
)
COLOURS = (INK, MUTED, GRID, LIMIT, *SERIES)
_PATTERNS = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (9, 2)), (0, (3, 1, 1, 1, 1, 1)))

RC: Any = {
    "font.size": 10.0,
    "text.color": INK.light,
    "axes.edgecolor": MUTED.light,
    "axes.labelcolor": INK.light,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID.light,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED.light,
    "ytick.color": MUTED.light,
    "lines.linewidth": 1.7,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.parse_math": False,
}
"""Settings of matplotlib. Text in SVG stays text: smaller, and it can be searched and read aloud. A dollar sign is one."""


def line(index: int, restless: bool = False) -> dict[str, Any]:
    """Colour and pattern of the n-th of several lines; they repeat after six. Where lines go up and down a lot, patterns confuse: those
    are thinner and drawn through."""
    colour = SERIES[index % len(SERIES)].light
    return {"color": colour, "linewidth": 1.3} if restless else {"color": colour, "linestyle": _PATTERNS[index % len(_PATTERNS)]}
