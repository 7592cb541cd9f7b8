"""One HTML file that needs nothing besides itself."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from jinja2 import Environment, StrictUndefined

from simulator.report.pictures import PICTURES, Picture, Runs
from simulator.report.style import COLOURS, RC
from simulator.report.tables import settings_rows, summary_rows
from simulator.report.template import TEMPLATE

_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def write_report(result: Mapping[str, Any], path: Path) -> None:
    """The tables and pictures of one run, `result` being the parsed JSON of `springtide simulate`. Raises KeyError where a part of it is
    missing, OSError where the file cannot be written."""
    settings = result["settings"]
    said = [str(settings[key]) for key in ("trace", "policy", "admission", "hardware") if settings.get(key)]
    _write("A simulated run", " · ".join(said), {"": result}, path)


def compare(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Writes several runs beside and over one another, named by their keys. Raises ValueError for no runs; otherwise as `write_report`."""
    if not results:
        raise ValueError("there are no runs to compare")
    _write("Simulated runs compared", " · ".join(results), results, path)


def _write(title: str, subtitle: str, runs: Runs, path: Path) -> None:
    results = list(runs.values())
    page = _ENVIRONMENT.from_string(TEMPLATE).render(
        title=title,
        subtitle=subtitle,
        names=list(runs) if len(runs) > 1 else ["value"],
        several=len(runs) > 1,
        summary=summary_rows(results),
        settings=settings_rows(results),
        differing=settings_rows(results, differing_only=True),
        pictures=[(picture, picture.caption_of_several if len(runs) > 1 else picture.caption, _svg(picture, runs)) for picture in PICTURES],
        colours=COLOURS,
    )
    path.write_text(page, encoding="utf-8")


def _svg(picture: Picture, runs: Runs) -> str:
    """To be put into a page that defines the variables of COLOURS."""
    file = io.StringIO()
    # Ids are hashes of what they name and of the salt: the same page from the same data, and none twice on a page.
    with mpl.rc_context({**RC, "svg.hashsalt": picture.name}):
        picture.draw(runs).savefig(
            file, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' width="[^"]*pt"| height="[^"]*pt"', "", text, count=2)
    text = re.sub(r' id="(figure|axes|patch|line|text|matplotlib|xtick|ytick|legend|PolyCollection|FillBetween|StepPatch)[^"]*"', "", text)
    for colour in COLOURS:
        text = text.replace(colour.light, f"var(--{colour.name})")
    return text


_ENVIRONMENT = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
