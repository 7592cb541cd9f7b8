"""What the front ends, HTTP and gRPC, have behind them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.tokenizer.tokenizer import Tokenizer
from gateway.bodies import Bodies
from gateway.conductor_link import ConductorLink
from gateway.prepare import Preparer
from gateway.reply import Reply, Work
from gateway.runner import Runner
from gateway.side_thread import SideThread
from gateway.tenancy import Tenants
from springtide.clock import Clock


@dataclass(frozen=True, slots=True)
class Backend:
    preparer: Preparer
    tokenizer: Tokenizer
    runner: Runner
    conductor: ConductorLink
    tenants: Tenants
    bodies: Bodies
    side_thread: SideThread
    clock: Clock
    """The runner's."""

    def start(self, work: Work) -> Reply:
        return Reply(work, self.runner, self.tokenizer.detokenizer)

    async def ready(self) -> bool:
        """Whether the cluster can take requests. Raises Unavailable when the Conductor cannot be asked."""
        return (await self.conductor.cluster()).ready
