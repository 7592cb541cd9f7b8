"""`Block`, `BlockTable` and `BlockHeap`: the compact ones where the C part is built, else the plain ones, which behave alike."""

from typing import TYPE_CHECKING

from kvstore.core.plain_block import MAX_USES

if TYPE_CHECKING:
    from kvstore.core.plain_block import Block, BlockHeap, BlockTable
else:
    try:
        from kvstore._native import Block, BlockHeap, BlockTable
    except ImportError:
        from kvstore.core.plain_block import Block, BlockHeap, BlockTable

__all__ = ["MAX_USES", "Block", "BlockHeap", "BlockTable"]
