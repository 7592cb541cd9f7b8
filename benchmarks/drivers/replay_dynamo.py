"""Dynamo's offline replay of a trace through its KV router and mock engines. Prints the summary as JSON."""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("DYN_LOG", "error")

from dynamo._core import run_mocker_trace_replay


def main(trace: str, workers: str, speed: str, ttft_ms: str, tbt_ms: str, block_tokens: str, num_blocks: str) -> None:
    result = run_mocker_trace_replay(
        [trace],
        replay_mode="offline",
        router_mode="kv_router",
        trace_block_size=512,
        num_workers=int(workers),
        arrival_speedup_ratio=float(speed),
        sla_ttft_ms=float(ttft_ms),
        sla_itl_ms=float(tbt_ms),
        extra_engine_args={"engine": {"block_size": int(block_tokens), "num_gpu_blocks": int(num_blocks)}},
    )
    print(json.dumps(result.summary))


if __name__ == "__main__":
    main(*sys.argv[1:])
