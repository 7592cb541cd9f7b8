"""What a request asks of the sampler, and when its output ends. Shared by the gateway and both kinds of node."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from springtide.rpc import common_pb2 as pb

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
        """Of a mapping from token ids."""
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

    def to_proto(self) -> pb.SamplingParams:
        message = pb.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            stop_token_ids=self.stop_token_ids,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
        )
        if self.logit_bias:
            message.logit_bias.token_ids, message.logit_bias.biases = self.logit_bias.token_ids, self.logit_bias.biases
        if self.logprobs is not None:
            message.logprobs = self.logprobs
        return message

    @classmethod
    def from_proto(cls, message: pb.SamplingParams) -> SamplingParams:
        return cls(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            seed=message.seed,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            stop_token_ids=tuple(message.stop_token_ids),
            max_tokens=message.max_tokens,
            ignore_eos=message.ignore_eos,
            logprobs=message.logprobs if message.HasField("logprobs") else None,
            logit_bias=LogitBias(message.logit_bias.token_ids, message.logit_bias.biases) if message.HasField("logit_bias") else _NO_BIAS,
        )


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token and, when asked for, log-probabilities (after bias and penalties, before temperature): its own, the likeliest tokens'."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()

    def logprobs_proto(self) -> pb.TokenLogprobs | None:
        if self.logprob is None:
            return None
        return pb.TokenLogprobs(
            chosen=pb.TokenLogprob(token_id=self.token_id, logprob=self.logprob),
            top=[pb.TokenLogprob(token_id=token, logprob=logprob) for token, logprob in self.top],
        )


def finish_reason(token_id: int, num_output_tokens: int, params: SamplingParams, eos_ids: Collection[int]) -> pb.FinishReason:
    """Whether the output ends with `token_id`, its `num_output_tokens`-th token: STOP (the token is then not part of the output),
    LENGTH (it is), or UNSPECIFIED when it goes on."""
    if token_id in params.stop_token_ids or (token_id in eos_ids and not params.ignore_eos):
        return pb.FINISH_REASON_STOP
    if num_output_tokens >= params.max_tokens:
        return pb.FINISH_REASON_LENGTH
    return pb.FINISH_REASON_UNSPECIFIED


def token_output(
    attempt_id: str, sampled: Sequence[SampledToken], position: int, params: SamplingParams, eos_ids: Collection[int]
) -> pb.TokenOutput:
    """The wire message for tokens sampled one after another, the first at output `position` (0 is the first after the original prompt).
    What follows the token with which the output ends is left out."""
    taken = min(len(sampled), max(1, params.max_tokens - position))
    if params.stop_token_ids or (eos_ids and not params.ignore_eos):
        stops = (i for i, token in enumerate(sampled, 1) if finish_reason(token.token_id, position + i, params, eos_ids))
        taken = min(taken, next(stops, taken))
    reason = finish_reason(sampled[taken - 1].token_id, position + taken, params, eos_ids)
    tokens = sampled[: taken - (reason == pb.FINISH_REASON_STOP)]
    token_ids = [token.token_id for token in tokens]
    output = pb.TokenOutput(attempt_id=attempt_id, position=position, finish_reason=reason, token_ids=token_ids)
    if params.logprobs is not None:
        output.logprobs.extend([logprobs for token in tokens if (logprobs := token.logprobs_proto()) is not None])
    return output
