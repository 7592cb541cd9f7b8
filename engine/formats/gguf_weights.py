"""Weights of a GGUF file: dequantised, under their Hugging Face names, and without what the conversion did to them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from engine.formats.gguf_config import GGUFFamily
from engine.formats.gguf_file import GGUFFile, TensorEntry
from engine.formats.weights import Weights
from engine.model_config import ModelConfig
from springtide.errors import UnsupportedModel

_ROWS_AT_ONCE = 16
_VALUES_AT_ONCE = 1 << 17
"""For which temporaries stay in a core's cache."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")

Transform = Callable[[str, torch.Tensor], torch.Tensor]
"""Called with a tensor's Hugging Face name and contents; undoes what the conversion to GGUF did to it."""


class GGUFWeights(Weights):
    """`names` maps the modules' Hugging Face names (without layer, expert and `.weight`/`.bias`) to GGUF's."""

    def __init__(self, file: GGUFFile, names: Mapping[str, str], transform: Transform) -> None:
        self.path = file.path
        self._tensors = file.tensors
        self._names = names
        self._transform = transform
        self._data = np.memmap(file.path, np.uint8, mode="r")

    def __contains__(self, name: str) -> bool:
        return self._entry(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        entry = self._entry(name)
        assert entry is not None, name
        return entry.shape

    def read(self, name: str) -> torch.Tensor:
        entry = self._entry(name)
        assert entry is not None, name
        return self._transform(name, self._read(entry))

    def _entry(self, name: str) -> TensorEntry | None:
        """Of one expert the part that is its own: GGUF stacks the matrices of a layer's experts into one tensor."""
        layer = _LAYER.fullmatch(name)
        prefix = f"blk.{layer[1]}." if layer else ""
        module, kind = (layer[2], layer[3]) if layer else (name.rpartition(".")[0], name.rpartition(".")[2])
        expert = _EXPERT.fullmatch(module)
        if expert:
            module = f"{expert[1]}.{expert[3]}"
        entry = self._tensors.get(f"{prefix}{self._names.get(module, module)}.{kind}")
        if entry is None or expert is None:
            return entry
        index, count = int(expert[2]), entry.shape[0]
        num_bytes = entry.num_bytes // count
        if index >= count:
            return None
        return replace(entry, shape=entry.shape[1:], offset=entry.offset + index * num_bytes, num_bytes=num_bytes)

    def _read(self, entry: TensorEntry) -> torch.Tensor:
        raw = self._data[entry.offset : entry.offset + entry.num_bytes]
        match entry.quantization:
            case GGMLQuantizationType.F32:
                values = raw.view(np.float32)
            case GGMLQuantizationType.F16:
                values = raw.view(np.float16)
            case GGMLQuantizationType.BF16:
                return torch.from_numpy(raw.view(np.int16).reshape(entry.shape).copy()).view(torch.bfloat16)
            case _:
                return self._dequantized(entry, raw)
        return torch.from_numpy(np.array(values).reshape(entry.shape))

    def _dequantized(self, entry: TensorEntry, raw: NDArray[np.uint8]) -> torch.Tensor:
        """gguf computes _ROWS_AT_ONCE rows at a time, which takes longer than their arithmetic where they are short: some count as one."""
        rows = math.prod(entry.shape[:-1])
        most = max(1, min(rows, _VALUES_AT_ONCE // (_ROWS_AT_ONCE * entry.shape[-1])))
        together = next(count for count in range(most, 0, -1) if rows % count == 0)
        try:
            values = dequantize(raw.reshape(rows // together, -1), entry.quantization)
        except NotImplementedError:
            kind = entry.quantization.name
            raise UnsupportedModel(f"{self.path}: tensor {entry.name!r} has quantisation {kind}, which is not supported") from None
        return torch.from_numpy(values.reshape(entry.shape))


def unpermute_rotary(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF's `llama` interleaves the two halves of each rotary head, as llama.cpp rotates neighbours; back to halves.

    `weight` is [heads * head_dim, …]. Inverse of `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    pairs = weight.shape[0] // heads // 2
    return weight.reshape(heads, pairs, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def gguf_weights(file: GGUFFile, family: GGUFFamily, config: ModelConfig) -> GGUFWeights:
    return GGUFWeights(file, _NAMES, partial(_restore, family, config))


def _restore(family: GGUFFamily, config: ModelConfig, name: str, weight: torch.Tensor) -> torch.Tensor:
    if family.interleaves_rotary and ".q_proj." in name:
        return unpermute_rotary(weight, config.heads)
    if family.interleaves_rotary and ".k_proj." in name:
        return unpermute_rotary(weight, config.kv_heads)
    if family.adds_one_to_norms and name.endswith("norm.weight"):
        return weight - 1
    return weight
