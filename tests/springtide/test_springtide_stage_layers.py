"""Which layers each stage of a prefill group takes, where it is not measured."""

from __future__ import annotations

import pytest

from springtide.config import PrefillConfig
from springtide.errors import ConfigError
from springtide.stage_layers import configured_split, layers_in_store


def test_stages_of_one_node_are_split_by_measurement_and_share_a_store() -> None:
    assert configured_split(PrefillConfig(stages=3), 30) is None
    assert configured_split(PrefillConfig(), 30) == (range(30),)
    assert layers_in_store(PrefillConfig(stages=3), 0, 30) is None


def test_stages_on_nodes_of_their_own_have_as_many_layers_each_and_a_store_for_them() -> None:
    spread = PrefillConfig(stages=4, spread_stages=True)
    assert configured_split(spread, 30) == (range(8), range(8, 15), range(15, 23), range(23, 30))
    assert [layers_in_store(spread, stage, 4) for stage in range(4)] == [range(1), range(1, 2), range(2, 3), range(3, 4)]


def test_a_configured_split_holds_wherever_the_stages_are() -> None:
    for spread in (False, True):
        assert configured_split(PrefillConfig(stages=2, stage_layers=(1, 3), spread_stages=spread), 4) == (range(1), range(1, 4))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PrefillConfig(stages=5, spread_stages=True), "prefill_node.stages: the model has 4 layers, which cannot be split among 5 stages"),
        (PrefillConfig(stages=2, stage_layers=(1, 2)), "prefill_node.stage_layers: they are 3 in all, but the model has 4 layers"),
    ],
)
def test_a_split_that_the_model_does_not_have_is_refused(config: PrefillConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured_split(config, 4)


def test_one_stage_is_not_spread() -> None:
    with pytest.raises(ValueError, match="spread_stages: a group of one stage is on one node"):
        PrefillConfig(spread_stages=True)
