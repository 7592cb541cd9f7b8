"""What tests of the deployment share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Short enough for the Unix sockets of a run directory, which pytest's own directories are not always."""
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as path:
        yield Path(path)
