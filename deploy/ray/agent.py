"""The agent: an actor of Ray's that stands for one node. It starts the node's process, or finds it again, and says whether it runs.

The process is no child of the agent, and in a session of its own. Ray ends an actor's children with it, an actor with its Ray node, and all
Ray nodes some time after the head was lost; none of that may end a stream.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import ray

from deploy.local import logs
from deploy.local.rundir import running_clusters, user_directory
from deploy.ray.orders import AgentPlace, NodeOrder, NodeState

_START_S = 30.0
_CARDS = "CUDA_VISIBLE_DEVICES"
_TAG = "PLACED_BY_SPRINGTIDE"
"""In a process's environment: `NodeOrder.tag`."""
_KEPT = "SPT_NOENV"
"""For setproctitle, which would otherwise write the title over the environment."""


def environment_of(order: NodeOrder, cards: tuple[str, ...]) -> dict[str, str]:
    """A node's process's, which others can read as long as it runs."""
    own = {_TAG: order.tag, _KEPT: "1"} | ({_CARDS: ",".join(cards)} if cards else {})
    return {**os.environ, **own}


class NodeAgent:
    """`start` or `adopt` first, once."""

    def __init__(self) -> None:
        self._process: psutil.Process | None = None
        self._output: Path | None = None

    def place(self) -> AgentPlace:
        context = ray.get_runtime_context()
        return AgentPlace(context.get_node_id(), ray.util.get_node_ip_address(), tuple(context.get_accelerator_ids().get("GPU", ())))

    def start(self, order: NodeOrder, cards: tuple[str, ...]) -> tuple[str, ...]:
        """The process's cards, when it is there. Raises OSError, CalledProcessError, TimeoutExpired."""
        descriptor, name = tempfile.mkstemp(prefix=f"{order.name}-", suffix=".log", dir=user_directory())
        self._output = Path(name)
        with os.fdopen(descriptor, "ab") as output:
            command = [sys.executable, "-P", "-m", "deploy.ray.node", name]
            said = json.dumps(order.as_json()).encode()
            started = subprocess.run(
                command, input=said, stdout=subprocess.PIPE, stderr=output, env=environment_of(order, cards), check=True, timeout=_START_S
            )
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(int(started.stdout))
        return cards

    def adopt(self, tag: str) -> tuple[str, ...]:
        """Finds the process of this tag on this host, if it is there. Returns its cards, which need not be those of the agent."""
        for record in running_clusters():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(record.pid)
                environment = process.environ()
                if environment.get(_TAG) == tag:
                    self._process = process
                    return tuple(filter(None, environment.get(_CARDS, "").split(",")))
        return ()

    def state(self) -> NodeState:
        if self._process is not None and self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
            return NodeState(True)
        if self._output is None:
            return NodeState(False)
        said = logs.last_lines(self._output)
        logs.remove(self._output)
        self._output = None
        return NodeState(False, said)
