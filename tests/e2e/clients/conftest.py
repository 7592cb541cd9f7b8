from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """As `springtide up` without options: every client of this directory talks to the same one."""
    with Cluster(instances=2) as cluster:
        yield cluster
