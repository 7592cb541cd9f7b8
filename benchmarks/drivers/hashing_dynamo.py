"""Dynamo's compute_block_hash_for_seq: 64 bits a block, of the block's own tokens alone."""

from __future__ import annotations

import os

os.environ.setdefault("DYN_LOG", "error")

from dynamo._core import compute_block_hash_for_seq

from benchmarks.drivers.hashing import BLOCK_TOKENS, HashingJob
from benchmarks.drivers.protocol import run

if __name__ == "__main__":
    run(lambda arguments: HashingJob(lambda tokens: compute_block_hash_for_seq(tokens, BLOCK_TOKENS), arguments))
