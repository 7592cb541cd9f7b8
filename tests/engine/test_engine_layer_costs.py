"""What the layers of a model cost, by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.formats.files import describe
from engine.layer_costs import measure_layers
from tests.engine.test_engine_native import needs_kernels
from tests.support.models import make_tiny_llama, make_tiny_model


def test_layers_that_are_alike_are_measured_once(tmp_path: Path) -> None:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1, 2], "num_hidden_layers": 5}
    info = describe(str(make_tiny_model(tmp_path / "tiny", "Qwen3Moe", **experts)))
    costs = measure_layers(info, "float32", 16, new_tokens=40, cached_tokens=100)
    sparse, dense = costs.layers[0], costs.layers[1]
    assert costs.layers[:4] == (sparse, dense, dense, sparse)
    assert min(costs.layers) > 0 and len({sparse, dense, costs.layers[4]}) == 3, "the last one is measured by itself"
    assert costs.embedding > 0 and costs.head > 0


@needs_kernels
@pytest.mark.parametrize("windows", [{}, {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}])
def test_what_the_last_layer_leaves_out_is_not_taken_for_what_others_cost(tmp_path: Path, windows: dict[str, Any]) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "num_hidden_layers": 4}
    info = describe(str(make_tiny_model(tmp_path / "tiny", "Qwen2", **sizes, **windows)))
    *others, last = measure_layers(info, "bfloat16", 16, new_tokens=512, cached_tokens=0).layers
    assert max(others) < 2 * min(others) and last < min(others)


def test_a_model_of_one_layer_has_both_ends(tmp_path: Path) -> None:
    info = describe(str(make_tiny_llama(tmp_path / "tiny", num_hidden_layers=1)))
    costs = measure_layers(info, "float32", 16, new_tokens=40, cached_tokens=0)
    assert len(costs.layers) == 1 and min(*costs.layers, costs.embedding, costs.head) > 0
