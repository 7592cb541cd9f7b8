"""Which of the estimated instances serves a request. A policy has no state: what it needs is in the alternatives, as columns."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Protocol

from conductor import _native
from conductor.core.types.arrays import Ints
from conductor.core.types.decision import Alternatives
from springtide.choices import PolicyName
from springtide.ids import AttemptId


class PlacementPolicy(Protocol):
    """A rule by which one of the estimated instances is chosen."""

    fetches: bool
    """Whether a prefill instance may fetch a prefix from another store."""
    foresees_wait: bool
    """Whether queues are what a prompt of this size is expected to wait, which depends on what is cached; else all the work ahead."""
    stays: bool
    """Whether an instance that can decode what it has prefilled does."""

    def prefill(self, alternatives: Alternatives, rows: Ints) -> int:
        """The chosen one of `rows` of `alternatives.prefills`, of which there is at least one."""
        ...

    def decode(self, alternatives: Alternatives, rows: Ints) -> int:
        """The chosen one of `rows` of `alternatives.decodes`, of which there is at least one."""
        ...


class KVCacheCentric:
    """Algorithm 1 (arXiv 2407.00079, section 6): the least predicted TTFT, a prefix being fetched where it is much longer elsewhere."""

    fetches = True
    foresees_wait = True
    stays = True

    def prefill(self, alternatives: Alternatives, rows: Ints) -> int:
        prefills = alternatives.prefills
        return _native.best_row(rows, "<>", prefills.ttft_ms, prefills.local_blocks)

    def decode(self, alternatives: Alternatives, rows: Ints) -> int:
        """SelectDecodingInstance. Among equals, the one that holds more of the prompt already, then more free slots."""
        decodes = alternatives.decodes
        return _native.best_row(rows, "<>>", decodes.tbt_ms, decodes.prefix_blocks, decodes.slots_free)


class CacheAware(KVCacheCentric):
    """Algorithm 1 without its cache-balancing branch: each instance counts on its own store alone."""

    fetches = False


class LoadBalance:
    """The shortest queue, whatever is cached where."""

    fetches = False
    foresees_wait = False
    stays = False

    def prefill(self, alternatives: Alternatives, rows: Ints) -> int:
        return _native.best_row(rows, "<", alternatives.prefills.queue_ms)

    def decode(self, alternatives: Alternatives, rows: Ints) -> int:
        return _native.best_row(rows, "<", alternatives.decodes.batch)


class RoundRobin:
    """Takes one instance after the other."""

    fetches = False
    foresees_wait = False
    stays = False

    def prefill(self, alternatives: Alternatives, rows: Ints) -> int:
        return int(rows[alternatives.turn % len(rows)])

    def decode(self, alternatives: Alternatives, rows: Ints) -> int:
        return int(rows[alternatives.turn % len(rows)])


class Random:
    """Takes any instance, all alike. What is drawn depends on the attempt's id alone, so a decision stays the same when it is replayed."""

    fetches = False
    foresees_wait = False
    stays = False

    def prefill(self, alternatives: Alternatives, rows: Ints) -> int:
        return int(rows[_drawn("prefill", alternatives.attempt_id) % len(rows)])

    def decode(self, alternatives: Alternatives, rows: Ints) -> int:
        return int(rows[_drawn("decode", alternatives.attempt_id) % len(rows)])


def _drawn(role: str, attempt_id: AttemptId) -> int:
    """64 bits that nobody can tell from chance."""
    return int.from_bytes(blake2b(attempt_id.encode(), digest_size=8, person=role.encode()).digest(), "little")


POLICIES: Mapping[PolicyName, PlacementPolicy] = {
    "kvcache-centric": KVCacheCentric(),
    "cache-aware": CacheAware(),
    "load-balance": LoadBalance(),
    "round-robin": RoundRobin(),
    "random": Random(),
}
"""Policies by name, the default first (docs/add-a-scheduling-policy.md)."""
