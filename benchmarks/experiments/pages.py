"""A page for each experiment: Markdown tables, and pictures beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from simulator.run import Plan, simulate
from simulator.workload import Workload

Result = Mapping[str, Any]


def play(plans: Mapping[str, Plan]) -> dict[str, Result]:
    """All of them, two at a time: each is one core's work."""
    with ProcessPoolExecutor(2) as workers:
        return dict(zip(plans, workers.map(simulate, plans.values()), strict=True))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float) -> str:
    return f"{value:.1%}"


def write_page(directory: Path, name: str, title: str, parts: Sequence[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.md").write_text("\n\n".join([f"# {title}", *parts]) + "\n")


def write_index(directory: Path, trace: Workload) -> None:
    """Links to every page that is there."""
    pages = sorted(path for path in directory.glob("*.md") if path.name != "README.md")
    links = "\n".join(f"- [{path.read_text().splitlines()[0].removeprefix('# ')}]({path.name})" for path in pages)
    text = (
        "# The experiments of the Mooncake paper, simulated\n\n"
        "By `make experiments`. The schedulers are those that serve; engines and network are models (docs/packages/simulator.md). "
        f"The trace here: {trace.name}, {len(trace.requests):,} requests in {trace.duration_s:,.0f} s. An infinite cache would serve "
        f"{trace.reuse_bound():.1%} of its prompt tokens.\n\n{links}\n"
    )
    (directory / "README.md").write_text(text)
