"""The C part of what every part shares (springtide/native/)."""

from collections.abc import Sequence

from springtide.ids import BlockKey

def block_keys(parent: BlockKey, token_ids: Sequence[int], block_tokens: int, /) -> list[BlockKey]:
    """As springtide.blocks.block_keys."""
