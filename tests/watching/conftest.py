"""The model that watched clusters serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import make_tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
