"""From a ModelInfo to a model with its weights."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from engine.backends import choice as backends
from engine.device.base import Device
from engine.formats.files import read_config
from engine.formats.gguf_file import read_gguf
from engine.formats.gguf_weights import gguf_weights
from engine.formats.registry import for_gguf
from engine.formats.safetensors_weights import SafetensorsWeights
from engine.formats.weights import Weights
from engine.model.base import Model
from engine.model.decoder import DecoderModel
from engine.model_config import ModelConfig
from engine.shard import OneRank, Ranks, check_degree
from springtide.errors import ConfigError
from springtide.modelinfo import ModelInfo

os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
"""Read at the first product that oneDNN computes. It keeps a kernel for each shape, of half a megabyte and more; by default 1024 of them,
which are a process's largest growth where prompts have all lengths."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model(
    info: ModelInfo,
    dtype: str,
    layers: tuple[int, int] | None = None,
    kernels: str = "auto",
    ranks: Ranks | None = None,
    device: Device | None = None,
) -> Model:
    """The model's `layers` [begin, end) or all of them, its weights and activations in `dtype` ('bfloat16' or 'float32'), computed with
    `kernels` (springtide.choices.KernelsName); of these the part of one of several `ranks`. On `device`, which the calling thread uses from
    then on, or on the CPU.

    Raises ConfigError when tensors are missing or have wrong shapes, UnsupportedModel as `describe` does.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    path = Path(info.path)
    config = read_config(path)
    ranks = ranks or OneRank()
    check_degree(config, ranks.shard.size)
    begin, end = layers if layers is not None else (0, config.layers)
    if not 0 <= begin < end <= config.layers:
        raise ValueError(f"layers must be a range within 0..{config.layers}, not {begin}..{end}")
    if device is not None and device.is_cuda:
        torch.cuda.set_device(device.torch_device)
    with torch.inference_mode():
        backend = backends.choose(config, DTYPES[dtype], kernels, device)
        return DecoderModel(config, _open(path, config), DTYPES[dtype], backend, ranks, begin, end)


def _open(path: Path, config: ModelConfig) -> Weights:
    if path.is_dir():
        return SafetensorsWeights(path)
    file = read_gguf(path)
    _, family = for_gguf(file)
    return gguf_weights(file, family, config)
