"""Traces: what is read from each format, what is written, and how errors say where they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from simulator.workload import CsvColumns, Workload, generate, read_csv, read_mooncake, read_trace, write_mooncake
from springtide.errors import ConfigError

GOOD = {"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}


def contents(workload: Workload) -> list[tuple[object, ...]]:
    return [
        (
            r.request_id,
            round(r.arrival_s, 9),
            r.input_tokens,
            r.output_tokens,
            list(r.blocks),
            list(r.output_blocks),
            r.tenant,
            r.priority,
            r.deadline_ms,
            r.idle,
        )
        for r in workload.requests
    ]


def write_records(path: Path, *records: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_mooncake_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    trace = write_records(tmp_path / "busy.jsonl", GOOD, {**GOOD, "timestamp": 250, "hash_ids": [1, 3]})
    workload = read_trace(trace)
    assert (workload.name, workload.block_tokens) == ("busy", 512)
    assert contents(workload) == [(0, 0.25, 600, 5, [1, 3], [], "", 0, 0.0, False), (1, 1.5, 600, 5, [1, 2], [], "", 0, 0.0, False)]


@pytest.mark.parametrize("name", ["poisson", "chat"])
def test_a_workload_that_is_written_is_read_back(tmp_path: Path, name: str) -> None:
    workload = generate(name, 2.0, 100.0, 3, 64, tenants={"a": 1, "b": 2}, priorities={0: 1, 5: 1}, deadline_ms=2e4)
    workload = replace(workload, requests=[replace(request, idle=request.request_id % 3 == 0) for request in workload.requests])
    write_mooncake(workload, tmp_path / f"{name}.jsonl")
    again = read_mooncake(tmp_path / f"{name}.jsonl", 64)
    assert again.name == name
    assert contents(again) == contents(workload)
    assert again.reuse_bound() == workload.reuse_bound()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_length": 0}, "input_length should be a number of tokens, 1 or more, not 0"),
        ({"input_length": 1025}, "hash_ids has 2 ids, but input_length 1025 is 3 blocks of 512 tokens"),
        ({"timestamp": float("inf")}, "timestamp should be a number of milliseconds, not Infinity"),
        ({"output_hash_ids": [7]}, "output_hash_ids should be a list of 0 ids, the blocks that the output fills, not [7]"),
        ({"tenant": 4}, "tenant should be a string, not 4"),
        ({"priority": "high"}, 'priority should be an integer, not "high"'),
        ({"idle": 1}, "idle should be true or false, not 1"),
        ({"deadline_ms": -1}, "deadline_ms should be a number of milliseconds, 0 to 86400000, not -1"),
        ({"deadline_ms": 86400001}, "deadline_ms should be a number of milliseconds, 0 to 86400000, not 86400001"),
    ],
)
def test_a_record_that_is_no_request_is_named(tmp_path: Path, change: dict[str, object], said: str) -> None:
    trace = write_records(tmp_path / "trace.jsonl", GOOD, {**GOOD, **change})
    with pytest.raises(ConfigError) as refused:
        read_mooncake(trace)
    assert refused.value.message == f"{trace}:2: {said}"


def test_csv_requests_share_no_blocks(tmp_path: Path) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n12.5,600,3\n10,512,514\n\n")
    workload = read_trace(trace)
    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in workload.requests] == [(0.0, 512, 514), (2.5, 600, 3)]
    ids = [number for r in workload.requests for number in (*r.blocks, *r.output_blocks)]
    assert [(len(r.blocks), len(r.output_blocks)) for r in workload.requests] == [(1, 1), (2, 0)]
    assert len(set(ids)) == len(ids) == 4


def test_azure_traces_are_read_by_their_header(tmp_path: Path) -> None:
    trace = tmp_path / "azure"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n")
    workload = read_trace(trace)
    assert [r.input_tokens for r in workload.requests] == [4808, 3180]
    assert workload.requests[1].arrival_s == pytest.approx(0.052, abs=1e-6)


def test_columns_of_any_name_and_unit_can_be_said(tmp_path: Path) -> None:
    trace = tmp_path / "own.csv"
    trace.write_text("out, in, user, start\n4, 20, x, 2000\n5, 30, y, 500\n")
    with pytest.raises(ConfigError, match="say which they are"):
        read_csv(trace)
    workload = read_csv(trace, 16, CsvColumns.parse("start:ms,in,out"))
    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in workload.requests] == [(0.0, 30, 5), (1.5, 20, 4)]
    assert CsvColumns.parse("a,b,c") == CsvColumns("a", "b", "c", "s")
    for wrong in ("a,b", "a:h,b,c", "", "a,,c"):
        with pytest.raises(ConfigError):
            CsvColumns.parse(wrong)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("soon,1,1", "arrival_s should be a number of s, not 'soon'"),
        ("nan,1,1", "arrival_s should be a number of s, not 'nan'"),
        ("1,-4,1", "prompt_tokens should be a number of tokens, 1 or more, not '-4'"),
        ("1,4,0", "output_tokens should be a number of tokens, 1 or more, not '0'"),
        ("1,4", "2 values for 3 columns"),
    ],
)
def test_a_csv_line_that_is_no_request_is_named(tmp_path: Path, line: str, said: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(f"arrival_s,prompt_tokens,output_tokens\n0,1,1\n{line}\n")
    with pytest.raises(ConfigError) as refused:
        read_csv(trace)
    assert refused.value.message == f"{trace}:3: {said}"


def test_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "empty.csv").touch()
    (tmp_path / "empty").touch()
    (tmp_path / "header.csv").write_text("arrival_s,prompt_tokens,output_tokens\n")
    for name in ("empty.jsonl", "empty.csv", "empty", "header.csv"):
        with pytest.raises(ConfigError, match="empty trace"):
            read_trace(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "absent")
    (tmp_path / "columns.csv").write_text("a,b,c\n1,1,1\n")
    with pytest.raises(ConfigError, match="there is no column start among a, b, c"):
        read_trace(tmp_path / "columns.csv", columns=CsvColumns("start", "b", "c"))


def test_the_format_is_seen_where_the_name_does_not_say(tmp_path: Path) -> None:
    assert len(read_trace(write_records(tmp_path / "json", GOOD)).requests) == 1
    (tmp_path / "rows.txt").write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    assert len(read_trace(tmp_path / "rows.txt").requests) == 1
