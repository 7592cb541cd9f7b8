"""Rotary position embedding with its scalings, as transformers (modeling_rope_utils.py) computes them."""

from __future__ import annotations

import math
from functools import cached_property

import torch

from engine.model_config import RopeConfig


class Rotary:
    """`divisors` [head_dim / 2] (GGUF's rope_freqs) divide the frequencies."""

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        divisors: torch.Tensor | None = None,
        device: torch.device | None = None,
        num_positions: int | None = None,
    ) -> None:
        """The table is for positions on `device`, `num_positions` at most."""
        self._frequencies, self._magnitude = frequencies(config, head_dim)
        if divisors is not None:
            self._frequencies = self._frequencies / divisors
        self._frequencies = self._frequencies.to(device)
        self._num_positions = num_positions
        self._table = self.angles(torch.arange(0, device=device))

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """For `positions` [rows]."""
        return Rotation(self, positions)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [positions, head_dim / 2]."""
        angles = positions[:, None].float() * self._frequencies
        return angles.cos() * self._magnitude, angles.sin() * self._magnitude

    def table(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for each position from 0 to `end` and beyond, of which each is worked out once; what was returned before stays valid."""
        known = len(self._table[0])
        if end > known:
            more = max(end, 2 * end if self._num_positions is None else min(2 * end, self._num_positions))
            new = self.angles(torch.arange(known, more, device=self._frequencies.device))
            self._table = torch.cat((self._table[0], new[0])), torch.cat((self._table[1], new[1]))
        return self._table


class Rotation:
    """The rotation of the rows of one pass, at `positions` [rows]."""

    def __init__(self, rotary: Rotary, positions: torch.Tensor) -> None:
        self._rotary, self._positions = rotary, positions
        self._wide: tuple[torch.Tensor, torch.Tensor] | None = None

    @cached_property
    def angles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [rows, head_dim / 2], of the angle by which each pair of dimensions turns."""
        return self._rotary.angles(self._positions)

    def table(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The table as Rotary.table gives it: of positions, not of rows."""
        return self._rotary.table(end)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates dimension i of each head of `x` [rows, heads, head_dim] with dimension i + head_dim / 2."""
        if self._wide is None:
            cos, sin = self.angles
            wide_cos, signed_sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
            self._wide = wide_cos[:, None].to(x.dtype), signed_sin[:, None].to(x.dtype)
        wide_cos, signed_sin = self._wide
        return x * wide_cos + x.roll(x.shape[-1] // 2, -1) * signed_sin


def frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians a position for each pair of dimensions, float32 [head_dim / 2], and the factor on cos and sin.

    `dynamic` is plain rotation here: NTK scaling begins beyond `max_position_embeddings`, which is the context length. Past it
    transformers recomputes the frequencies with every token, so that keys would depend on when they were computed and no prefix
    could be cached.
    """
    powers = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    match config.kind:
        case "default" | "dynamic":
            return 1.0 / powers, 1.0
        case "linear":
            return 1.0 / powers / config.factor, 1.0
        case "llama3":
            return _llama3(config, 1.0 / powers), 1.0
        case "yarn":
            return _yarn(config, powers, head_dim), _yarn_magnitude(config)


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    wavelengths = 2 * math.pi / plain
    longest, shortest = config.original_context / config.low_freq_factor, config.original_context / config.high_freq_factor
    scaled = torch.where(wavelengths > longest, plain / config.factor, plain)
    smooth = (config.original_context / wavelengths - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    between = (1 - smooth) * scaled / config.factor + smooth * scaled
    is_between = ~(wavelengths < shortest) & ~(wavelengths > longest)
    return torch.where(is_between, between, scaled)


def _yarn(config: RopeConfig, powers: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Peng et al., YaRN (arXiv 2309.00071), section 3.2: NTK by parts."""

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(config.original_context / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (config.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_magnitude(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
    return _mscale(config.factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
