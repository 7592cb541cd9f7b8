from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from messenger_support import Node, Workshop

from messenger.base import Connection
from messenger.registry import TRANSPORTS

MARKS = {"rdma": pytest.mark.rdma}
"""Marks of the tests of transports that not every machine has."""


@pytest.fixture(params=["inproc", "faulty", *(pytest.param(name, marks=MARKS.get(name, ())) for name in TRANSPORTS)])
async def workshop(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Workshop]:
    """Of every transport that is registered, and of those of the tests."""
    made = Workshop(request.param, tmp_path)
    yield made
    await made.close()


@pytest.fixture
async def here(workshop: Workshop) -> Node:
    return await workshop.node("here")


@pytest.fixture
async def there(workshop: Workshop) -> Node:
    return await workshop.node("there")


@pytest.fixture
async def connection(here: Node, there: Node) -> Connection:
    return await here.connect(there.endpoint)
