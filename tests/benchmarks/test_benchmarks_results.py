"""Results, where they come from, and the page that is made of them."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import provenance, results
from benchmarks.driven import plain, within
from benchmarks.provenance import CHECKOUT, NOT_THERE, PACKAGES, UNCOMMITTED, changed_since, packages_of, trees
from benchmarks.render import PAGE, page, section, state
from benchmarks.results import LIMIT, RESULTS, Row, ratio_in_words, write

COMMITTED = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
MOST_SUMMARY_LINES = 46


def git(checkout: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@example.com"]
    subprocess.run(["git", *identity, *arguments], cwd=checkout, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the packages of the benchmark `index`, committed, in which results are written."""
    for package in (*PACKAGES["index"], "benchmarks"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "code.py").write_text("1\n")
    (tmp_path / "benchmarks" / "index.py").write_text("1\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    monkeypatch.setattr(provenance, "CHECKOUT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "benchmarks" / "results")
    return tmp_path


def commit(checkout: Path) -> None:
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message", "a change")


def written(*rows: Row, headlines: tuple[str, ...] = ()) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(write("index", "make bench-index", rows, "Notes.", headlines).read_text())
    return document


def test_results_say_of_which_code_they_are(checkout: Path) -> None:
    document = written(Row("a", "s", 1.0))
    assert document["commit"] and document["dirty"] is False
    assert document["trees"].keys() == set(packages_of("index"))
    assert changed_since(document["trees"], trees()) == []


def test_results_that_were_written_before_make_no_tree_dirty_and_other_changes_do(checkout: Path) -> None:
    assert written()["dirty"] is False
    assert written()["dirty"] is False
    (checkout / "kvstore" / "code.py").write_text("2\n")
    document = written()
    assert document["dirty"] is True
    assert state(document, trees()) == "dirty, stale"


def test_what_the_figures_depend_on_makes_them_stale_and_nothing_else_does(checkout: Path) -> None:
    document = written(Row("a", "s", 1.0))
    (checkout / "README.md").write_text("about\n")
    commit(checkout)
    assert state(document, trees()) == ""
    (checkout / "kvstore" / "code.py").write_text("2\n")
    assert trees()["kvstore"] == UNCOMMITTED
    commit(checkout)
    assert changed_since(document["trees"], trees()) == ["kvstore"]
    (checkout / "benchmarks" / "index.py").write_text("2\n")
    assert changed_since(document["trees"], trees()) == ["kvstore", "benchmarks/index.py"]
    assert state(document, trees()) == "stale"
    assert "**stale**: kvstore, benchmarks/index.py changed since" in section("index", document, trees())


