"""Words of what a request asks of the sampler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from springtide.values import value_class

MAX_GRAMMAR_CHARACTERS = 1 << 18
_TOKEN_ID, _BIAS = np.dtype("<i4"), np.dtype("<f4")


@value_class(frozen=True, slots=True)
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


@value_class(frozen=True, slots=True)
class TokenIds:
    """Tokens in one column: there may be as many as in the vocabulary. Raises ValueError when the column is not of whole ids."""

    packed: bytes = b""
    """int32, little-endian."""

    def __post_init__(self) -> None:
        if len(self.packed) % _TOKEN_ID.itemsize:
            raise ValueError(f"token ids must take {_TOKEN_ID.itemsize} bytes each, which {len(self.packed)} bytes do not divide by")

    @classmethod
    def of(cls, token_ids: Iterable[int]) -> TokenIds:
        """The column of these ids, each of which fits int32."""
        return cls(np.fromiter(token_ids, _TOKEN_ID).tobytes())

    def column(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """A view, which may not be written to."""
        return np.frombuffer(self.packed, _TOKEN_ID)

    def __len__(self) -> int:
        return len(self.packed) // _TOKEN_ID.itemsize


@value_class(frozen=True, slots=True)
class Grammar:
    """What an output's text is held to. Where the text is whole and nothing can follow, the output ends. Raises ValueError when too
    long."""

    source: str = ""
    """JSON, as llguidance writes grammars (`gateway/grammars.py` makes them of JSON schemas and other formats). Empty: to nothing."""

    def __post_init__(self) -> None:
        if len(self.source) > MAX_GRAMMAR_CHARACTERS:
            raise ValueError(f"grammar must have at most {MAX_GRAMMAR_CHARACTERS} characters, not {len(self.source)}")

    def __bool__(self) -> bool:
        return bool(self.source)


_NO_BIAS, _ANY_TOKEN, _NO_GRAMMAR = LogitBias(), TokenIds(), Grammar()
REPETITION_PENALTIES = (0.01, 100.0)
"""It divides and multiplies logits, which have to stay finite and apart from one another in single precision."""


@value_class(frozen=True, slots=True)
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
    min_tokens: int = 0
    """The output has at least so many tokens: none of those that end it comes before. A grammar's end does."""
    allowed_token_ids: TokenIds = _ANY_TOKEN
    """No other tokens are in the output; empty: any may be."""
    bad_words: tuple[TokenIds, ...] = ()
    """None of these sequences is in the output."""
    grammar: Grammar = _NO_GRAMMAR

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
        for name, low in (("top_k", 0), ("seed", 0), ("max_tokens", 1), ("min_tokens", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, not {getattr(self, name)}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens, which is {self.max_tokens}, not {self.min_tokens}")
        if not all(self.bad_words):
            raise ValueError("bad_words must have at least one token each")

    @property
    def constrained(self) -> bool:
        """Some tokens may be out of the question."""
        return bool(self.grammar or self.allowed_token_ids or self.bad_words or self.min_tokens)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
