from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from messenger_support import Node, Workshop

from messenger.base import Connection


@pytest.fixture(params=["inproc", "faulty", "shm", "tcp", "tcp-python", "tcp-mixed", pytest.param("rdma", marks=pytest.mark.rdma)])
async def workshop(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Workshop]:
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
