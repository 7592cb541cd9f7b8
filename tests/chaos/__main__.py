"""`python -m tests.chaos --minutes 10 --seed N`: see docs/chaos.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from math import inf
from pathlib import Path

from tests.chaos import isolation, report, shapes
from tests.chaos.checks import violations
from tests.chaos.history import Limits
from tests.chaos.run import Run

_LIMITS = Limits()


def main() -> int:
    arguments = _arguments()
    isolation.enter(sys.argv[1:])
    if arguments.every_kind and not isolation.isolated():
        print("--every-kind: cuts, resets, narrow networks and full disks need namespaces, and none can be made here", file=sys.stderr)
        return 1
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    shape = shapes.choose(seed) if arguments.shape is None else shapes.named(arguments.shape)
    limits = replace(
        _LIMITS, gap_s=inf if shape.scarce else arguments.gap_s, first_token_s=arguments.first_token_s, sheds_load=shape.sheds_load
    )
    if not isolation.isolated():
        print("cuts, resets, narrow networks and full disks are not injected: no namespaces can be made here", file=sys.stderr)
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    keep = arguments.keep
    try:
        history = asyncio.run(Run(seed, shape, arguments.minutes, directory, limits, lambda line: print(line, flush=True)).execute())
        found = violations(history)
        keep = keep or bool(found)
        command = f'make chaos ARGS="--minutes {arguments.minutes:g} --seed {seed} --shape {shape.name}"'
        run = report.Run(seed, shape.name, arguments.minutes, command, str(directory / "chaos" / "run" / "logs"), report.commit())
        print(report.text(run, history, found))
        if arguments.report is not None:
            arguments.report.write_text(json.dumps(report.document(run, history, found), indent=1, ensure_ascii=False) + "\n")
    except BaseException:
        keep = True
        print(f"logs: {directory}", file=sys.stderr)
        raise
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)
    return 1 if found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos", description="A real cluster under faults; exit code 1 when something did not hold.")
    parser.add_argument("--minutes", type=float, default=3.0, help="of faults; the reference and the start come on top (default: 3)")
    parser.add_argument("--seed", type=int, help="decides the shape, the requests and the faults; default: the time")
    parser.add_argument("--shape", help=f"{', '.join(shape.name for shape in shapes.SHAPES)}, or several joined by +; default: by the seed")
    parser.add_argument("--gap-s", type=float, default=_LIMITS.gap_s, help="longest time between tokens while someone could serve")
    parser.add_argument("--first-token-s", type=float, default=_LIMITS.first_token_s, help="longest wait for a first token, likewise")
    parser.add_argument(
        "--every-kind", action="store_true", help="fail where some kinds of faults cannot be injected for lack of namespaces"
    )
    parser.add_argument("--report", type=Path, help="write everything as JSON to this file")
    parser.add_argument("--keep", action="store_true", help="keep model and logs even if nothing is wrong")
    arguments = parser.parse_args()
    if not 0 < arguments.minutes <= 24 * 60:
        parser.error(f"--minutes {arguments.minutes:g}: must be above 0 and at most a day")
    try:
        if arguments.shape is not None:
            shapes.named(arguments.shape)
    except ValueError as error:
        parser.error(str(error))
    return arguments


if __name__ == "__main__":
    sys.exit(main())
