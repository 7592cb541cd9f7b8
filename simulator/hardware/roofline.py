"""The time of a layer's parts on an accelerator: rooflines whose rates are what kernels reach, not what data sheets promise.

Each part has few constants; `simulator.hardware.fit` finds them. Milliseconds throughout; `tokens` may be an array, as may `degree`, the
tensor-parallel degree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Products:
    """Matrix products with bf16 weights: read all weights, or compute, whichever takes longer, and launch.

    `idle_tokens`: kernels compute whole tiles, which costs about as much as so many more tokens."""

    launch_ms: float
    bytes_per_s: float
    flops_per_s: float
    idle_tokens: float

    def ms(self, weights: int, launches: int, tokens: Floats, degree: Floats) -> Floats:
        read_ms = 2e3 / self.bytes_per_s
        compute_ms = 2e3 / self.flops_per_s * (tokens + self.idle_tokens)
        return launches * self.launch_ms + weights / degree * np.maximum(read_ms, compute_ms)


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Norms and residual additions (the same on every device), rotary embedding and activation (divided among them), of one layer."""

    floor_ms: float
    replicated_ms_per_token: float
    divided_ms_per_token: float

    def ms(self, tokens: Floats, degree: Floats) -> Floats:
        return np.maximum(self.floor_ms, (self.replicated_ms_per_token + self.divided_ms_per_token / degree) * tokens)


@dataclass(frozen=True, slots=True)
class Line:
    """A launch and so much a unit: a token of the embedding, a byte of a message between two devices."""

    fixed_ms: float
    per_unit_ms: float

    def ms(self, units: Floats) -> Floats:
        return self.fixed_ms + self.per_unit_ms * units


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The better of two protocols: one soon under way, one that moves large messages faster."""

    prompt: Line
    bulk: Line

    def ms(self, num_bytes: Floats) -> Floats:
        return np.minimum(self.prompt.ms(num_bytes), self.bulk.ms(num_bytes))
