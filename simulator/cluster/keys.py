"""Block keys of requests that have block ids for content."""

from __future__ import annotations

from simulator.workload import SimRequest
from springtide.ids import BlockKey


def prompt_keys(request: SimRequest, begin: int, end: int, block_tokens: int) -> tuple[BlockKey, ...]:
    """Of blocks [begin, end) of the prompt and the output after it. Output that the workload gives no ids for is found by nobody else."""
    full = request.input_tokens // block_tokens
    keys = [_key(block) for block in request.blocks[begin : min(end, full)]]
    for index in range(max(begin, full), end):
        known = index - full < len(request.output_blocks)
        keys.append(_key(request.output_blocks[index - full]) if known else _own_key(request.request_id, index))
    return tuple(keys)


def _key(block: int) -> BlockKey:
    return BlockKey(block.to_bytes(16, "big"))


def _own_key(request_id: int, index: int) -> BlockKey:
    return BlockKey(b"\xff" + request_id.to_bytes(8, "big") + index.to_bytes(7, "big"))
