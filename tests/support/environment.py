"""What of this machine's environment a process of a test is to see."""

from __future__ import annotations

import os


def own_environment(*, proxies: bool = True) -> dict[str, str]:
    """None of the settings that the tests were started with; without `proxies`, no way to them either."""
    unwanted = [name for name in os.environ if name.startswith("SPRINGTIDE_") or (not proxies and name.lower().endswith("_proxy"))]
    return {name: value for name, value in os.environ.items() if name not in unwanted}
