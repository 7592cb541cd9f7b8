"""`python -m deploy.ray.node OUTPUT`: the process of a node that Ray has placed, which reads its order from standard input, prints the id
that it goes on with, and is nobody's child from there on. It is `springtide node`, and looks besides whether it is still wanted: nobody
else would end it, for who started it may be gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

from deploy.ray.orders import NodeOrder


def main() -> NoReturn:
    order, output = NodeOrder(**json.load(sys.stdin)), Path(sys.argv[1])
    _detach(output)
    # Only now: there must be no threads yet when a process forks.
    from deploy.local import logs
    from deploy.local.display import new_display
    from deploy.local.node import NodeOptions, StagePlace, run_node
    from deploy.ray.lifeline import follow
    from springtide.errors import SpringtideError

    stage = StagePlace(order.name, order.stage, order.stages) if order.stages > 1 else None
    options = NodeOptions(order.role, (order.join,), order.token, None if stage else order.name, None, order.settings, stage)
    code = 1
    try:
        code = run_node(
            options,
            new_display(),
            verbose=False,
            beside=lambda _: {"bound what it says": lambda: logs.keep_bounded(output)},
            while_wanted=partial(follow, order),
        )
    except SpringtideError as error:
        print(f"error: {error.message}", flush=True)
    if code == 0:
        logs.remove(output)
    sys.exit(code)


def _detach(output: Path) -> None:
    """Goes on in a session of its own, in a process whose parent has ended and whose output is in a file."""
    os.setsid()
    with contextlib.suppress(KeyError, OSError):  # which root alone may: Ray has what it starts give way to all else on the machine
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, int(os.environ["RAY_RAYLET_PID"])))
    child = os.fork()
    if child:
        print(child, flush=True)
        os._exit(0)
    nothing, said = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_APPEND)
    for here, there in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(here, there)


if __name__ == "__main__":
    main()
