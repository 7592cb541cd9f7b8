"""`pool` and `with_one_more`: in C where the C part is built, else with numpy, which comes to the same figures."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conductor.core.kernels.plain_forecasting import pool, with_one_more
else:
    try:
        from conductor._native import pool, with_one_more
    except ImportError:
        from conductor.core.kernels.plain_forecasting import pool, with_one_more

__all__ = ["pool", "with_one_more"]
