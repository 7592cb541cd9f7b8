"""Deadlines and priorities, from the client to the Conductor and back."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace

import grpc
import openai
import pytest
from gateway_cluster import MODEL, Cluster
from gateway_world import assignment, generation, new_core
from pydantic import BaseModel

from gateway import events as ev
from gateway.app import GatewayServer
from gateway.core import GatewayCore
from gateway.openai.requests import ChatCompletionRequest, CompletionRequest
from gateway.prepare import SAMPLING_FIELDS
from springtide.clock import Tick
from springtide.errors import DeadlineExceeded, Overloaded, SpringtideError
from springtide.ids import AttemptId
from springtide.protocol.instances import Role
from springtide.protocol.outputs import AttemptFailed, Failure, FailureCode
from springtide.protocol.scheduling import Reason, Rejection, Schedule, Terms
from springtide.rpc import common_pb2, conductor_pb2, inference_pb2, inference_pb2_grpc
from springtide.rpc.channels import connect
from tests.support.waiting import until

QUESTION = [{"role": "user", "content": "Say it."}]
FIRST, SECOND = AttemptId("r0.1"), AttemptId("r0.2")


def arrived(deadline_ms: float) -> tuple[GatewayCore, Schedule]:
    core = new_core()
    (schedule,) = core.handle(ev.Arrived(replace(generation(0, 4), terms=Terms(deadline_ms=deadline_ms))), 100.0)
    assert isinstance(schedule, Schedule)
    return core, schedule


def error_of(actions: list[ev.Action]) -> SpringtideError:
    terminal = actions[-1]
    assert isinstance(terminal, ev.Terminal) and isinstance(terminal.reply, ev.Failed)
    return terminal.reply.error


def fail_at(core: GatewayCore, now: float) -> list[ev.Action]:
    core.handle(assignment(FIRST), 100.0)
    actions = core.handle(ev.SideFailed(Role.DECODE, AttemptFailed(FIRST, Failure(FailureCode.INTERNAL, "broken"))), now)
    core.validate()
    return actions


def test_each_attempt_is_told_what_is_left_of_the_deadline() -> None:
    core, first = arrived(5_000)
    assert first.terms.deadline_ms == 5_000
    second = fail_at(core, 103.0)[-1]
    assert isinstance(second, Schedule) and second.attempt_id == SECOND
    assert second.terms.deadline_ms == pytest.approx(2_000)


def test_a_further_choice_has_no_more_time_than_the_request_has_left() -> None:
    core = new_core()
    sibling = replace(generation(0, 4), terms=Terms(deadline_ms=5_000.0), requested_at=97.0, accepted=True)
    (schedule,) = core.handle(ev.Arrived(sibling), 100.0)
    assert isinstance(schedule, Schedule) and schedule.terms.deadline_ms == pytest.approx(2_000)
    assert isinstance(error_of(new_core().handle(ev.Arrived(sibling), 102.0)), DeadlineExceeded)


def test_an_expired_attempt_is_not_scheduled_again() -> None:
    core, _ = arrived(5_000)
    actions = fail_at(core, 105.0)
    assert isinstance(error_of(actions), DeadlineExceeded)
    assert not any(isinstance(action, Schedule) for action in actions)
    assert core.live_attempts() == []


def test_whoever_waits_for_instances_waits_no_longer_than_the_deadline() -> None:
    core, _ = arrived(1_000)
    core.handle(ev.Rejected(FIRST, Rejection(Reason.NO_DECODE, "nobody", 5.0)), 100.0)
    assert isinstance(error_of(core.handle(Tick(), 101.5)), DeadlineExceeded)


def test_without_a_deadline_there_is_none() -> None:
    core, first = arrived(0.0)
    assert first.terms.deadline_ms == 0
    assert isinstance(fail_at(core, 1e6)[-1], Schedule)


@pytest.mark.parametrize(("retry_after_s", "kind"), [(3.0, Overloaded), (0.0, DeadlineExceeded)])
def test_a_deadline_that_load_alone_keeps_from_is_an_overload(retry_after_s: float, kind: type[SpringtideError]) -> None:
    core, _ = arrived(1_000)
    rejected = ev.Rejected(FIRST, Rejection(Reason.DEADLINE, "too late", retry_after_s))
    error = error_of(core.handle(rejected, 100.0))
    assert type(error) is kind and error.code == "deadline"


async def test_openai_clients_give_them_as_extra_fields(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    await client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"priority": -2, "deadline_ms": 60_000})
    (request,) = cluster.conductor.requests
    assert request.terms.priority == 2, "vLLM's counts the other way round"
    assert 50_000 < request.terms.deadline_ms <= 60_000


async def test_who_asks_for_idle_capacity_says_so_to_conductor_and_nodes(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    await client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"idle": True})
    await client.chat.completions.create(model=MODEL, messages=QUESTION, service_tier="default")
    await client.chat.completions.create(model=MODEL, messages=QUESTION, service_tier="flex")
    await client.responses.create(model=MODEL, input="Say it.", service_tier="flex")
    assert [request.terms.idle for request in cluster.conductor.requests] == [True, False, True, True]
    for role in ("prefill", "decode"):
        assert [start.request.idle for name, start in cluster.started if name.startswith(role)] == [True, False, True, True]


async def test_a_response_has_the_same_fields(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    extra = {"priority": -2, "idle": True, "deadline_ms": 60_000, "ignore_eos": True}
    await client.responses.create(model=MODEL, input="Say it.", max_output_tokens=4, extra_body=extra)
    (request,) = cluster.conductor.requests
    assert request.terms.priority == 2 and request.terms.idle and 50_000 < request.terms.deadline_ms <= 60_000
    assert all(start.request.params.ignore_eos for _, start in cluster.started)


@pytest.mark.parametrize("body", [ChatCompletionRequest, CompletionRequest])
def test_http_has_a_field_for_whatever_can_be_asked(body: type[BaseModel]) -> None:
    assert {*(field.name for field in fields(Terms)), *SAMPLING_FIELDS} <= body.model_fields.keys()


@pytest.mark.parametrize("extra", [{"deadline_ms": 0}, {"deadline_ms": -5}, {"deadline_ms": "soon"}, {"priority": 0.5}, {"idle": 7}])
async def test_senseless_ones_are_refused_by_name(client: openai.AsyncOpenAI, extra: dict[str, object]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body=extra)
    assert caught.value.param == next(iter(extra))


async def test_a_deadline_that_cannot_be_kept_is_a_504(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    cluster.conductor.rejections.append(conductor_pb2.Rejection(reason=conductor_pb2.REASON_DEADLINE, message="the deadline is in 100 ms"))
    with pytest.raises(openai.InternalServerError) as caught:
        await client.with_options(max_retries=0).chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"deadline_ms": 100})
    assert caught.value.status_code == 504
    assert caught.value.code == "deadline"


async def test_the_deadline_of_all_choices_counts_from_the_requests_arrival(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    prefill = cluster.nodes["prefill-0"]
    prefill.pause_at = 0
    extra = {"deadline_ms": 60_000}
    asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=QUESTION, n=3, extra_body=extra))
    await until(lambda: prefill.running)
    await asyncio.sleep(0.2)
    prefill.patience.set()
    await asking
    first, *others = cluster.conductor.requests
    assert len(others) == 2 and all(other.terms.deadline_ms < first.terms.deadline_ms - 200 for other in others)


async def test_grpc_clients_have_fields_for_them(gateway: GatewayServer, cluster: Cluster) -> None:
    async with connect(gateway.grpc_address) as channel:
        await _ask_over_grpc(inference_pb2_grpc.InferenceStub(channel), cluster)


async def _ask_over_grpc(stub: inference_pb2_grpc.InferenceStub, cluster: Cluster) -> None:
    tokens = inference_pb2.TokenPrompt(token_ids=[500, 501])
    terms = common_pb2.Terms(priority=2, deadline_ms=60_000)
    wanted = inference_pb2.GenerateRequest(model=MODEL, tokens=tokens, tenant="acme", terms=terms)
    [_ async for _ in stub.Generate(wanted)]
    (request,) = cluster.conductor.requests
    assert (request.terms.priority, request.tenant) == (2, "acme")
    assert 50_000 < request.terms.deadline_ms <= 60_000
    wanted.terms.deadline_ms = -1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in stub.Generate(wanted)]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "deadline_ms" in (caught.value.details() or "")
