"""What the front ends, HTTP and gRPC, have behind them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.tokenizer.tokenizer import Tokenizer
from gateway.bodies import Bodies
from gateway.conductor_link import ConductorLink
from gateway.prepare import Preparer
from gateway.reply import AnswerStream, PreparedRequest
from gateway.runner import Runner
from gateway.side_thread import SideThread
from gateway.tenancy import ApiKeys
from springtide.clock import Clock


@dataclass(frozen=True, slots=True)
class ApiBackend:
    preparer: Preparer
    tokenizer: Tokenizer
    runner: Runner
    conductor: ConductorLink
    tenants: ApiKeys
    bodies: Bodies
    side_thread: SideThread
    clock: Clock
    """The runner's."""

    def start(self, work: PreparedRequest) -> AnswerStream:
        return AnswerStream(work, self.runner, self.tokenizer.detokenizer)

    async def ready(self) -> bool:
        """Whether the cluster can take requests. Raises Unavailable when the Conductor cannot be asked."""
        return (await self.conductor.cluster()).ready
