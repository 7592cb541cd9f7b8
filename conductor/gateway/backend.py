"""What the front ends, HTTP and gRPC, have behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from conductor.gateway.conductor_link import ConductorLink
from conductor.gateway.prepare import Preparer, Tokenizer
from conductor.gateway.reply import Reply, Work
from conductor.gateway.runner import Runner
from conductor.gateway.text import Detokenizer


class ServingTokenizer(Tokenizer, Protocol):
    """`engine.tokenizer.Tokenizer`, as far as the gateway uses it."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def detokenizer(self) -> Detokenizer: ...


@dataclass(frozen=True, slots=True)
class Backend:
    preparer: Preparer
    tokenizer: ServingTokenizer
    runner: Runner
    conductor: ConductorLink

    def start(self, work: Work) -> Reply:
        return Reply(work, self.runner, self.tokenizer.detokenizer)

    async def ready(self) -> bool:
        """Whether the cluster can take requests. Raises Unavailable when the Conductor cannot be asked."""
        return (await self.conductor.cluster()).ready
