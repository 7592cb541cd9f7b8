"""`springtide bench kvstore`: what it says of bad traces, and that its optimum is one."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy import cli
from deploy.bench.replay import TracedPrompt, infinite_hits, read_trace, replay, replay_clairvoyant
from kvstore.core.eviction import EVICTION_POLICIES, new_policy
from springtide.blocks import block_keys, namespace_root
from springtide.choices import EvictionName
from springtide.errors import ConfigError
from springtide.ids import BlockKey

ROOT = namespace_root("", "", 1)
GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=3)


def requests_of(paths: Sequence[Sequence[int]]) -> list[TracedPrompt]:
    return [TracedPrompt(0.0, block_keys(ROOT, path, 1)) for path in paths]


def most_hits(requests: Sequence[TracedPrompt], capacity: int) -> int:
    """Of all choices of what to keep after each request."""
    best: dict[frozenset[BlockKey], int] = {frozenset(): 0}
    for request in requests:
        needed = frozenset(request.keys)
        if len(needed) > capacity:
            continue
        following: dict[frozenset[BlockKey], int] = {}
        for held, hits in best.items():
            prefix = len(list(itertools.takewhile(held.__contains__, request.keys)))
            others = sorted(held - needed)
            room = min(capacity - len(needed), len(others))
            for kept in itertools.combinations(others, room):
                state = needed | frozenset(kept)
                following[state] = max(following.get(state, 0), hits + prefix)
        best = following
    return max(best.values())


@settings(max_examples=100, deadline=None)
@given(paths=st.lists(PATHS, min_size=1, max_size=12), capacity=st.integers(1, 5))
def test_nobody_has_more_hits_than_the_clairvoyant_and_somebody_has_as_many(paths: list[list[int]], capacity: int) -> None:
    requests = requests_of(paths)
    optimum = replay_clairvoyant(requests, capacity)
    assert optimum.hits == most_hits(requests, capacity)
    for name in EVICTION_POLICIES:
        run = replay(requests, capacity, new_policy(name, capacity))
        assert run.hits <= optimum.hits
        assert (run.lookups, run.refused_requests) == (sum(map(len, paths)), sum(len(path) > capacity for path in paths))


@settings(max_examples=50, deadline=None)
@given(paths=st.lists(PATHS, min_size=1, max_size=20))
@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_with_room_for_everything_every_policy_has_the_infinite_hits(name: EvictionName, paths: list[list[int]]) -> None:
    requests = requests_of(paths)
    assert replay(requests, 64, new_policy(name, 64)).hits == infinite_hits(requests)


def test_requests_come_in_order_of_time_with_chained_keys(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    records = [{**GOOD, "timestamp": 9, "hash_ids": [1, 3]}, {**GOOD, "timestamp": 2}, {**GOOD, "timestamp": 9.5, "hash_ids": [3, 2]}]
    trace.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    first, second, third = read_trace(trace)
    assert [request.timestamp_ms for request in (first, second, third)] == [2, 9, 9.5]
    assert first.keys[0] == second.keys[0]
    assert first.keys[1] not in (*second.keys, *third.keys), "the same id under another parent is another block"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "a request is a JSON object, not [1]"),
        (json.dumps({name: value for name, value in GOOD.items() if name != "output_length"}), "there is no output_length"),
        (json.dumps({**GOOD, "timestamp": "soon"}), 'timestamp should be a number of milliseconds, not "soon"'),
        (json.dumps({**GOOD, "input_length": True}), "input_length should be a number of tokens, not true"),
        (json.dumps({**GOOD, "hash_ids": []}), "hash_ids should be a list of at least one integer"),
        (json.dumps({**GOOD, "hash_ids": [1, 2.5]}), "not [1, 2.5]"),
        (json.dumps({**GOOD, "hash_ids": [-1]}), "not [-1]"),
        (json.dumps({**GOOD, "hash_ids": ["x" * 100]}), "..."),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, said: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(ConfigError) as refused:
        read_trace(trace)
    assert refused.value.message.startswith(f"{trace}:2: ") and said in refused.value.message


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(bytes(range(128, 256)))
    for name, said in (("absent", "cannot read"), ("empty", "empty trace"), ("binary", "not text")):
        with pytest.raises(ConfigError, match=said):
            read_trace(tmp_path / name)


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["springtide", "bench", "kvstore", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command_reports_every_policy_at_every_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({**GOOD, "hash_ids": [0, label % 3, label]}) for label in range(3, 60)))
    assert run_command(monkeypatch, "--trace", trace, "--capacity", "2, 5,500", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    runs = {(run["policy"], run["capacity"]): run for run in document["runs"]}
    assert set(runs) == set(itertools.product([*EVICTION_POLICIES, "Belady's optimum"], [2, 5, 500]))
    assert all(run["refused_requests"] == (57 if capacity == 2 else 0) for (_, capacity), run in runs.items())
    assert {run["hit_rate"] for (_, capacity), run in runs.items() if capacity == 500} == {document["infinite_hit_rate"]}
    assert run_command(monkeypatch, "--trace", trace, "--capacity", "2,5") == 0
    table = capsys.readouterr().out
    assert "hit-density" in table and "57 requests are longer than 2 blocks" in table


@pytest.mark.parametrize("capacity", ["", "0", "10,", "many", "-5", "1e3", "99999999999"])
def test_a_wrong_capacity_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], capacity: str
) -> None:
    assert run_command(monkeypatch, "--trace", tmp_path / "trace", f"--capacity={capacity}") == 2
    assert f"not '{capacity}'" in capsys.readouterr().err