def test_a_shallow_clone_knows_what_is_stale(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = written(Row("a", "s", 1.0))
    (checkout / "springtide" / "code.py").write_text("2\n")
    commit(checkout)
    clone = tmp_path_factory.mktemp("clones") / "clone"
    git(checkout, "clone", "--quiet", "--depth", "1", checkout.as_uri(), str(clone))
    monkeypatch.setattr(provenance, "CHECKOUT", clone)
    assert changed_since(document["trees"], trees()) == ["springtide"]


def test_a_package_that_is_new_or_gone_has_changed() -> None:
    assert changed_since({"gateway": NOT_THERE}, {"gateway": "1"}) == ["gateway"]
    assert changed_since({"gateway": "1"}, {"kvstore": "1"}) == ["gateway"]


@pytest.mark.parametrize("how", ["no git", "no repository"])
def test_without_git_nothing_is_known_and_that_is_said(checkout: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "no git":
        monkeypatch.setenv("PATH", "")
    else:
        # Within somebody else's repository.
        unpacked = checkout / "unpacked"
        unpacked.mkdir()
        monkeypatch.setattr(provenance, "CHECKOUT", unpacked)
    document = written(Row("a", "s", 1.0))
    assert (document["commit"], document["dirty"], document["trees"]) == ("", None, {})
    assert state(document, trees()) == "not known"
    text = section("index", document, trees())
    assert "commit not known" in text and "whether it is stale is not known" in text


DRAWING = {"results.py", "serve_picture.py"}
"""What they import makes no figure."""


def imported(module: Path, seen: set[Path]) -> set[str]:
    """The packages of the repository that a benchmark imports, by itself, by others of benchmarks/ or by the drivers that it names."""
    found: set[str] = set()
    if module in seen or not module.exists():
        return found
    seen.add(module)
    for node in ast.walk(ast.parse(module.read_text())):
        match node:
            case ast.Import(names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(origin), names=names):
                modules = [origin, *(f"{origin}.{alias.name}" for alias in names)]
            case ast.Constant(value=str(value)) if value.isidentifier():
                modules = [f"benchmarks.drivers.{value}"]
            case _:
                continue
        for name in modules:
            root = name.partition(".")[0]
            if root == "benchmarks":
                found |= imported(CHECKOUT.joinpath(*name.split(".")).with_suffix(".py"), seen)
            elif (CHECKOUT / root / "__init__.py").exists() and module.name not in DRAWING:
                found.add(root)
    return found


@pytest.mark.parametrize("name", PACKAGES)
def test_what_a_benchmark_imports_makes_its_figures_stale(name: str) -> None:
    *packages, own = packages_of(name)
    assert (CHECKOUT / own).exists()
    assert imported(CHECKOUT / own, set()) - {"tests"} <= set(packages)


@pytest.mark.skipif(not trees(), reason="without git nothing is known of what changed since")
def test_the_page_is_what_the_results_say() -> None:
    """Stale figures are marked as such; which packages have changed since may be more by now."""

    def told(text: str) -> str:
        return re.sub(r"\*\*stale\*\*: .* changed since", "**stale**", text)

    assert told(PAGE.read_text()) == told(page(COMMITTED, trees())), "make performance"


def test_a_benchmark_says_which_packages_its_figures_depend_on(checkout: Path) -> None:
    assert packages_of("replay-conversation_trace") == packages_of("replay")
    with pytest.raises(KeyError, match="unheard_of"):
        write("unheard_of", "make bench-unheard-of", [])


def test_what_lies_within_the_noise_is_called_parity() -> None:
    assert ratio_in_words(1.04, "peer") == "1.04, parity"
    assert ratio_in_words(0.951, "peer") == "0.95, parity"
    assert ratio_in_words(1.06, "peer") == "1.06"
    assert ratio_in_words(0.94, "peer") == "0.94"
    assert ratio_in_words(1.02, LIMIT) == "1.02"
    assert ratio_in_words(None, "peer") == ""


def test_rows_are_medians_that_say_of_how_many() -> None:
    row = plain("a", "ms", [3.0, 1.0, 2.0], "idle")
    assert (row.ours, row.spread, row.rounds, row.label) == (2.0, (1.0, 3.0), 3, "a: idle")
    row = within("a", "ms", [4.0], 2.0)
    assert (row.ours, row.spread, row.rounds, row.peer, row.ratio, row.wanted, row.met) == (4.0, None, 1, 2.0, 0.5, 1.0, False)


def test_a_comparison_shows_its_case_the_peers_spread_and_its_rounds(checkout: Path) -> None:
    row = Row("goodput", "requests", 11.0, None, 10.0, "Dynamo", 1.1, 1.2, False, "4 workers", (9.0, 12.0), 5)
    assert "| goodput | 4 workers | requests | 11 | 10 [9 … 12] | Dynamo | 1.1 | 1.2 | **no** | 5 |" in section(
        "index", written(row), trees()
    )


def test_what_was_wanted_without_a_peer_is_shown_too(checkout: Path) -> None:
    assert "| added | ms | 3 |  |  |  | 5 | yes | 1 |" in section("index", written(Row("added", "ms", 3.0, wanted=5.0, met=True)), trees())


def test_the_summary_comes_first_with_the_rows_that_a_benchmark_names(checkout: Path) -> None:
    rows = [Row("a", "s", 1.0), Row("b", "1/s", 2.0, None, 1.0, "peer", 2.0, 1.5, True), Row("b", "1/s", 3.0, case="idle")]
    text = page({"index": written(*rows, headlines=("b: idle", "b"))}, trees())
    summary, details = text.split("## index")
    assert "| [index](#index) | b | 2/s | 1 peer | 2 | 1.5 | yes | 1 of 1 |  |" in summary
    assert "|  | b: idle | 3/s |  |  |  |  |  |  |" in summary
    assert "| a |" not in summary and "| a | s | 1 |" in details


def test_of_several_peers_the_summary_has_the_one_that_is_nearest_to_missing(checkout: Path) -> None:
    rows = [Row("a", "s", 1.0, None, 2.0, "easy", 2.0, 1.0, True), Row("a", "s", 1.0, None, 2.4, "hard", 2.4, 2.0, True)]
    summary, details = page({"index": written(*rows, headlines=("a",))}, trees()).split("## index")
    assert "hard" in summary and "easy" not in summary and "easy" in details


def test_a_benchmark_that_names_none_is_summed_up_by_what_is_nearest_to_missing(checkout: Path) -> None:
    rows = [Row("far", "s", 1.0, None, 3.0, "peer", 3.0, 1.0, True), Row("near", "s", 1.0, None, 2.1, "peer", 2.1, 2.0, True)]
    summary, _ = page({"index": written(*rows)}, trees()).split("## index")
    assert "near" in summary and "far" not in summary


def test_all_results_that_are_committed_are_rendered_and_their_summary_fits_a_screen() -> None:
    text = page(COMMITTED, trees())
    summary, *_ = text.split("\n## ")
    assert len(summary.splitlines()) <= MOST_SUMMARY_LINES
    for name, document in COMMITTED.items():
        assert f"## {name}\n" in text and f"[{name}](#{name})" in summary
        labels = {f"{row['row']}: {row['case']}" if row["case"] else row["row"] for row in document["rows"]}
        assert set(document["headlines"]) <= labels


def test_every_comparison_that_is_committed_says_of_how_many_rounds_it_is() -> None:
    for document in COMMITTED.values():
        for row in document["rows"]:
            assert row["rounds"] >= 1
            assert row["spread"] is None or row["rounds"] > 1, row["row"]
