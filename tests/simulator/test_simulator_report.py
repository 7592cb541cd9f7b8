"""Reports: self-contained, complete, legible on light and dark paper, whatever the run was like."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.report import compare, compare_pictures, write_pictures, write_report
from simulator.report.drawing import cumulative_share, thinned
from simulator.report.style import COLOURS
from simulator.report.tables import settings_rows, summary_rows


def a_run(
    seed: int = 1, requests: int = 400, reasons: tuple[str, ...] = ("decode load", "prefill load"), **settings: Any
) -> dict[str, Any]:
    """As the simulator writes it: every fifth request rejected, for the reasons in turn, where there are any."""
    rng = np.random.default_rng(seed)
    time_s = np.arange(0.0, 610.0, 10.0)
    arrivals = np.sort(rng.uniform(0.0, 600.0, requests))
    rejected = [reasons[index // 5 % len(reasons)] if reasons and index % 5 == 0 else None for index in range(requests)]
    so_far = {reason: [sum(why == reason for why in rejected[: np.searchsorted(arrivals, at)]) for at in time_s] for reason in reasons}
    ttft, tbt = rng.lognormal(8, 1, requests), rng.lognormal(3.5, 0.5, requests)
    run = {
        "summary": {
            "requests": requests,
            "completed": sum(why is None for why in rejected),
            "rejected": sum(why is not None for why in rejected),
            "goodput_requests": requests // 2,
            "rejected_by_reason": {reason: counts[-1] for reason, counts in so_far.items()},
            "ttft_ms_mean": 4321.0,
            "ttft_ms_p99": None,
            "hit_rate": 0.3664,
            "duration_s": 612.5,
            "moved_bytes": 5_000_000,
        },
        "settings": {"policy": "kvcache-centric", "prefill": 8, "ttft_slo_ms": 30_000.0, "tbt_slo_ms": 100.0, **settings},
        "series": {
            "interval_s": 10.0,
            "time_s": time_s.tolist(),
            **{name: rng.uniform(0, 1.2, len(time_s)).tolist() for name in ("prefill_load", "decode_load", "hit_rate")},
            **{name: rng.integers(0, 90, len(time_s)).tolist() for name in ("prefill_queued", "decode_running")},
            "rejected": so_far,
        },
        "requests": {
            "arrival_s": arrivals.tolist(),
            "ttft_ms": [value if why is None else None for value, why in zip(ttft.tolist(), rejected, strict=True)],
            "tbt_ms": [value if why is None else None for value, why in zip(tbt.tolist(), rejected, strict=True)],
            "input_tokens": rng.integers(100, 9000, requests).tolist(),
            "cached_tokens": rng.integers(0, 100, requests).tolist(),
            "rejected": rejected,
        },
    }
    parsed: dict[str, Any] = json.loads(json.dumps(run))
    return parsed


class Page(HTMLParser):
    """What a browser would see of a page; raises AssertionError where tags do not match."""

    _VOID = frozenset({"meta", "link", "img", "br"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self._VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href"):
                self.references.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self._VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("td", "th"):
            self.text += " "

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_report_needs_nothing_besides_itself(tmp_path: Path) -> None:
    write_report(a_run(), tmp_path / "run.html")
    page = Page(tmp_path / "run.html")
    assert page.tags.count("svg") == 4
    assert all(reference.startswith("#") and reference[1:] in page.ids for reference in page.references)
    assert len(set(page.ids)) == len(page.ids)
    source = (tmp_path / "run.html").read_text()
    assert not re.search(r"url\((?!#)|@import|<script|<link", source)


def test_a_report_says_the_figures_with_their_units(tmp_path: Path) -> None:
    write_report(a_run(decode_tokens=9000), tmp_path / "run.html")
    text = re.sub(r"\s+", " ", Page(tmp_path / "run.html").text)
    for said in (
        "Requests 400 requests",
        "Time to first token, mean 4,321 ms",
        "Time to first token, p99 - ms",
        "Prompt tokens served from the cache 36.64 %",
        "Rejected 80 requests Rejected: decode load 40 requests Rejected: prefill load 40 requests",
        "Moved 5,000,000 bytes",
        "Duration, first arrival to last token 612.5 s",
        "Policy kvcache-centric",
        "Decode tokens 9,000 tokens",
        "TTFT SLO 30,000 ms",
    ):
        assert said in text


def test_pictures_on_a_page_are_drawn_in_colours_of_the_page(tmp_path: Path) -> None:
    write_report(a_run(), tmp_path / "run.html")
    source = (tmp_path / "run.html").read_text()
    pictures = "".join(re.findall(r"<svg.*?</svg>", source, re.DOTALL))
    assert "var(--series-1)" in pictures and "var(--ink)" in pictures
    assert not any(colour.light in pictures for colour in COLOURS)
    assert len({colour.light for colour in COLOURS}) == len(COLOURS)
    assert "prefers-color-scheme: dark" in source


def test_the_same_run_makes_the_same_page(tmp_path: Path) -> None:
    for name in ("first.html", "second.html"):
        write_report(a_run(), tmp_path / name)
    assert (tmp_path / "first.html").read_bytes() == (tmp_path / "second.html").read_bytes()


def test_the_size_of_a_report_does_not_grow_with_the_requests(tmp_path: Path) -> None:
    write_report(a_run(requests=2000), tmp_path / "small.html")
    write_report(a_run(requests=20_000), tmp_path / "large.html")
    assert (tmp_path / "large.html").stat().st_size < 1.1 * (tmp_path / "small.html").stat().st_size


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    runs = {"<b>$a_1$": a_run(1, reasons=("<i>load",)), "two & more": a_run(2, trace="<script>alert(1)</script>")}
    compare(runs, tmp_path / "runs.html")
    write_report(runs["<b>$a_1$"], tmp_path / "run.html")
    pages = [Page(tmp_path / name) for name in ("runs.html", "run.html")]
    assert not {"b", "i", "script"} & {tag for page in pages for tag in page.tags}
    assert "<b>$a_1$" in pages[0].text and "<i>load" in pages[1].text


def test_several_runs_lie_over_one_another(tmp_path: Path) -> None:
    runs = {"random": a_run(1, policy="random"), "cache-aware": a_run(2, policy="cache-aware"), "centric": a_run(3)}
    compare(runs, tmp_path / "runs.html")
    page = Page(tmp_path / "runs.html")
    assert page.tags.count("svg") == 4
    svg = " ".join(re.findall(r"<svg.*?</svg>", (tmp_path / "runs.html").read_text(), re.DOTALL))
    assert all(svg.count(f"var(--series-{number})") >= 4 for number in (1, 2, 3))
    assert all(page.text.count(name) >= 4 for name in runs)
    with pytest.raises(ValueError, match="no runs"):
        compare({}, tmp_path / "none.html")


def test_each_picture_is_a_file_too(tmp_path: Path) -> None:
    names = ["load.png", "latency.png", "rejections.png", "hit-rate.png"]
    for written in (write_pictures(a_run(), tmp_path / "one" / "run"), compare_pictures({"a": a_run(1), "b": a_run(2)}, tmp_path / "two")):
        assert [path.name for path in written] == names
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_runs_without_rejections_or_requests_or_samples_are_drawn(tmp_path: Path) -> None:
    calm, refused, empty = a_run(reasons=()), a_run(requests=1), a_run(requests=0, reasons=())
    for column in ("time_s", "prefill_load", "decode_load", "hit_rate", "prefill_queued", "decode_running"):
        empty["series"][column] = []
    write_report(calm, tmp_path / "calm.html")
    assert "no request was rejected" in Page(tmp_path / "calm.html").text
    write_report(refused, tmp_path / "refused.html")
    assert "no request was served" in Page(tmp_path / "refused.html").text
    write_report(empty, tmp_path / "empty.html")
    assert "nothing was sampled" in Page(tmp_path / "empty.html").text
    compare({"calm": calm, "refused": refused, "empty": empty}, tmp_path / "all.html")


def test_the_best_of_several_runs_stands_out() -> None:
    better, worse = a_run(), a_run()
    worse["summary"] |= {"goodput_requests": 10, "ttft_ms_mean": 9e4, "hit_rate": None}
    best = {row.label: row.best for row in summary_rows([worse, better])}
    assert best["Goodput: completed within both SLOs"] == {1}
    assert best["Time to first token, mean"] == {1}
    assert best["Completed"] == frozenset(), "equal"
    assert best["Prompt tokens served from the cache"] == frozenset(), "only one has it"


def test_settings_that_differ_can_be_picked_out() -> None:
    rows = settings_rows([a_run(prefill=8, speed=1.0), a_run(prefill=4, speed=1.0, more={"seed": 3})], differing_only=True)
    assert [(row.label, row.cells) for row in rows] == [("Prefill", ("8", "4")), ("More: seed", ("-", "3"))]


def test_thinning_keeps_means_and_extremes() -> None:
    times, values = np.arange(10_000.0), np.sin(np.arange(10_000.0) / 500)
    thin_times, thin_values = thinned(times, values)
    assert len(thin_times) == len(thin_values) == 600
    assert thin_values.mean() == pytest.approx(values.mean(), abs=1e-3)
    xs, shares = cumulative_share(times)
    assert (xs[0], xs[-1], shares[-1]) == (0.0, 9999.0, 1.0)
    assert np.interp(5000.0, xs, shares) == pytest.approx(0.5, abs=1e-3)
