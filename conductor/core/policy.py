"""Which of the estimated instances serves a request. A policy has no state: what it needs is in the estimates and the turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from conductor.core.decision import DecodeEstimate, PrefillEstimate


class Policy(Protocol):
    fetches: bool
    """Whether a prefill instance may fetch a prefix from another store."""

    def prefill(self, estimates: Sequence[PrefillEstimate], turn: int) -> PrefillEstimate:
        """One of `estimates`, of which there is at least one."""
        ...

    def decode(self, estimates: Sequence[DecodeEstimate], turn: int) -> DecodeEstimate:
        """One of `estimates`, of which there is at least one."""
        ...


def least_tbt(estimates: Sequence[DecodeEstimate]) -> DecodeEstimate:
    """SelectDecodingInstance of Algorithm 1. Among equals, the one that holds more of the prompt already, then more free slots."""
    return min(estimates, key=lambda e: (e.tbt_ms, -e.prefix_blocks, -e.slots_free))


class KVCacheCentric:
    """Algorithm 1 (arXiv 2407.00079, section 6): the least predicted TTFT, a prefix being fetched where it is much longer elsewhere."""

    fetches = True

    def prefill(self, estimates: Sequence[PrefillEstimate], turn: int) -> PrefillEstimate:
        return min(estimates, key=lambda e: (e.ttft_ms, -e.local_blocks))

    def decode(self, estimates: Sequence[DecodeEstimate], turn: int) -> DecodeEstimate:
        return least_tbt(estimates)


class CacheAware(KVCacheCentric):
    """Algorithm 1 without its cache-balancing branch: each instance counts on its own store alone."""

    fetches = False


class LoadBalance:
    """The shortest queue, whatever is cached where."""

    fetches = False

    def prefill(self, estimates: Sequence[PrefillEstimate], turn: int) -> PrefillEstimate:
        return min(estimates, key=lambda e: e.queue_ms)

    def decode(self, estimates: Sequence[DecodeEstimate], turn: int) -> DecodeEstimate:
        return min(estimates, key=lambda e: e.batch)


class RoundRobin:
    """One after the other."""

    fetches = False

    def prefill(self, estimates: Sequence[PrefillEstimate], turn: int) -> PrefillEstimate:
        return estimates[turn % len(estimates)]

    def decode(self, estimates: Sequence[DecodeEstimate], turn: int) -> DecodeEstimate:
        return estimates[turn % len(estimates)]


POLICIES: dict[str, Policy] = {
    "kvcache-centric": KVCacheCentric(),
    "cache-aware": CacheAware(),
    "load-balance": LoadBalance(),
    "round-robin": RoundRobin(),
}
