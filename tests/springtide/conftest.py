from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

_LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Each test runs in asyncio's own event loop, or in those that it is marked with."""
    marked = (marker.kwargs["loop_factories"] for marker in item.iter_markers("asyncio") if "loop_factories" in marker.kwargs)
    return {name: _LOOPS[name] for name in next(marked, ("asyncio",))}
