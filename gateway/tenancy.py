"""What keeps tenants apart in the pool: a namespace for the blocks of each."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from gateway.events import Generation
from springtide.blocks import block_keys, namespace_root
from springtide.ids import BlockKey


class TenantHashing:
    """Hashing by tenant. Each has a namespace of its own, and one more for each of its salts: nobody's blocks match another's."""

    def __init__(self, model_fingerprint: str, kv_dtype: str, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        root = functools.partial(namespace_root, model_fingerprint, kv_dtype, block_tokens)
        self._root = functools.lru_cache(maxsize=4096)(root)

    def namespace(self, generation: Generation) -> BlockKey:
        return self._root(f"{generation.tenant}\0{generation.salt}" if generation.salt else generation.tenant)

    def keys(self, generation: Generation, token_ids: Sequence[int], known: tuple[BlockKey, ...] = ()) -> tuple[BlockKey, ...]:
        parent = known[-1] if known else self.namespace(generation)
        return (*known, *block_keys(parent, token_ids[len(known) * self.block_tokens :], self.block_tokens))
