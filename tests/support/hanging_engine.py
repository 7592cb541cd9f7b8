"""`python -m tests.support.hanging_engine ARGUMENTS`: `python -m prefill_node`, whose first stage never ends a pass with HANGING in it, and
which takes that for a hang soon."""

from __future__ import annotations

import threading
from math import inf
from typing import Any

from prefill_node.__main__ import main
from prefill_node.core.actions import RunPass
from prefill_node.server import formation, passes, watchdog
from prefill_node.stage.compute import Part, Result, compute

HANGING = 251


def computing(runner: Any, part: Part, *rest: Any) -> Result:
    if any(HANGING in chunk.token_ids for chunk in part.chunks):
        threading.Event().wait()
    return compute(runner, part, *rest)


def longest_pass_s(run: RunPass, *_: Any) -> float:
    return inf if run.predicted_ms == inf else 1.0


if __name__ == "__main__":
    watchdog.LOOK_EVERY_S = formation.WATCH_EVERY_S = 0.05
    formation.END_TIMEOUT_S = 1.0
    for module in (formation, passes):
        module.compute = computing  # type: ignore[attr-defined]
        module.longest_pass_s = longest_pass_s  # type: ignore[attr-defined]
    main()
