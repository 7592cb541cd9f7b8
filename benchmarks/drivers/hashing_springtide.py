"""Springtide's block keys: 128 bits a block, chained from the namespace on."""

from __future__ import annotations

from benchmarks.drivers.hashing import BLOCK_TOKENS, HashingJob
from benchmarks.drivers.protocol import run
from springtide.blocks import block_keys, namespace_root

ROOT = namespace_root("model", "bfloat16", BLOCK_TOKENS)

if __name__ == "__main__":
    run(lambda arguments: HashingJob(lambda tokens: block_keys(ROOT, tokens, BLOCK_TOKENS), arguments))
