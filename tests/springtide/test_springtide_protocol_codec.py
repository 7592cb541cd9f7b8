"""A codec finds out at once where a word and its message differ, and says which value has no meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import pytest

from springtide.ids import AttemptId, InstanceId, NodeId
from springtide.protocol import wire
from springtide.protocol.attempts import LiveAttempt, Phase, Prediction
from springtide.protocol.codec import Codec, OneOf
from springtide.protocol.instances import InstanceRef, Load, Role
from springtide.protocol.outputs import DecodeUpdate, Failure, FailureCode, Finish, SampledToken, TokenLogprob, TokenOutput
from springtide.protocol.sampling import LogitBias, SamplingParams
from springtide.protocol.scheduling import GatewayOrders
from springtide.protocol.status import ClusterStatus
from springtide.rpc import common_pb2, conductor_pb2, node_pb2


@dataclass(frozen=True, slots=True)
class FailureWithout:
    code: FailureCode


@dataclass(frozen=True, slots=True)
class FailureWithMore:
    code: FailureCode
    message: str
    mood: str


class FewerCodes(Enum):
    INVALID = 1
    INTERNAL = 2


@dataclass(frozen=True, slots=True)
class FailureOfFewerCodes:
    code: FewerCodes
    message: str


@dataclass(frozen=True, slots=True)
class FailureOrNone:
    code: FailureCode
    message: str | None


@dataclass(frozen=True, slots=True)
class OfNoWord:
    prefill: str
    abort: str


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        (FailureWithout, r"FailureWithout and Failure differ in the fields \['message'\]"),
        (FailureWithMore, r"differ in the fields \['mood'\]"),
        (FailureOfFewerCodes, "FailureCode differ in the members .*'POOL_FULL'"),
        (FailureOrNone, "FailureOrNone.message may be None, but its message cannot be without it"),
    ],
)
def test_a_word_that_is_not_its_message_is_found_at_once(word: type, problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        Codec(word, common_pb2.Failure)


def test_a_word_that_holds_another_needs_that_ones_codec() -> None:
    class Stranger(NamedTuple):
        signs: tuple[FailureWithMore, ...]

    with pytest.raises(TypeError, match=r"Stranger\.signs: there is no codec between .*FailureWithMore.* and AttemptSign"):
        Codec(Stranger, node_pb2.AttemptSigns)


def test_one_of_several_words_names_them_all() -> None:
    with pytest.raises(TypeError, match=r"PrefillCommand is one of \['abort', 'start'\], not of \['abort'\]"):
        OneOf(node_pb2.PrefillCommand, abort=wire.ABORT_ATTEMPT)
    with pytest.raises(ValueError, match="PrefillCommand must have one of start, abort"):
        wire.PREFILL_COMMAND.decode(node_pb2.PrefillCommand())


def test_a_number_that_stands_for_nothing_is_named_with_its_field() -> None:
    with pytest.raises(ValueError, match=r"Failure\.code must be one of INVALID, .*, not the number 0"):
        wire.FAILURE.decode(common_pb2.Failure(message="what?"))
    with pytest.raises(ValueError, match=r"Failure\.code must be one of .*, not the number 99"):
        wire.FAILURE.decode(common_pb2.Failure(code=99))  # type: ignore[arg-type]


def ref(name: str) -> InstanceRef:
    return InstanceRef(InstanceId(name), Role.DECODE, f"{name}:1", NodeId(name), f"{name}:2")


def test_what_is_absent_comes_back_as_none_and_what_is_there_as_it_was() -> None:
    live = LiveAttempt(AttemptId("a"), InstanceId("p"), InstanceId("d"), Phase.DECODE, 100)
    assert wire.LIVE_ATTEMPT.decode(wire.LIVE_ATTEMPT.encode(live)) == live and live.prediction is None
    predicted = LiveAttempt(AttemptId("a"), InstanceId("p"), InstanceId("d"), Phase.DECODE, 100, prediction=Prediction(1, 2, 3, 4, 5, 6, 7))
    assert wire.LIVE_ATTEMPT.decode(wire.LIVE_ATTEMPT.encode(predicted)) == predicted
    assert wire.LOAD.decode(wire.LOAD.encode(Load(attempt_ids=frozenset({AttemptId("a"), AttemptId("b")})))).attempt_ids == {"a", "b"}
    orders = GatewayOrders((ref("x"), ref("y")), (AttemptId("a"),))
    assert wire.GATEWAY_ORDERS.decode(wire.GATEWAY_ORDERS.encode(orders)) == orders


def test_tokens_come_back_with_their_logprobs_or_without() -> None:
    tokens = (SampledToken(5), SampledToken(6, -0.5), SampledToken(7, 0.0, (TokenLogprob(7, 0.0), TokenLogprob(1, -2.0))))
    update = DecodeUpdate(
        (TokenOutput(AttemptId("a"), 3, tokens, Finish.LENGTH), TokenOutput(AttemptId("b"), 0, ())), reserved=(AttemptId("c"),)
    )
    assert wire.DECODE_UPDATE.decode(wire.DECODE_UPDATE.encode(update)) == update


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(logprobs=0, seed=2**64 - 1, logit_bias=LogitBias.of({7: -3.5}), stop_token_ids=(1, 2))]
)
def test_sampling_parameters_come_back_as_they_were(params: SamplingParams) -> None:
    assert wire.SAMPLING_PARAMS.decode(wire.SAMPLING_PARAMS.encode(params)) == params


def test_maps_and_optional_numbers_come_back() -> None:
    status = wire.CLUSTER_STATUS.decode(conductor_pb2.ClusterStatus(rejections_by_reason={"ttft": 3}))
    assert isinstance(status, ClusterStatus) and isinstance(status.rejections_by_reason, Mapping)
    assert dict(status.rejections_by_reason) == {"ttft": 3} and status.wanted_prefill is None
    assert wire.CLUSTER_STATUS.decode(conductor_pb2.ClusterStatus(wanted_prefill=0)).wanted_prefill == 0
    assert wire.FAILURE.decode(wire.FAILURE.encode(Failure(FailureCode.QUOTA_USED, "no"))) == Failure(FailureCode.QUOTA_USED, "no")
