"""Block keys of requests that have block ids for content."""

from __future__ import annotations

from functools import lru_cache

from simulator.workload import SimRequest
from springtide.ids import BlockKey

_FACTOR, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
_REMEMBERED = 1 << 13
"""Requests in flight, and more: what each of them needs its keys for is asked for several times."""


def prompt_keys(request: SimRequest, begin: int, end: int, block_tokens: int) -> tuple[BlockKey, ...]:
    """The keys of blocks [begin, end) of the prompt and the output after it. Output that the workload gives no ids for is found by nobody
    else."""
    known = _known(request, block_tokens)
    if end <= len(known):
        return known if begin == 0 and end == len(known) else known[begin:end]
    own = (_spread(request.request_id << 20 | index, 1 << 63) for index in range(max(begin, len(known)), end))
    return (*known[begin:], *own)


@lru_cache(_REMEMBERED)
def _known(request: SimRequest, block_tokens: int) -> tuple[BlockKey, ...]:
    """Of the full blocks that have ids."""
    blocks = (*request.blocks[: request.input_tokens // block_tokens], *request.output_blocks)
    return tuple(_spread(block, 0) for block in blocks)


def _spread(number: int, kind: int) -> BlockKey:
    """Another key for every number below 2^63, with bits as even as those of a hash, which tables count on: `number` by Knuth's factor."""
    return BlockKey((number * _FACTOR & _MASK).to_bytes(8, "big") + (number | kind).to_bytes(8, "big"))
