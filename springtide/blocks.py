"""Block keys: the 128-bit chained hashes by which KV blocks are found again (docs/architecture.md, section 1)."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import overload

from springtide import _native
from springtide.errors import InvalidRequest
from springtide.ids import BlockKey

KEY_BYTES = 16


def namespace_root(model_fingerprint: str, kv_dtype: str, block_tokens: int, tenant_salt: str = "") -> BlockKey:
    """The parent of every first block. Blocks of different namespaces never match each other."""
    identity = "\0".join((model_fingerprint, kv_dtype, str(block_tokens), tenant_salt))
    return BlockKey(blake2b(identity.encode(), digest_size=KEY_BYTES, person=b"springtide-root").digest())


def block_keys(parent: BlockKey, token_ids: Sequence[int], block_tokens: int) -> list[BlockKey]:
    """The keys of every *full* block of `token_ids`, chained from `parent` (a namespace root or the key of the block before).

    A key is the BLAKE2b digest of the block's tokens, salted with the parent's key (RFC 7693): as good as hashing both together, and at 64
    tokens a third less work. Raises OverflowError when a token id is not in [0, 2**32).
    """
    return _native.block_keys(parent, token_ids, block_tokens)


class PackedKeys(Sequence[BlockKey]):
    """Keys end to end, as a prompt's are sent: a key becomes an object only when somebody looks at it, and of a long prompt few are."""

    __slots__ = ("_packed",)

    def __init__(self, packed: bytes) -> None:
        """Raises InvalidRequest when the bytes are not those of whole keys."""
        if len(packed) % KEY_BYTES:
            raise InvalidRequest(f"block_keys has {len(packed)} bytes; a key has {KEY_BYTES}", param="block_keys")
        self._packed = packed

    def __len__(self) -> int:
        return len(self._packed) // KEY_BYTES

    @overload
    def __getitem__(self, index: int) -> BlockKey: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockKey]: ...
    def __getitem__(self, index: int | slice) -> BlockKey | Sequence[BlockKey]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        start = range(0, len(self._packed), KEY_BYTES)[index]
        return BlockKey(self._packed[start : start + KEY_BYTES])

    def __bytes__(self) -> bytes:
        return self._packed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def packed(keys: Sequence[BlockKey]) -> bytes:
    """The keys end to end."""
    return bytes(keys) if isinstance(keys, PackedKeys) else b"".join(keys)


def checked_keys(keys: Sequence[bytes]) -> list[BlockKey]:
    """Keys that came over the wire. Raises InvalidRequest naming one that is none."""
    for position, key in enumerate(keys):
        if len(key) != KEY_BYTES:
            raise InvalidRequest(f"keys[{position}] must have {KEY_BYTES} bytes, not {len(key)}", param="keys")
    return [BlockKey(key) for key in keys]


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """How many blocks hold `num_tokens`, the last possibly partial."""
    return -(-num_tokens // block_tokens)
