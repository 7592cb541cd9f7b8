"""A Conductor that decides nothing: what asking costs, whatever is asked. Prints its address, and serves until its input ends.

Its answer is of the usual size, and encoded and sent as a Conductor's is.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from benchmarks.fake_nodes import SECRET
from benchmarks.live_cluster import PREDICTION, instance_id
from springtide.credentials import Credentials
from springtide.ids import AttemptId, NodeId
from springtide.protocol import wire
from springtide.protocol.instances import InstanceRef, Role
from springtide.protocol.scheduling import Assignment, PrefixSource, ScheduleReply
from springtide.rpc import conductor_pb2, conductor_pb2_grpc
from springtide.rpc.channels import new_server

ADDRESS = "127.0.0.1:50051"


class DecidesNothing(conductor_pb2_grpc.ConductorServicer):
    async def Schedule(self, questions: AsyncIterator[conductor_pb2.ScheduleQuestion], context: Any) -> AsyncIterator[Any]:
        async for question in questions:
            yield conductor_pb2.ScheduleAnswer(number=question.number, reply=self._reply(question.request))

    def _reply(self, request: conductor_pb2.ScheduleRequest) -> conductor_pb2.ScheduleReply:
        prefill, decode = (InstanceRef(instance_id(role, 0), role, ADDRESS, NodeId("node"), ADDRESS) for role in Role)
        assignment = Assignment(
            attempt_id=AttemptId(request.attempt_id),
            prefill=prefill,
            decode=decode,
            local_blocks=1,
            sources=(PrefixSource(NodeId("node"), ADDRESS, 64),),
            predicted_ttft_ms=PREDICTION.ttft_ms,
            predicted_tbt_ms=PREDICTION.tbt_ms,
            ttft_slo_ms=30_000.0,
            tbt_slo_ms=1_000.0,
            prediction=PREDICTION,
            waits=False,
            refusable=False,
        )
        return wire.SCHEDULE_REPLY.encode(ScheduleReply(assignment))

    async def Advance(self, request: conductor_pb2.AdvanceRequest, context: Any) -> conductor_pb2.AdvanceReply:
        return conductor_pb2.AdvanceReply()


async def serve(cluster: str) -> None:
    server = new_server(Credentials(SECRET.encode(), cluster))
    conductor_pb2_grpc.add_ConductorServicer_to_server(DecidesNothing(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    print(address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
