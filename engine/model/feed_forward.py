"""The second half of a layer: one gated feed-forward for all tokens, or many small ones of which a router picks a few for each token."""

from __future__ import annotations

import torch

from engine.model.module_weights import ModuleWeights


class FeedForward:
    """`down(activation(gate(x)) * up(x))`. A rank has its part of the inner dimensions, and returns what is to be added to the other ranks'
    results."""

    def __init__(self, weights: ModuleWeights, intermediate_size: int) -> None:
        config = weights.config
        self.gated = weights.gated(intermediate_size, config.hidden_size, config.mlp_bias)
        self.down = weights.linear({"down_proj": config.hidden_size}, intermediate_size, config.mlp_bias, "inputs")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to the same."""
        return self.down(self.gated(x))


class SparseFeedForward:
    """Mixture of experts: each token goes to the `per_token` experts that the router finds likeliest, and gets their weighted sum. A rank
    has its part of each expert."""

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
