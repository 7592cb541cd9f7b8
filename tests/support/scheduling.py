"""A question to a Conductor, without a gateway."""

from __future__ import annotations

from springtide.rpc.conductor_pb2 import ScheduleAnswer, ScheduleQuestion, ScheduleReply, ScheduleRequest
from springtide.rpc.conductor_pb2_grpc import ConductorStub

NUMBER = 7


def question(request: ScheduleRequest) -> ScheduleQuestion:
    return ScheduleQuestion(number=NUMBER, request=request)


async def answered(conductor: ConductorStub, request: ScheduleRequest) -> ScheduleAnswer:
    call = conductor.Schedule()
    try:
        await call.write(question(request))
        answer = await call.read()
        assert isinstance(answer, ScheduleAnswer) and answer.number == NUMBER
        return answer
    finally:
        call.cancel()


async def scheduled(conductor: ConductorStub, request: ScheduleRequest) -> ScheduleReply:
    answer = await answered(conductor, request)
    assert answer.HasField("reply"), answer.refusal
    return answer.reply
