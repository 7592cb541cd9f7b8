"""The backends, each the operators and the attention that go together, and which of them computes a model."""

from __future__ import annotations

import functools
import importlib.util
import logging
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import torch

from engine.backends.base import Backend, sizes_up_to
from engine.backends.plain import PlainOps, TorchAttention
from engine.device.base import Device
from engine.model_config import ModelConfig
from springtide.choices import KernelsName
from springtide.errors import ConfigError

if platform.machine() == "x86_64":
    from engine import _native
else:  # setup.py builds them for no other processor
    _native = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

FLASHINFER_DTYPES = (torch.bfloat16, torch.float16)
FLASHINFER_HEAD_DIMS = (64, 128, 256)


PLAIN = Backend("plain", "torch", PlainOps(), TorchAttention)


@dataclass(frozen=True, slots=True)
class RegisteredBackend:
    """How models are computed with a backend, and whether they can be. A device of None is the CPU, in the arena itself."""

    can_run: Callable[[ModelConfig, torch.dtype, Device | None], bool]
    """Whether this machine can compute a model with it whose weights and KV are of that dtype. It may try, once."""
    make: Callable[[Device | None], Backend]


BACKENDS: Mapping[str, RegisteredBackend] = {
    "flashinfer": RegisteredBackend(
        can_run=lambda config, dtype, device: _flashinfer_works(config, dtype, device),
        make=lambda device: flashinfer(device),
    ),
    "native": RegisteredBackend(
        can_run=lambda config, dtype, device: device is None and dtype == torch.bfloat16 and native_can_run(config),
        make=lambda device: native(),
    ),
    "plain": RegisteredBackend(
        can_run=lambda config, dtype, device: True,
        make=lambda device: replace(PLAIN, device=device),
    ),
}
"""Backends by name, the best first. The last one computes everything, everywhere."""


def choose(config: ModelConfig, dtype: torch.dtype, kernels: str = "auto", device: Device | None = None) -> Backend:
    """The best backend of those that `kernels` allows for a model whose weights and KV are of `dtype`, on `device` or on a CPU. Raises
    ConfigError when `kernels` is no KernelsName."""
    if kernels not in get_args(KernelsName):
        raise ConfigError(f"kernels must be one of {', '.join(get_args(KernelsName))}, not {kernels!r}")
    allowed: Iterable[RegisteredBackend] = BACKENDS.values() if kernels == "auto" else [BACKENDS[kernels]]
    return next(backend for backend in allowed if backend.can_run(config, dtype, device)).make(device)


def flashinfer_can_run(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether FlashInfer is installed, and has kernels for heads of this shape: not yet whether the machine can build them."""
    return importlib.util.find_spec("flashinfer") is not None and dtype in FLASHINFER_DTYPES and config.head_dim in FLASHINFER_HEAD_DIMS


def _flashinfer_works(config: ModelConfig, dtype: torch.dtype, device: Device | None) -> bool:
    """Whether it runs what it has kernels for."""
    if device is None or not device.is_cuda or not flashinfer_can_run(config, dtype):
        return False
    return _flashinfer_runs(_Trial.of(config, dtype, device))


def flashinfer(device: Device | None) -> Backend:
    """See `flashinfer_can_run`."""
    assert device is not None, "FlashInfer runs on a device"
    import flashinfer as library

    from engine.backends.flashinfer.attention import FlashInferAttention, workspace_of
    from engine.backends.flashinfer.ops import FlashInferOps

    most_fixed = max(sizes_up_to(device.step_graphs), default=0)
    attention = partial(FlashInferAttention, library, most_fixed)
    workspace = partial(workspace_of, device.torch_device, most_fixed)
    return Backend("flashinfer", "FlashInfer", FlashInferOps(library), attention, workspace_bytes=workspace, device=device)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Of the kernels that a model will use."""

    device: torch.device
    dtype: torch.dtype
    group: int
    head_dim: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, device: Device) -> _Trial:
        windows = dict.fromkeys(config.window(layer) for layer in range(config.layers))
        return cls(device.torch_device, dtype, config.heads // config.kv_heads, config.head_dim, tuple(windows))


@functools.cache
def _flashinfer_runs(trial: _Trial) -> bool:
    """Kernels are built when they are first used, with a compiler that not every machine has."""
    try:
        import flashinfer as library

        from engine.backends.flashinfer.attention import try_out as try_attention
        from engine.backends.flashinfer.ops import try_out as try_ops

        try_attention(library, trial.device, trial.dtype, trial.group, trial.head_dim, trial.windows)
        try_ops(library, trial.device, trial.dtype)
    except Exception as error:
        logger.warning(
            "FlashInfer cannot be used, and attention is plain torch, which is slower: it needs the CUDA toolkit's nvcc and ninja, or its "
            "precompiled packages for this version of CUDA: %r",
            error,
        )
        return False
    return True


def native_can_run(config: ModelConfig) -> bool:
    """Whether this CPU can run the C kernels, and they are made for heads of this shape."""
    if _native is None or not _native.instruction_sets():
        return False
    group = config.heads // config.kv_heads
    return config.head_dim % 32 == 0 and config.head_dim <= _native.MOST_HEAD_DIM and group <= _native.MOST_QUERIES


def native() -> Backend:
    """The C kernels, see `native_can_run`."""
    from engine.backends.native_cpu.attention import NativeAttention
    from engine.backends.native_cpu.layers import fuse
    from engine.backends.native_cpu.ops import NativeOps

    return Backend("native", f"native {_native.instruction_set()}", NativeOps(), NativeAttention, fuse)
