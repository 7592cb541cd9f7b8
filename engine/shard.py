"""Which part of a layer is whose, and how the parts are put together. What a model needs to know of its fellow ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from engine.model_config import ModelConfig
from springtide.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"there is no rank {self.rank} of {self.size}")

    def of(self, total: int) -> slice:
        """The part of `total` columns, rows or heads; parts differ by one at most."""
        return slice(total * self.rank // self.size, total * (self.rank + 1) // self.size)


class Ranks(ABC):
    """The ranks of one model. Every rank calls the same methods in the same order."""

    shard: Shard

    @abstractmethod
    def add(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, which may be in the same memory."""

    @abstractmethod
    def join(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        """Joins what each rank gives, its part of the `columns` of a matrix, [rows, part]; the whole [rows, columns] at rank 0, anything
        elsewhere."""

    @abstractmethod
    def least(self, number: int) -> int:
        """The least of what each rank gives."""


class OneRank(Ranks):
    shard = Shard()

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def join(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        return x

    def least(self, number: int) -> int:
        return number


def check_degree(config: ModelConfig, size: int) -> None:
    """Raises ConfigError where the KV heads cannot be shared out evenly."""
    if size < 1 or config.kv_heads % size:
        raise ConfigError(f"tensor_parallel {size}: the model's {config.kv_heads} KV heads must be a multiple of it")
