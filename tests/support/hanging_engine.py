"""`python -m tests.support.hanging_engine ARGUMENTS`: `python -m prefill_node` or `python -m mixed_node`, as the node's id says, that
never ends a pass or a step with HANGING in it, and takes that for a hang soon."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any

from decode_node.core.actions import RunStep
from decode_node.server.steps import StepRunner
from mixed_node.__main__ import main as decode_main
from mixed_node.server import server as mixed_server
from mixed_node.server import steps as mixed_steps
from node_runtime import model_thread
from prefill_node.__main__ import main as prefill_main
from prefill_node.core.actions import RunPass
from prefill_node.server import formation
from prefill_node.stage.compute import PassPart, compute
from springtide.config import write_config
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.stages import StagePassEnded
from tests.support.engine_nodes import DirectEngine, EngineNodes

HANGING = 251


@asynccontextmanager
async def hanging_engine(nodes: EngineNodes, node_id: str, run_dir: Path, other_than: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process of a node whose store runs, once it has announced itself with another incarnation than the one given."""
    arguments = nodes.arguments(node_id)
    config, info = run_dir / "engine.yaml", run_dir / "engine.json"
    write_config(arguments.config, config)
    arguments.model_info.save(info)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.hanging_engine", "--config", str(config), "--model-info", str(info)),
        *("--run-dir", str(arguments.run_dir), "--node-id", node_id, "--bind-host", "127.0.0.1"),
        env={**os.environ, "SPRINGTIDE_PARENT_PID": str(os.getpid())},
    )
    try:
        nodes.members[node_id] = await nodes.member(node_id, other_than)
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def serves_after_hanging(
    nodes: EngineNodes, node_id: str, run_dir: Path, hung: str, prompt: list[int], params: SamplingParams
) -> None:
    """Its process has ended in the attempt `hung`: nothing of that is left anywhere, and the next process serves. The other side of both
    is the first node."""
    prefill_id, decode_id = (node_id, "decode-0") if node_id.startswith("prefill") else ("prefill-0", node_id)
    await nodes.gateway.end_session(node_id)
    await nodes.gateway.abort(hung, on=("prefill-0", "decode-0"))
    await nodes.all_slots_given_back()
    async with hanging_engine(nodes, node_id, run_dir, nodes.members[node_id].incarnation):
        outcome = await nodes.gateway.run(prompt, params, on=(prefill_id, decode_id))
        assert outcome.token_ids == DirectEngine(nodes).generate(prompt, params)


def computing(runner: Any, part: PassPart, *rest: Any) -> StagePassEnded:
    if any(HANGING in chunk.token_ids for chunk in part.chunks):
        threading.Event().wait()
    return compute(runner, part, *rest)


def longest_pass_s(run: RunPass, *_: Any) -> float:
    return inf if run.predicted_ms == inf else 1.0


class HangingSteps(StepRunner):
    def run(self, run: RunStep) -> Any:
        if any(HANGING in row.sampling.prompt_ids for row in run.rows):
            threading.Event().wait()
        return super().run(run)


def main() -> None:
    model_thread.LOOK_EVERY_S = formation.WATCH_EVERY_S = 0.05
    formation.END_TIMEOUT_S = 1.0
    formation.compute = computing
    formation.longest_pass_s = longest_pass_s
    mixed_steps.StepRunner = HangingSteps  # type: ignore[misc]
    mixed_server.longest_s = lambda *_: 1.0
    (decode_main if sys.argv[sys.argv.index("--node-id") + 1].startswith("decode") else prefill_main)()


if __name__ == "__main__":
    main()
