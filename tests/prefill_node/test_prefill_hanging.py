"""A first stage that hangs in a pass: its process has to end, for a thread cannot be killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from springtide.protocol.outputs import FailureCode
from springtide.protocol.sampling import SamplingParams
from tests.support.engine_nodes import WAIT_S, EngineNodes
from tests.support.hanging_engine import HANGING, hanging_engine, serves_after_hanging
from tests.support.models import make_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT = [10 + i % 200 for i in range(100)]
ON = ("prefill-1", "decode-0")


@pytest.mark.parametrize("stages", [1, 2])
async def test_an_engine_whose_first_stage_hangs_ends_and_the_next_one_serves(tmp_path: Path, stages: int) -> None:
    model = make_tiny_llama(tmp_path / "tiny", num_hidden_layers=4)
    kv = {"block_tokens": 16, "arena_size": "8MiB"}
    async with EngineNodes(tmp_path, model, kv=kv, prefill_node={"chunk_tokens": 64, "stages": stages}) as nodes:
        await nodes.start_store("prefill-1")
        async with hanging_engine(nodes, "prefill-1", tmp_path, other_than=0) as engine:
            attempt_id = await nodes.gateway.start([*PROMPT[:-1], HANGING], GREEDY, on=ON)
            async with asyncio.timeout(WAIT_S):
                assert await engine.wait() == 1
            if stages > 1:
                failures = (await nodes.gateway.end_of(attempt_id)).failures
                assert failures[0].code == FailureCode.PEER_LOST, "the group fails its attempts before its process ends"
        await serves_after_hanging(nodes, "prefill-1", tmp_path, attempt_id, PROMPT, GREEDY)
