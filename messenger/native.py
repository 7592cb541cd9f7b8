"""Whether the C part of Messenger was built. Without it everything works, in pure Python and slower."""

from __future__ import annotations

try:
    import messenger._native  # noqa: F401
except ImportError:
    AVAILABLE = False
else:
    AVAILABLE = True
