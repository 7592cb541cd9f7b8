"""The ready instances of one role as columns, kept up to date row by row.

What an estimate needs of an instance changes when it reports and when work is placed on it or ends, which is some instances between two
decisions, not all: only these rows are written anew. Who is ready, and where each store's bit and number are, changes seldom; then all
rows are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from conductor.core.index.prefix_index import PrefixIndex
from conductor.core.placement.transfer import TransferModel
from conductor.core.state import Instance
from conductor.core.types.estimates import Floats, Ints
from springtide.ids import InstanceId
from springtide.protocol.instances import Role


class InstanceColumns(ABC):
    """A float64 column has all integers below 2^53 exactly."""

    role: ClassVar[Role]
    names: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self.instance_ids: tuple[InstanceId, ...] = ()
        self.bits: Ints = np.zeros(0, np.int64)
        """Of each instance's own store in the prefix index."""
        self.nodes: Ints = np.zeros(0, np.int64)
        """Number of each instance's node in the transfer model."""
        self._row_of: dict[InstanceId, int] = {}
        self.table: Floats = np.zeros((len(self.names), 0))
        """[names, instances], of which the next refresh changes some."""

    @abstractmethod
    def row(self, instance: Instance) -> tuple[float, ...]:
        """Its figures, in the order of `names`."""

    def ready(self, instance: Instance) -> bool:
        """Its load is known, with what it takes to predict."""
        load = instance.load
        cost = load.prefill_cost if self.role is Role.PREFILL else load.decode_cost
        return instance.up and cost is not None and load.slots_total > 0

    def rebuild(self, instances: Iterable[Instance], index: PrefixIndex, transfers: TransferModel) -> None:
        """All rows, of those instances that are ready and whose store is in view."""
        chosen = [(instance, index.live_bit(instance.ref.node_id)) for instance in instances if self.ready(instance)]
        rows = [(instance, bit) for instance, bit in chosen if bit is not None]
        self.instance_ids = tuple(instance.ref.instance_id for instance, _ in rows)
        self._row_of = {instance_id: row for row, instance_id in enumerate(self.instance_ids)}
        self.bits = np.array([bit for _, bit in rows], np.int64)
        self.nodes = np.array([transfers.number(instance.ref.node_id) for instance, _ in rows], np.int64)
        self.table = np.array([self.row(instance) for instance, _ in rows], np.float64).reshape(len(rows), len(self.names)).T.copy()

    def column(self, name: str) -> Floats:
        """[instances], to be read before the next refresh."""
        column: Floats = self.table[self.names.index(name)]
        return column

    def __contains__(self, instance_id: InstanceId) -> bool:
        return instance_id in self._row_of

    def refresh(self, instance: Instance, in_view: bool) -> bool:
        """Writes the instance's row anew. False when who is ready has changed by it, so that `rebuild` is due."""
        row = self._row_of.get(instance.ref.instance_id)
        if not in_view or not self.ready(instance):
            return row is None
        if row is None:
            return False
        self.table[:, row] = self.row(instance)
        return True


class PrefillColumns(InstanceColumns):
    role = Role.PREFILL
    names = (
        "queue_ms",
        "reported_at",
        "placed_ms",
        "fixed_ms",
        "per_token_ms",
        "per_pair_ms",
        "slowest_share",
        "ssd_read_ms_per_block",
        "slots_total",
    )

    def row(self, instance: Instance) -> tuple[float, ...]:
        load = instance.load
        cost = load.prefill_cost
        assert cost is not None
        placed_ms = sum(attempt.prefill_ms for attempt in instance.unreported.values()) if instance.unreported else 0.0
        return (
            load.queue_ms,
            instance.changed_at,
            placed_ms,
            cost.fixed_ms,
            cost.per_token_ms,
            cost.per_pair_ms,
            cost.slowest_share,
            load.ssd_read_us_per_block / 1000,
            load.slots_total,
        )


class DecodeColumns(InstanceColumns):
    role = Role.DECODE
    names = (
        "batch",
        "context_tokens",
        "max_batch",
        "fixed_ms",
        "per_sequence_ms",
        "per_context_token_ms",
        "slots_free",
        "slots_total",
        "inlining_ms",
    )

    @property
    def estimated(self) -> Floats:
        """The part of the table that `estimating.decode` takes: all but the last column."""
        part: Floats = self.table[:-1]
        return part

    def row(self, instance: Instance) -> tuple[float, ...]:
        load = instance.load
        cost = load.decode_cost
        assert cost is not None
        arriving = instance.arriving
        context = load.tokens + sum(attempt.num_tokens for attempt in arriving.values()) if arriving else load.tokens
        return (
            load.running + len(arriving),
            context,
            load.max_batch,
            cost.fixed_ms,
            cost.per_sequence_ms,
            cost.per_context_token_ms,
            instance.slots_free(),
            load.slots_total,
            instance.inlining_ms() if arriving else 0.0,
        )
