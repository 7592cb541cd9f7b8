"""How much script a frame had, as the console's benchmark makes it out of a browser's trace."""

from __future__ import annotations

from typing import Any

from benchmarks.console import FRAME, frames_of, rows_of

PAGE, OTHER = (7, 1), (8, 1)


def event(name: str, at_us: float, took_us: float = 0.0, on_cpu_us: float = 0.0, thread: tuple[int, int] = PAGE) -> dict[str, Any]:
    pid, tid = thread
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": at_us, "dur": took_us, "tdur": on_cpu_us}


def test_a_frame_has_what_ran_since_the_one_before_and_what_is_within_another_counts_once() -> None:
    frames = frames_of(
        [
            event("FunctionCall", 18_000, 5_000, 4_000),
            event("FunctionCall", 1_000, 3_000, 2_000),
            event("MinorGC", 2_000, 1_000, 1_000),
            event("RunMicrotasks", 4_000, 1_000, 500),
            event(FRAME, 16_000),
            event("Layout", 17_000, 900, 900),
            event(FRAME, 32_000),
            event("FunctionCall", 2_000, 90_000, 90_000, OTHER),
        ]
    )
    assert list(frames.wall) == [4.0, 5.0, 0.0]
    assert list(frames.cpu) == [2.5, 4.0, 0.0]


def test_a_trace_without_scripts_has_no_frames() -> None:
    assert list(frames_of([event("Layout", 1, 2)]).cpu) == []


def test_a_view_is_held_to_its_longest_frame() -> None:
    rows = {row.row: row for row in rows_of("pool", frames_of([event("FunctionCall", 0, 30_000, 17_000), event(FRAME, 40_000)]))}
    assert rows["script a frame, max"].ours == 17.0
    assert rows["script a frame, max"].met is False
    assert rows["script a frame, max by the clock"].ours == 30.0
    assert rows["script a frame, max by the clock"].wanted is None
