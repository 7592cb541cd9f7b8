"""Runs are kept: an experiment that was cut off goes on where it stopped, as long as nothing that its runs depend on has changed."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

from benchmarks.provenance import CHECKOUT, provenance
from simulator.run import Plan

DIRECTORY = CHECKOUT / ".cache" / "experiments"


def kept(run: Callable[[Plan], dict[str, Any]], plan: Plan) -> dict[str, Any]:
    """What `run`, a function of a module, makes of the plan: figures that JSON can hold. Of code that is not committed nothing is kept, and
    of another `run` nothing is found."""
    depends = _depends()
    if depends is None:
        return run(plan)
    name = hashlib.sha256(pickle.dumps((depends, inspect.getsource(run), plan))).hexdigest()
    path = DIRECTORY / f"{name}.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    result = run(plan)
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(result))
    unfinished.rename(path)
    return result


@cache
def _depends() -> tuple[tuple[str, str], ...] | None:
    """The packages behind a run and git's hashes of them; None where they are not known or not as committed."""
    behind = provenance("simulator")
    return None if behind["dirty"] is not False else tuple(sorted(behind["trees"].items()))
