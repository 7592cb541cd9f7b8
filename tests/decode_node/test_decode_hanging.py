"""A step that hangs: its process has to end, for a thread cannot be killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from springtide.protocol.sampling import SamplingParams
from tests.support.engine_nodes import WAIT_S, DirectEngine, EngineNodes
from tests.support.hanging_engine import HANGING, hanging_engine, serves_after_hanging
from tests.support.models import make_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT = [10 + i % 200 for i in range(100)]
ON = ("prefill-0", "decode-1")


async def test_an_engine_whose_step_hangs_ends_and_the_next_one_serves(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    async with EngineNodes(tmp_path, model, kv={"block_tokens": 16, "arena_size": "8MiB"}) as nodes:
        await nodes.start_store("decode-1")
        async with hanging_engine(nodes, "decode-1", tmp_path, other_than=0) as engine:
            outcome = await nodes.gateway.run(PROMPT, GREEDY, on=ON)
            assert outcome.token_ids == DirectEngine(nodes).generate(PROMPT, GREEDY)
            hanging = await nodes.gateway.start([*PROMPT, HANGING], GREEDY, on=ON)
            async with asyncio.timeout(WAIT_S):
                assert await engine.wait() == 1
        await serves_after_hanging(nodes, "decode-1", tmp_path, hanging, PROMPT, GREEDY)
