"""A first stage that hangs in a pass: its process has to end, for a thread cannot be killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefill_node.server import watchdog
from prefill_node.server.watchdog import Watchdog
from springtide.config import write_config
from springtide.rpc import common_pb2 as pb
from springtide.sampling import SamplingParams
from tests.support.engine_nodes import WAIT_S, DirectEngine, EngineNodes
from tests.support.hanging_engine import HANGING
from tests.support.models import make_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT = [10 + i % 200 for i in range(100)]
ON = ("prefill-1", "decode-0")


@asynccontextmanager
async def engine_process(nodes: EngineNodes, run_dir: Path, other_than: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Of `prefill-1`, which has announced itself with another incarnation than the one given."""
    arguments = nodes.arguments("prefill-1")
    config, info = run_dir / "engine.yaml", run_dir / "engine.json"
    write_config(arguments.config, config)
    arguments.model_info.save(info)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.hanging_engine", "--config", str(config), "--model-info", str(info)),
        *("--run-dir", str(arguments.run_dir), "--node-id", "prefill-1", "--bind-host", "127.0.0.1"),
        env={**os.environ, "SPRINGTIDE_PARENT_PID": str(os.getpid())},
    )
    try:
        nodes.members["prefill-1"] = await nodes.member("prefill-1", other_than)
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@pytest.mark.parametrize("stages", [1, 2])
async def test_an_engine_whose_first_stage_hangs_ends_and_the_next_one_serves(tmp_path: Path, stages: int) -> None:
    model = make_tiny_llama(tmp_path / "tiny", num_hidden_layers=4)
    kv = {"block_tokens": 16, "arena_size": "8MiB"}
    async with EngineNodes(tmp_path, model, kv=kv, prefill_node={"chunk_tokens": 64, "stages": stages}) as nodes:
        await nodes.start_store("prefill-1")
        async with engine_process(nodes, tmp_path, other_than=0) as engine:
            attempt_id = await nodes.gateway.start([*PROMPT[:-1], HANGING], GREEDY, on=ON)
            async with asyncio.timeout(WAIT_S):
                assert await engine.wait() == 1
            if stages > 1:
                failures = (await nodes.gateway.end_of(attempt_id)).failures
                assert failures[0].code == pb.FAILURE_CODE_PEER_LOST, "the group fails its attempts before its process ends"
        await nodes.gateway.end_session("prefill-1")
        await nodes.gateway.abort(attempt_id, on=("prefill-0", "decode-0"))
        await nodes.all_slots_given_back()
        async with engine_process(nodes, tmp_path, nodes.members["prefill-1"].incarnation):
            outcome = await nodes.gateway.run(PROMPT, GREEDY, on=ON)
            assert outcome.token_ids == DirectEngine(nodes).generate(PROMPT, GREEDY)


def test_only_what_is_seen_again_and_again_goes_on() -> None:
    seen, first, second = watchdog.Seen(every_s=2.0), object(), object()
    assert [seen.look(first) for _ in range(4)] == [0.0, 2.0, 4.0, 6.0]
    assert [seen.look(second) for _ in range(2)] == [0.0, 2.0], "other work begins anew"
    for _ in range(5):
        seen.look(None)
    assert [seen.look(first) for _ in range(2)] == [0.0, 2.0], "and so does work after none"


def test_work_that_takes_too_long_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_EVERY_S", 0.01)
    told = threading.Semaphore(0)
    dog = Watchdog(told.release)
    with dog.during("slow work", 0.05):
        assert told.acquire(timeout=WAIT_S)
        assert not told.acquire(timeout=0.2)
    dog.close()


def test_a_log_that_nobody_reads_does_not_keep_a_process_from_ending() -> None:
    script = """
import logging, threading
from springtide.process import end_process
logging.basicConfig()
threading.Thread(target=lambda: (logging.getLogger().handlers[0].acquire(), threading.Event().wait()), daemon=True).start()
end_process(3)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=WAIT_S).returncode == 3
