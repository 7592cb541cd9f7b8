"""A Conductor that decides nothing: what asking costs, whatever is asked. Prints its address, and serves until its input ends.

Its answer is of the usual size, and encoded and sent as a Conductor's is.
"""

from __future__ import annotations

import asyncio
import sys

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
from springtide.rpc.frames import Frames
from springtide.rpc.questions import AskedServicer

ADDRESS = "127.0.0.1:50051"


class DecidesNothing(AskedServicer):
    def answer(self, connection: Frames, question: conductor_pb2.ScheduleQuestion) -> None:
        answer = conductor_pb2.ScheduleAnswer(number=question.number)
        if question.HasField("advance"):
            answer.advanced.SetInParent()
        else:
            answer.reply.CopyFrom(self._reply(question.request))
        connection.send(answer.SerializeToString())

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


async def serve(cluster: str) -> None:
    credentials = Credentials(SECRET.encode(), cluster)
    server, service = new_server(credentials), DecidesNothing(credentials)
    await service.listen("127.0.0.1")
    conductor_pb2_grpc.add_ConductorServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    print(address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await service.hang_up()
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
