"""Questions to a Conductor over one connection: answered in whatever order, given up one by one, lost together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_cluster import serving

from gateway.questions import Questions, Unanswered
from springtide.credentials import OPEN
from springtide.rpc.channels import connect
from springtide.rpc.conductor_pb2 import (
    GetScheduleAddressRequest,
    ScheduleAddress,
    ScheduleAnswer,
    ScheduleQuestion,
    ScheduleReply,
    ScheduleRequest,
)
from springtide.rpc.frames import Frames
from springtide.rpc.questions import AskedServicer
from tests.support.waiting import until

SOON_S = 10.0


class Slow(AskedServicer):
    """Answers when it is told to, with the attempt's name as the reason."""

    def __init__(self) -> None:
        super().__init__(OPEN)
        self.asked: list[ScheduleQuestion] = []
        self.connections: set[Frames] = set()

    def answer(self, connection: Frames, question: ScheduleQuestion) -> None:
        self.asked.append(question)
        self.connections.add(connection)

    def tell(self, question: ScheduleQuestion, refusal: str = "") -> None:
        answer = ScheduleAnswer(number=question.number)
        if refusal:
            answer.refusal = refusal
        else:
            answer.reply.rejection.message = question.request.attempt_id
        (connection,) = self.connections
        connection.send(answer.SerializeToString())


@pytest.fixture
async def conductor() -> AsyncIterator[tuple[Slow, Questions]]:
    slow = Slow()
    async with serving(slow) as address, connect(address) as channel:
        questions = Questions(channel)
        yield slow, questions
        await questions.close(0.0)


def ask(questions: Questions, name: str, timeout_s: float = SOON_S) -> asyncio.Task[ScheduleReply]:
    return asyncio.create_task(questions.ask(ScheduleRequest(attempt_id=name), timeout_s))


async def test_answers_find_who_asked_in_whatever_order_they_come(conductor: tuple[Slow, Questions]) -> None:
    slow, questions = conductor
    asking = {name: ask(questions, name) for name in "abcdefgh"}
    await until(lambda: len(slow.asked) == 8)
    for question in reversed(slow.asked):
        slow.tell(question)
    assert {name: (await task).rejection.message for name, task in asking.items()} == {name: name for name in "abcdefgh"}
    assert len(slow.connections) == 1


async def test_who_gives_up_leaves_the_others_alone(conductor: tuple[Slow, Questions]) -> None:
    slow, questions = conductor
    first, second, third = ask(questions, "a"), ask(questions, "b", timeout_s=0.2), ask(questions, "c")
    await until(lambda: len(slow.asked) == 3)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(Unanswered, match=r"nothing came for 0\.2 s") as given_up:
        await second
    assert given_up.value.lost
    for question in slow.asked:
        slow.tell(question)
    assert (await third).rejection.message == "c" and not questions.failed


async def test_who_is_cancelled_before_there_is_a_connection_asks_nothing(conductor: tuple[Slow, Questions]) -> None:
    slow, questions = conductor
    early = ask(questions, "a")
    await asyncio.sleep(0)
    early.cancel()
    later = ask(questions, "b")
    await until(lambda: bool(slow.asked))
    slow.tell(slow.asked[-1])
    assert (await later).rejection.message == "b" and len(slow.connections) == 1
    assert [question.request.attempt_id for question in slow.asked] == ["b"]


async def test_a_question_that_makes_no_sense_is_refused_alone(conductor: tuple[Slow, Questions]) -> None:
    slow, questions = conductor
    first, second = ask(questions, "a"), ask(questions, "b")
    await until(lambda: len(slow.asked) == 2)
    slow.tell(slow.asked[0], refusal="num_tokens is none")
    slow.tell(slow.asked[1])
    with pytest.raises(Unanswered, match="num_tokens is none") as refused:
        await first
    assert not refused.value.lost and (await second).rejection.message == "b"


async def test_all_that_wait_are_lost_with_the_connection(conductor: tuple[Slow, Questions]) -> None:
    slow, questions = conductor
    asking = [ask(questions, name) for name in "abc"]
    await until(lambda: len(slow.asked) == 3)
    await slow.hang_up()
    for task in asking:
        with pytest.raises(Unanswered) as unanswered:
            await task
        assert unanswered.value.lost
    assert questions.failed
    with pytest.raises(Unanswered):
        await questions.ask(ScheduleRequest(), SOON_S)


@pytest.mark.parametrize(("code", "lost"), [(grpc.StatusCode.UNAVAILABLE, True), (grpc.StatusCode.INTERNAL, False)])
async def test_who_is_not_told_where_to_ask_is_answered_why(code: grpc.StatusCode, lost: bool) -> None:
    class Unlisted(Slow):
        async def GetScheduleAddress(self, request: GetScheduleAddressRequest, context: Any) -> ScheduleAddress:
            await context.abort(code, "so it is")

    slow = Unlisted()
    async with serving(slow) as address, connect(address) as channel:
        questions = Questions(channel)
        asking = [ask(questions, name) for name in "abc"]
        for task in asking:
            with pytest.raises(Unanswered, match="so it is") as unanswered:
                await task
            assert unanswered.value.lost is lost
        assert questions.failed and not slow.asked


async def test_an_end_waits_for_the_answers_that_are_due(conductor: tuple[Slow, Questions]) -> None:
    slow, questions = conductor
    asking = ask(questions, "a")
    await until(lambda: len(slow.asked) == 1)
    closing = asyncio.create_task(questions.close(SOON_S))
    await asyncio.sleep(0.1)
    assert not closing.done()
    slow.tell(slow.asked[0])
    await asyncio.wait_for(closing, SOON_S / 2)
    assert (await asking).rejection.message == "a"


async def test_an_end_waits_no_longer_than_it_is_allowed(conductor: tuple[Slow, Questions]) -> None:
    slow, questions = conductor
    asking = ask(questions, "a")
    await until(lambda: len(slow.asked) == 1)
    await asyncio.wait_for(questions.close(0.1), SOON_S / 2)
    with pytest.raises(Unanswered, match="given up"):
        await asking


async def test_a_channel_that_is_closed_before_there_is_a_connection_ends_the_waiting() -> None:
    never = asyncio.Event()

    class Unlisted(Slow):
        async def GetScheduleAddress(self, request: GetScheduleAddressRequest, context: Any) -> ScheduleAddress:
            await never.wait()

    async with serving(Unlisted()) as address, connect(address) as channel:
        questions = Questions(channel)
        asking = ask(questions, "a")
        await asyncio.sleep(0.1)
        await channel.close(None)
        with pytest.raises(Unanswered) as unanswered:
            await asking
        assert unanswered.value.lost
