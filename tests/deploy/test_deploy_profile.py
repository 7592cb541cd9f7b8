"""`springtide profile`."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from deploy.cli import app
from node_runtime.loading import cost_model
from springtide.cost import DecodeCost, PrefillCost
from tests.support.models import make_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_file_has_the_cost_models_of_an_engine_of_so_many_ranks(tmp_path: Path, model: Path, ranks: int) -> None:
    before = psutil.Process().children()
    output = tmp_path / "profile.json"
    settings = ["--model", str(model), "--dtype", "float32", "--threads", "1", "--max-context", "256", "--output", str(output)]
    result = CliRunner().invoke(app, ["profile", *settings, "--tensor-parallel", str(ranks)])
    assert result.exit_code == 0, result.output
    assert json.loads(output.read_text())["tensor_parallel"] == ranks
    prefill = cost_model(PrefillCost, "prefill", output, lambda: pytest.fail("measured"))
    decode = cost_model(DecodeCost, "decode", output, lambda: pytest.fail("measured"))
    assert prefill.predict_ms(512) > 0 and decode.predict_ms(8, 8 * 512) > 0
    assert set(psutil.Process().children()) <= set(before), "ranks end with it"
