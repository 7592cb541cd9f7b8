"""The model that clusters of many machines serve, and what transformers say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import make_tiny_llama
from tests.support.reference import Reference


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference.from_directory(model)
