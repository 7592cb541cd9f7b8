"""NIXL with its UCX backend, over the path that UCX_TLS says. Descriptor lists are prepared beforehand, as vLLM's connector does; timed is
making the request from them, posting it, polling until it is done, and releasing it."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

from benchmarks.drivers.protocol import Target, repeat, run
from benchmarks.drivers.slices import Slices, Transfer


def new_agent(name: str, memory: np.ndarray) -> nixl_agent:
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent


class NixlTransfer(Transfer):
    def __init__(self, arguments: Sequence[str]) -> None:
        self.slices = slices = Slices.from_arguments(arguments)
        self.memory = slices.new_memory()
        self._target = Target("benchmarks.drivers.nixl_ucx", slices.arguments)
        self._agent = new_agent("initiator", self.memory)
        peer = self._agent.add_remote_agent(base64.b64decode(self._target.announced["metadata"]))
        self._here = self._prepare("NIXL_INIT_AGENT", self.memory.ctypes.data, slices.here)
        self._there = self._prepare(peer, self._target.announced["memory"], slices.there)
        self._all = list(range(slices.count))

    def measure(self, operation: str, times: int) -> list[float]:
        agent, everything, kind = self._agent, self._all, operation.upper()

        def once() -> None:
            request = agent.make_prepped_xfer(kind, self._here, everything, self._there, everything)
            state = agent.transfer(request)
            while state == "PROC":
                state = agent.check_xfer_state(request)
            agent.release_xfer_handle(request)
            if state != "DONE":
                raise RuntimeError(f"a {operation} of {self.slices} ended as {state}")

        return repeat(once, times)

    def close(self) -> None:
        self._target.close()

    def _prepare(self, agent_name: str, base: int, offsets: Sequence[int]) -> Any:
        return self._agent.prep_xfer_dlist(agent_name, [(base + offset, self.slices.size, 0) for offset in offsets], "DRAM")


def serve_target(arguments: Sequence[str]) -> tuple[dict[str, Any], object]:
    memory = Slices.from_arguments(arguments).new_memory()
    agent = new_agent("target", memory)
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    return {"metadata": metadata, "memory": memory.ctypes.data}, (agent, memory)


if __name__ == "__main__":
    run(NixlTransfer, serve_target)
    os._exit(0)  # UCX's own end of a process crashes now and then
