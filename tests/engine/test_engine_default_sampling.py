"""How a model's files recommend to sample it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.formats.default_sampling import DEMO_SAMPLING
from engine.formats.files import describe
from springtide.errors import ConfigError
from springtide.modelinfo import ModelInfo
from tests.support.models import make_tiny_llama


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


def written(directory: Path, **values: object) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


def test_a_directorys_generation_config_is_told_and_kept(directory: Path, tmp_path: Path) -> None:
    info = describe(
        str(written(directory, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=None, max_new_tokens=9, do_sample=True))
    )
    assert info.default_sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    info.save(tmp_path / "model.json")
    assert ModelInfo.load(tmp_path / "model.json") == info


def test_a_model_that_says_nothing_has_no_defaults(directory: Path) -> None:
    assert describe(str(written(directory))).default_sampling == {}


@pytest.mark.parametrize("values", [{"temperature": 9}, {"top_p": "much"}, {"repetition_penalty": 0}])
def test_a_value_that_cannot_be_is_named(directory: Path, values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"generation_config.json: {next(iter(values))}"):
        describe(str(written(directory, **values)))


def test_the_demo_model_has_its_makers_advice() -> None:
    assert describe("demo").default_sampling == DEMO_SAMPLING
