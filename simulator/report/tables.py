"""The figures of one or several runs as rows of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Better = Literal["more", "less"]


@dataclass(frozen=True, slots=True)
class FigureRow:
    label: str
    unit: str
    cells: tuple[str, ...]
    """One a run."""
    best: frozenset[int] = frozenset()
    """Which cells are the best of several, where one can say."""


_KNOWN: dict[str, tuple[str, Better | None]] = {
    "requests": ("Requests", None),
    "completed": ("Completed", "more"),
    "rejected": ("Rejected", "less"),
    "goodput_requests": ("Goodput: completed within both SLOs", "more"),
    "goodput_per_s": ("Goodput", "more"),
    "slo_attainment": ("Share of all requests within both SLOs", "more"),
    "ttft_ms_mean": ("Time to first token, mean", "less"),
    "ttft_ms_p50": ("Time to first token, median", "less"),
    "ttft_ms_p90": ("Time to first token, p90", "less"),
    "ttft_ms_p99": ("Time to first token, p99", "less"),
    "tbt_ms_mean": ("Time between tokens, mean", "less"),
    "tbt_ms_p50": ("Time between tokens, median", "less"),
    "tbt_ms_p90": ("Time between tokens, p90", "less"),
    "tbt_ms_p99": ("Time between tokens, p99", "less"),
    "hit_rate": ("Prompt tokens served from the cache", "more"),
    "wasted_prefill_tokens": ("Prefilled for requests that were then rejected", "less"),
    "output_tokens": ("Generated", None),
    "duration_s": ("Duration, first arrival to last token", None),
    "wall_s": ("Time that the simulation took", None),
}
"""In the order of the table; what the simulator adds to it follows under its own name."""

_UNITS = {"_per_s": "requests/s", "_ms": "ms", "_s": "s", "_tokens": "tokens", "_bytes": "bytes", "_gbps": "GB/s"}
"""By the ending of a name, the first that fits."""

_REASON = "rejected_by_reason: "
_SHARES = ("hit_rate", "slo_attainment")


def summary_rows(results: Sequence[Mapping[str, Any]]) -> list[FigureRow]:
    """Every figure that any of the summaries has, with its unit; a dash where a run has none."""
    summaries = [_flat(result["summary"]) for result in results]
    present = dict.fromkeys(key for summary in summaries for key in summary)
    known = [key for key in _KNOWN if key in present]
    reasons = [key for key in present if key.startswith(_REASON)]
    place = known.index("rejected") + 1 if "rejected" in known else len(known)
    keys = [*known[:place], *reasons, *known[place:], *(key for key in present if key not in _KNOWN and key not in reasons)]
    return [_summary_row(key, summaries) for key in keys]


def settings_rows(results: Sequence[Mapping[str, Any]], differing_only: bool = False) -> list[FigureRow]:
    """Every setting of any of the runs, or only those in which they differ."""
    settings = [_flat(result["settings"]) for result in results]
    rows = []
    for key in dict.fromkeys(key for one in settings for key in one):
        unit = _unit(key)
        cells = tuple(_text(one.get(key)) for one in settings)
        if not differing_only or len(set(cells)) > 1:
            rows.append(FigureRow(_words(key), unit, cells))
    return rows


def _summary_row(key: str, summaries: Sequence[Mapping[str, Any]]) -> FigureRow:
    label, better = _KNOWN.get(key, (None, None))
    unit = "%" if key in _SHARES else _unit(key)
    values = [summary.get(key) for summary in summaries]
    if unit == "%":
        values = [value if value is None else value * 100.0 for value in values]
    cells = tuple(_text(value) for value in values)
    real = [value for value in values if isinstance(value, int | float)]
    best: frozenset[int] = frozenset()
    if better and len(set(real)) > 1:
        winner = max(real) if better == "more" else min(real)
        best = frozenset(index for index, value in enumerate(values) if value == winner)
    return FigureRow(label or _words(key), unit, cells, best)


def _flat(mapping: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{before}{key}: "))
        else:
            flat[f"{before}{key}"] = value
    return flat


def _unit(key: str) -> str:
    if key in ("requests", "completed", "rejected", "goodput_requests") or key.startswith(_REASON):
        return "requests"
    if "_ms_" in key:
        return "ms"
    for ending, unit in _UNITS.items():
        if key.endswith(ending):
            return unit
    return ""


def _words(key: str) -> str:
    if key.startswith(_REASON):
        return f"Rejected: {key.removeprefix(_REASON)}"
    # Not of rates and of tokens, which are what is meant and not only its unit.
    if not key.endswith(("_per_s", "_tokens")):
        key = next((key.removesuffix(ending) for ending in _UNITS if key.endswith(ending)), key)
    words = key.replace("_", " ").replace("ttft", "TTFT").replace("tbt", "TBT").replace("slo", "SLO")
    return words[:1].upper() + words[1:]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return str(value)
