"""Root mean square norm (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RMSNorm:
    """Over the last dimension of `x`. The result has the dtype of `x`; it is computed in that of `scale` [size], the same or float32."""

    def __init__(self, scale: torch.Tensor, eps: float) -> None:
        self._scale = scale
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.to(self._scale.dtype), self._scale.shape, self._scale, self._eps).to(x.dtype)
