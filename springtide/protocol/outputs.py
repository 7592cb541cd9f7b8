"""Words of what nodes send back: tokens, how an attempt ended, and signs of life."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from enum import Enum, StrEnum
from typing import Any, NamedTuple

import numpy as np

from springtide.ids import AttemptId
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.timings import DecodeTimes, PrefillTimes
from springtide.values import value_class

_Floats = np.ndarray[Any, np.dtype[np.float32]]
_Integers = np.ndarray[Any, np.dtype[np.int32]]
_FLOAT, _INTEGER = np.dtype("<f4"), np.dtype("<i4")
_VALUE_BYTES = 4


class Finish(StrEnum):
    """How an output ended well."""

    STOP = "stop"
    """By an end-of-sequence or stop token, which is not among its tokens, or by a stop string."""
    LENGTH = "length"


class TokenLogprob(NamedTuple):
    """A token and its log-probability."""

    token_id: int
    logprob: float


@value_class(frozen=True, slots=True)
class SampledToken:
    """A token and, when asked for, log-probabilities (after bias and penalties, before temperature): its own, the likeliest tokens'."""

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


@value_class(frozen=True, slots=True)
class TokenOutput:
    """New tokens of one attempt."""

    attempt_id: AttemptId
    position: int
    """In the output, of the first: counted from the end of the original prompt."""
    tokens: tuple[SampledToken, ...]
    finish: Finish | None = None
    """Set in the last of an attempt that ended well."""
    stop_token: int | None = None
    """Which of the request's stop tokens ended it. None: none of them, but its length or the model's own end token."""

    @property
    def end(self) -> int:
        """Output position after the last."""
        return self.position + len(self.tokens)


