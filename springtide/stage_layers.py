"""Which layers each stage of a prefill group takes, where that is not for measurements to say."""

from __future__ import annotations

from itertools import accumulate

from springtide.config import PrefillConfig
from springtide.errors import ConfigError


def configured_split(config: PrefillConfig, num_layers: int) -> tuple[range, ...] | None:
    """The split that the configuration gives, if any: one stage takes all layers. Raises ConfigError when the model cannot be split so."""
    if config.stages > num_layers:
        raise ConfigError(f"prefill_node.stages: the model has {num_layers} layers, which cannot be split among {config.stages} stages")
    if config.stage_layers is None:
        if config.stages == 1:
            return (range(num_layers),)
        return _even_split(config.stages, num_layers) if config.spread_stages else None
    ends = tuple(accumulate(config.stage_layers))
    if ends[-1] != num_layers:
        raise ConfigError(f"prefill_node.stage_layers: they are {ends[-1]} in all, but the model has {num_layers} layers")
    return tuple(range(end - size, end) for end, size in zip(ends, config.stage_layers, strict=True))


def layers_in_store(config: PrefillConfig, stage: int, num_layers: int) -> range | None:
    """The layers whose keys and values the store of a stage's node has; None where it has those of all. Raises ConfigError as
    `configured_split`."""
    if not config.spread_stages:
        return None
    split = configured_split(config, num_layers)
    assert split is not None, "stages on nodes of their own are told their layers before anything can be measured"
    return split[stage]


def _even_split(stages: int, num_layers: int) -> tuple[range, ...]:
    """As many layers for each, or one less for the last ones: the last has the head, too."""
    ends = [-(-num_layers * (stage + 1) // stages) for stage in range(stages)]
    return tuple(range(begin, end) for begin, end in zip([0, *ends], ends, strict=False))
