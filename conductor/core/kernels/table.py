"""`HolderTable`: the compact one where the C part is built, else the plain one, which behaves alike."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conductor.core.kernels.plain_table import HolderTable
else:
    try:
        from conductor._native import HolderTable
    except ImportError:
        from conductor.core.kernels.plain_table import HolderTable

__all__ = ["HolderTable"]
