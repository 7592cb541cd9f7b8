"""The second half of a layer: one gated feed-forward for all tokens, or many small ones of which a router picks a few for each token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.models.config import Activation
from engine.models.module_weights import ModuleWeights


class FeedForward:
    """`down(activation(gate(x)) * up(x))`; gate and up are one matrix."""

    def __init__(self, weights: ModuleWeights, intermediate_size: int) -> None:
        config = weights.config
        sizes = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self._gate_up = weights.linear(sizes, config.hidden_size, config.mlp_bias)
        self._down = weights.linear({"down_proj": config.hidden_size}, intermediate_size, config.mlp_bias)
        self._activation = _ACTIVATIONS[config.activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to the same."""
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(self._activation(gate) * up)


class SparseFeedForward:
    """Mixture of experts: each token goes to the `per_token` experts that the router finds likeliest, and gets their weighted sum."""

    def __init__(self, weights: ModuleWeights) -> None:
        assert weights.config.experts is not None, "only layers with experts are sparse"
        self._config = weights.config.experts
        self._router = weights.linear({"gate": self._config.count}, weights.config.hidden_size)
        experts = weights.below("experts")
        self._experts = [FeedForward(experts.below(str(index)), self._config.intermediate_size) for index in range(self._config.count)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to the same. The rows of one expert are brought together, so that each expert that anyone wants runs once; a row
        then sums its own results in the router's order, whatever other rows there are."""
        shares, chosen = torch.softmax(self._router(x).float(), -1).topk(self._config.per_token)
        if self._config.normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        visits = chosen.view(-1)
        by_expert = visits.argsort(stable=True)
        gathered = x[by_expert // self._config.per_token]
        results = torch.empty_like(gathered)
        begin = 0
        for expert, count in zip(self._experts, torch.bincount(visits, minlength=len(self._experts)).tolist(), strict=True):
            if count:
                results[by_expert[begin : begin + count]] = expert(gathered[begin : begin + count])
                begin += count
        return torch.bmm(shares.to(x.dtype)[:, None], results.view(len(x), self._config.per_token, -1))[:, 0]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "gelu_tanh": _gelu_tanh}