@value_class(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens after its first, as the model has them, in columns: a prompt may be long. Rows are tokens, one
    after another. Raises ValueError when the columns do not fit one another."""

    logprobs: bytes = b""
    """float32, little-endian: of the tokens themselves."""
    ranks: bytes = b""
    """int32, little-endian: how many tokens would have been as likely or more, the token itself included."""
    top_ids: bytes = b""
    """int32, little-endian, [rows, k]: the likeliest tokens in its place, the likeliest first."""
    top_logprobs: bytes = b""
    """float32, little-endian, the same shape."""

    def __post_init__(self) -> None:
        rows, tops = len(self.logprobs), len(self.top_logprobs)
        if rows % _VALUE_BYTES or rows != len(self.ranks) or tops != len(self.top_ids) or (tops % rows if rows else tops):
            raise ValueError(f"prompt_logprobs has columns of {rows}, {len(self.ranks)}, {len(self.top_ids)} and {tops} bytes")

    @classmethod
    def joined(cls, parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
        """Those of a prompt from those of its chunks, in their order."""
        return cls(*(b"".join(getattr(part, field.name) for part in parts) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.logprobs) // _VALUE_BYTES

    @property
    def num_top(self) -> int:
        """How many of the likeliest tokens each row has."""
        return len(self.top_ids) // len(self.logprobs) if self.logprobs else 0

    def columns(self) -> tuple[_Floats, _Integers, _Integers, _Floats]:
        """`logprobs` and `ranks` [rows], `top_ids` and `top_logprobs` [rows, k]: views, which may not be written to."""
        shape = (len(self), self.num_top)
        top_ids, tops = np.frombuffer(self.top_ids, _INTEGER).reshape(shape), np.frombuffer(self.top_logprobs, _FLOAT).reshape(shape)
        return np.frombuffer(self.logprobs, _FLOAT), np.frombuffer(self.ranks, _INTEGER), top_ids, tops


@value_class(frozen=True, slots=True)
class PrefillDone:
    """The prompt is computed and its next token sampled. The hand-over may still be in flight; when it fails later,
    AttemptFailed follows."""

    output: TokenOutput
    cached_tokens: int
    remote_tokens: int = 0
    """Cached ones that came from another node."""
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    fetch_ms: float = 0.0
    """From the order to fetch the remote ones until all were here; 0 when none were."""
    fetch_wait_ms: float = 0.0
    """How long passes waited for them, and the group had nothing else to do before them: what of `fetch_ms` was not hidden behind work."""
    prompt_logprobs: PromptLogprobs | None = None
    """Of all its tokens after the first, where the parameters ask for them and no token has been sent before."""
    times: PrefillTimes | None = None
    """Of an attempt that is traced."""
    most_foretold: int = 0
    """From a decode node: of what is foretold to the attempt, a step computes so many tokens at most. 0: it comes to them one by one."""


class FailureCode(Enum):
    """Why an attempt did not end well."""

    INVALID = "invalid"
    """The request can never succeed."""
    OVERLOADED = "overloaded"
    """It would miss its objectives."""
    POOL_FULL = "pool_full"
    """No slot to be had."""
    PREEMPTED = "preempted"
    """It gave its slots to an older request."""
    PEER_LOST = "peer_lost"
    """A store or node that took part is gone."""
    ABORTED = "aborted"
    """By order, or the other side of it gave it up."""
    INTERNAL = "internal"
    QUOTA_USED = "quota_used"
    """No slot to be had for this tenant."""

    # Looked up by identity, as they are single, rather than by their names' hashes.
    __hash__ = object.__hash__


NO_ROOM = frozenset({FailureCode.POOL_FULL, FailureCode.QUOTA_USED})
"""Failures of an order for slots that may well be met later."""


@value_class(frozen=True, slots=True)
class Failure:
    """Why something was not done."""

    code: FailureCode
    message: str


@value_class(frozen=True, slots=True)
class AttemptFailed:
    """The last word on an attempt that did not end well."""

    attempt_id: AttemptId
    failure: Failure


@value_class(frozen=True, slots=True)
class HandedOver:
    """The decode side has everything."""

    attempt_id: AttemptId
    num_bytes: int
    span_ms: float = 0.0
    """From the begin of the first write until the last one, the seal, was acknowledged."""
    write_ms: float = 0.0
    """Of those, while slabs were being written."""


@value_class(frozen=True, slots=True)
class AttemptSign:
    """An attempt is known at the node that sends this."""

    attempt_id: AttemptId
    computed_tokens: int
    """Of prompt and output. An attempt of which this stands still for long, and that does not wait, is stuck."""
    waiting: bool
    """For its turn, for slots, or for the other side."""


@value_class(frozen=True, slots=True)
class AttemptSigns:
    """Exactly these of the session's attempts are here, and this is how they get on. Sent twice a second."""

    signs: tuple[AttemptSign, ...]


PrefillUpdate = PrefillDone | AttemptFailed | AttemptSigns | HandedOver
"""From a prefill group to a gateway; HandedOver of attempts that are traced."""


@value_class(frozen=True, slots=True)
class DecodeUpdate:
    """What a decode node tells a gateway: one step's outputs. The first token of an attempt comes from the prefill side, or with
    `prefilled` where that is here."""

    outputs: tuple[TokenOutput, ...] = ()
    prefilled: tuple[PrefillDone, ...] = ()
    """Inlined prompts that this step has ended. They come before `outputs`."""
    reserved: tuple[AttemptId, ...] = ()
    """Attempts that waited for room and have their slots now."""
    failed: tuple[AttemptFailed, ...] = ()
    signs: AttemptSigns | None = None
    times: tuple[DecodeTimes, ...] = ()
    """Of attempts that are traced, with their first step and their last."""


def finish_of(token_id: int, num_output_tokens: int, params: SamplingParams, eos_ids: Collection[int]) -> Finish | None:
    """Whether the output ends with `token_id`, its `num_output_tokens`-th token: STOP (the token is then not part of the output),
    LENGTH (it is), or None when it goes on. Where a grammar lets the output end, it ends, whatever `ignore_eos` says: nothing else may
    follow."""
    if token_id in params.stop_token_ids or (token_id in eos_ids and (not params.ignore_eos or params.grammar)):
        return Finish.STOP
    if num_output_tokens >= params.max_tokens:
        return Finish.LENGTH
    return None


def token_output(
    attempt_id: AttemptId, sampled: Sequence[SampledToken], position: int, params: SamplingParams, eos_ids: Collection[int]
) -> TokenOutput:
    """The output of tokens sampled one after another, the first at output `position` (0 is the first after the original prompt). What
    follows the token with which the output ends is left out."""
    taken = min(len(sampled), max(1, params.max_tokens - position))
    if params.stop_token_ids or (eos_ids and (not params.ignore_eos or params.grammar)):
        stops = (i for i, token in enumerate(sampled, 1) if finish_of(token.token_id, position + i, params, eos_ids))
        taken = min(taken, next(stops, taken))
    last = sampled[taken - 1].token_id
    finish = finish_of(last, position + taken, params, eos_ids)
    if finish is not Finish.STOP:
        return TokenOutput(attempt_id, position, tuple(sampled[:taken]), finish)
    own_end = last in eos_ids and not params.ignore_eos
    return TokenOutput(attempt_id, position, tuple(sampled[: taken - 1]), finish, None if own_end else last)
