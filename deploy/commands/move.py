"""`springtide move`: has sequences that decode at one node go on at others."""

from __future__ import annotations

import asyncio

import grpc

from deploy.commands.conductors import TIMEOUT_S, leader, views
from deploy.commands.locate import Located, Where, locate
from springtide.errors import InvalidRequest, Unavailable
from springtide.rpc import conductor_pb2
from springtide.rpc.channels import connect
from springtide.rpc.conductor_pb2_grpc import ConductorStub


def move(where: Where, instance_id: str, most: int) -> None:
    """Prints how many have been told to. Raises InvalidRequest when there is no such instance, Unavailable when no Conductor leads."""
    told = asyncio.run(_ask(where, instance_id, most))
    print(f"{told} of the sequences at {instance_id} told to go on elsewhere, where there is room for them")


async def _ask(where: Where, instance_id: str, most: int) -> int:
    located = await locate(where)
    request = conductor_pb2.MoveAttemptsRequest(instance_id=instance_id, most=most)
    async with connect(await _leader(located), located.credentials) as channel:
        try:
            reply: conductor_pb2.MoveAttemptsReply = await ConductorStub(channel).MoveAttempts(request, timeout=TIMEOUT_S)
            return reply.attempts
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise InvalidRequest(error.details() or "there is no such instance", param="instance") from None
            raise Unavailable(f"the Conductor does not answer: {error.details()}") from None


async def _leader(located: Located) -> str:
    leads = leader(await views(located.members, located.credentials))
    if leads is None:
        raise Unavailable(f"no Conductor of cluster {located.cluster!r} leads just now")
    return next(member.address for member in located.members if member.role == "conductor" and member.member_id == leads.conductor_id)
