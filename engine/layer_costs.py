"""Measures what the layers of a model cost, for splitting it among stages: one layer of each kind, and what comes before and after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from engine.batch import SequenceChunk
from engine.device.base import Device
from engine.formats.files import read_config
from engine.loader import load_model
from engine.model_config import ModelConfig
from engine.profiling import fastest_ms
from engine.runner import ModelRunner
from springtide.blocks import blocks_for
from springtide.modelinfo import KVDtype, ModelInfo


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """What layers cost: milliseconds in one pass."""

    layers: tuple[float, ...]
    embedding: float
    head: float
    """Of one row: only the last token of a prompt goes through it."""


def measure_layers(
    info: ModelInfo,
    dtype: KVDtype,
    block_tokens: int,
    new_tokens: int,
    cached_tokens: int,
    kernels: str = "auto",
    device: Device | None = None,
) -> LayerCosts:
    """What each layer costs in a pass of `new_tokens` after `cached_tokens`. Layers that are alike, dense or sparse and with the same
    window, are measured once, but the model's last one by itself: it may leave out what no logits are wanted of. Of the model's weights no
    more than a layer's and those of its ends are ever loaded. Errors as `engine.loader.load_model`."""
    config = read_config(Path(info.path))
    last = config.layers - 1
    kinds = [*(_kind(config, layer) for layer in range(last)), "last"]
    costs: dict[object, float] = {}
    embedding = head = 0.0
    for layer, kind in enumerate(kinds):
        if kind in costs:
            continue
        runner = _runner_of(info, dtype, block_tokens, layer, new_tokens + cached_tokens, kernels, device)
        chunk = SequenceChunk([0] * new_tokens, cached_tokens, range(runner.num_slots))
        hidden = torch.zeros(new_tokens, config.hidden_size, dtype=runner.model.dtype, device=runner.model.backend.torch_device)
        costs[kind] = fastest_ms(runner, _layer(runner, chunk, hidden))
        if layer == 0:
            embedding = fastest_ms(runner, _embedding(runner, chunk))
        if layer == last:
            head = fastest_ms(runner, _head(runner, chunk, hidden))
    return LayerCosts(tuple(costs[kind] for kind in kinds), embedding, head)


def _kind(config: ModelConfig, layer: int) -> tuple[bool, int | None]:
    return config.has_experts(layer), config.window(layer)


def _runner_of(
    info: ModelInfo, dtype: KVDtype, block_tokens: int, layer: int, num_tokens: int, kernels: str, device: Device | None
) -> ModelRunner:
    spec = replace(info.kv_spec(dtype, block_tokens), layers=1)
    num_slots = blocks_for(num_tokens, block_tokens)
    model = load_model(info, dtype, (layer, layer + 1), kernels, device=device)
    return ModelRunner(model, spec, np.zeros(num_slots * spec.bytes_per_slot, np.uint8), num_slots)


def _layer(runner: ModelRunner, chunk: SequenceChunk, hidden: torch.Tensor) -> Callable[[], object]:
    return lambda: runner.forward_layers([chunk], hidden)


def _embedding(runner: ModelRunner, chunk: SequenceChunk) -> Callable[[], object]:
    tokens = torch.tensor(chunk.token_ids, device=runner.model.backend.torch_device)

    def embed() -> None:
        with torch.inference_mode():
            runner.model.embed(tokens)

    return embed


def _head(runner: ModelRunner, chunk: SequenceChunk, hidden: torch.Tensor) -> Callable[[], object]:
    return lambda: runner.logits([chunk], hidden)
