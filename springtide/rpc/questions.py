"""Questions to a Conductor over plain connections, as who answers them has it (docs/wire.md)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import grpc.aio
from google.protobuf.message import DecodeError

from springtide.credentials import Credentials
from springtide.rpc.conductor_pb2 import GetScheduleAddressRequest, ScheduleAddress, ScheduleQuestion
from springtide.rpc.conductor_pb2_grpc import ConductorServicer
from springtide.rpc.frames import SCHEDULE, Frames, FrameServer


class AskedServicer(ConductorServicer, ABC):
    """A Conductor's gRPC service, and the port at which it is asked, which that tells."""

    def __init__(self, credentials: Credentials) -> None:
        self._asked = FrameServer(SCHEDULE, credentials, self._take)
        self._address = ""

    async def listen(self, host: str) -> None:
        """Answers questions from now on. Raises as `FrameServer.start`."""
        self._address = await self._asked.start(host)

    async def hang_up(self) -> None:
        """Once what was answered is on its way. Idempotent."""
        await self._asked.close()

    @abstractmethod
    def answer(self, connection: Frames, question: ScheduleQuestion) -> None:
        """Sends an answer over the connection, now or later. Never raises."""

    async def GetScheduleAddress(
        self,
        request: GetScheduleAddressRequest,
        context: grpc.aio.ServicerContext[GetScheduleAddressRequest, ScheduleAddress],
    ) -> ScheduleAddress:
        return ScheduleAddress(address=self._address)

    def _take(self, connection: Frames, message: bytes) -> None:
        try:
            question = ScheduleQuestion.FromString(message)
        except DecodeError:
            raise ConnectionError("no question came") from None
        self.answer(connection, question)
