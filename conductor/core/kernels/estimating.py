"""`prefill`, `decode` and `spread`: in C where the C part is built, else with numpy, which comes to the same figures."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conductor.core.kernels.plain_estimating import decode, prefill, spread
else:
    try:
        from conductor._native import decode, prefill, spread
    except ImportError:
        from conductor.core.kernels.plain_estimating import decode, prefill, spread

__all__ = ["decode", "prefill", "spread"]
