from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster
from tests.support.profiles import DEMO_PROFILE


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """As `springtide up` without options: every client of this directory talks to the same one."""
    with Cluster(instances=2, profile=DEMO_PROFILE) as cluster:
        yield cluster
