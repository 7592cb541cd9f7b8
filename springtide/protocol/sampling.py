"""Words of what a request asks of the sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_TOKEN_ID, _BIAS = np.dtype("<i4"), np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class LogitBias:
    """What is added to the logits of some tokens, in columns: it may name the whole vocabulary, in each of a request's many outputs and
    at each step. Raises ValueError when the columns are not of equal length."""

    token_ids: bytes = b""
    """int32, little-endian; each token once."""
    biases: bytes = b""
    """float32, little-endian."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.biases) or len(self.biases) % _BIAS.itemsize:
            raise ValueError(
                f"logit_bias must have as many tokens as biases, not {len(self.token_ids)} and {len(self.biases)} bytes of them"
            )

    @classmethod
    def of(cls, biases: Mapping[int, float]) -> LogitBias:
        """The biases of a mapping from token ids."""
        count = len(biases)
        return cls(np.fromiter(biases, _TOKEN_ID, count).tobytes(), np.fromiter(biases.values(), _BIAS, count).tobytes())

    def columns(self) -> tuple[np.ndarray[Any, np.dtype[np.int32]], np.ndarray[Any, np.dtype[np.float32]]]:
        """Token ids and biases: views, which may not be written to."""
        return np.frombuffer(self.token_ids, _TOKEN_ID), np.frombuffer(self.biases, _BIAS)

    def __len__(self) -> int:
        return len(self.token_ids) // _TOKEN_ID.itemsize


_NO_BIAS = LogitBias()
REPETITION_PENALTIES = (0.01, 100.0)
"""It divides and multiplies logits, which have to stay finite and apart from one another in single precision."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Fields as in `proto/springtide/v1/common.proto`, with neutral defaults. Raises ValueError, naming the field, when out of range."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: LogitBias = _NO_BIAS
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 2.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", *REPETITION_PENALTIES),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must be between {low:g} and {high:g}, not {value}")
        for name, low in (("top_k", 0), ("seed", 0), ("max_tokens", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, not {getattr(self, name)}")
        if self.top_p == 0.0:
            raise ValueError("top_p must be above 0, not 0")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
