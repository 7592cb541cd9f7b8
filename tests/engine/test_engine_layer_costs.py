"""What the layers of a model cost, by kind."""

from __future__ import annotations

from pathlib import Path

from engine.files import describe
from engine.layer_costs import measure_layers
from tests.support.models import make_tiny_llama, make_tiny_model


def test_layers_that_are_alike_are_measured_once(tmp_path: Path) -> None:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1, 2], "num_hidden_layers": 5}
    info = describe(str(make_tiny_model(tmp_path / "tiny", "Qwen3Moe", **experts)))
    costs = measure_layers(info, "float32", 16, new_tokens=40, cached_tokens=100)
    sparse, dense = costs.layers[0], costs.layers[1]
    assert costs.layers == (sparse, dense, dense, sparse, sparse)
    assert sparse > 0 and dense > 0 and sparse != dense
    assert costs.embedding > 0 and costs.head > 0


def test_a_model_of_one_layer_has_both_ends(tmp_path: Path) -> None:
    info = describe(str(make_tiny_llama(tmp_path / "tiny", num_hidden_layers=1)))
    costs = measure_layers(info, "float32", 16, new_tokens=40, cached_tokens=0)
    assert len(costs.layers) == 1 and min(*costs.layers, costs.embedding, costs.head) > 0
