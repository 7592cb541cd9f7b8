"""The ready instances of one role as columns, kept up to date row by row.

What an estimate needs of an instance changes when it reports and when work is placed on it or ends, which is some instances between two
decisions, not all: only these rows are written anew. Who is ready, and where each store's bit and number are, changes seldom; then all
rows are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, Generic, TypeVar

import numpy as np

from conductor.core.placement.transfer import TransferModel
from conductor.core.prefix_index import PrefixIndex
from conductor.core.state import Instance
from conductor.core.types.arrays import Floats, Ints, StructuredArray
from springtide.ids import InstanceId, NodeId
from springtide.protocol.instances import Load, Role


class PrefillInstances(StructuredArray):
    """What prefill instances are estimated from."""

    bit: Ints
    """Of its own store in the prefix index."""
    node: Ints
    """Number of its node in the transfer model."""
    queue_ms: Floats
    reported_at: Floats
    """When that was, in seconds."""
    placed_ms: Floats
    """Predicted prefill time of what was placed on it since."""
    fixed_ms: Floats
    per_token_ms: Floats
    per_pair_ms: Floats
    slowest_share: Floats
    """As of PrefillCost."""
    ssd_read_ms_per_block: Floats
    slots_total: Ints

    def queue_ms_at(self, now: float) -> Floats:
        """[instances] as `Instance.queue_ms`, all at once."""
        return np.asarray(np.maximum(self.queue_ms - 1000.0 * (now - self.reported_at), 0.0) + self.placed_ms)


class DecodeInstances(StructuredArray):
    """What decode instances are estimated from."""

    bit: Ints
    """Of its own store in the prefix index."""
    attempts: Ints
    """Running there, or promised to it."""
    running: Ints
    """Of these, those that were running when it reported."""
    context_tokens: Floats
    """Of the attempts."""
    max_batch: Ints
    """0: not limited."""
    fixed_ms: Floats
    per_sequence_ms: Floats
    per_context_token_ms: Floats
    """As of DecodeCost."""
    slots_free: Ints
    """Negative when more is promised than there is."""
    slots_total: Ints
    inlining_ms: Floats
    """Predicted time of the prompts that it is to compute itself."""


class IdleColumns:
    """What attempts in idle capacity are at each instance, reported and placed since: of interest to their like alone."""

    def __init__(self, count: int) -> None:
        self.attempts: Ints = np.zeros(count, np.int64)
        self.context_tokens: Floats = np.zeros(count)
        self.queue_ms: Floats = np.zeros(count)
        self.slots: Ints = np.zeros(count, np.int64)
        """Held, and promised."""

    def write(self, row: int, instance: Instance) -> None:
        told, placed = instance.load.idle, instance.idle.values()
        self.attempts[row] = told.running + len(placed)
        self.context_tokens[row] = told.tokens + sum(attempt.num_tokens for attempt in placed)
        self.queue_ms[row] = told.queue_ms + sum(attempt.prefill_ms for attempt in placed)
        self.slots[row] = told.slots_held + told.slots_promised + sum(attempt.num_blocks for attempt in placed)


InstancesT = TypeVar("InstancesT", PrefillInstances, DecodeInstances)


class InstanceColumns(ABC, Generic[InstancesT]):
    """The rows of one role's ready instances."""

    role: ClassVar[Role]

    def __init__(self, kind: type[InstancesT]) -> None:
        self._kind: type[InstancesT] = kind
        self._row_of: dict[InstanceId, int] = {}
        self.node_ids: tuple[NodeId, ...] = ()
        """Of each row."""
        self._written: list[Load | None] = []
        """The load of each row."""
        self.instance_ids: tuple[InstanceId, ...] = ()
        self.instances: InstancesT = kind.zeros(0)
        """Of which the next refresh changes some."""
        self.idle = IdleColumns(0)
        """As `instances`."""
        self._by_name: Ints | None = None

    @abstractmethod
    def locate(self, bits: list[int], nodes: list[int]) -> None:
        """Writes where each instance's store is in the index, and its node in the transfer model."""

    @abstractmethod
    def write_load(self, row: int, instance: Instance) -> None:
        """Writes what it reported of its load, and what it takes to predict."""

    @abstractmethod
    def write_placed(self, row: int, instance: Instance) -> None:
        """Writes what is other than was reported, for what was placed on it since or ended."""

    def write(self, row: int, instance: Instance) -> None:
        """Writes what is known of it. A load is written once: work comes and goes more often."""
        if self._written[row] is not instance.load:
            self._written[row] = instance.load
            self.write_load(row, instance)
        self.write_placed(row, instance)

    def ready(self, instance: Instance) -> bool:
        """Whether its load is known, with what it takes to predict."""
        load = instance.load
        cost = load.prefill_cost if self.role is Role.PREFILL else load.decode_cost
        return instance.up and cost is not None and load.slots_total > 0

    def rebuild(self, instances: Iterable[Instance], index: PrefixIndex, transfers: TransferModel) -> None:
        """Makes all rows anew, of those instances that are ready and whose store is in view."""
        chosen = [(instance, index.live_bit(instance.ref.node_id)) for instance in instances if self.ready(instance)]
        rows = [(instance, bit) for instance, bit in chosen if bit is not None]
        self.instance_ids = tuple(instance.ref.instance_id for instance, _ in rows)
        self._by_name = None
        self.node_ids = tuple(instance.ref.node_id for instance, _ in rows)
        self._row_of = {instance_id: row for row, instance_id in enumerate(self.instance_ids)}
        self.instances = self._kind.zeros(len(rows))
        self.locate([bit for _, bit in rows], [transfers.number(instance.ref.node_id) for instance, _ in rows])
        self.idle = IdleColumns(len(rows))
        self._written = [None] * len(rows)
        for row, (instance, _) in enumerate(rows):
            self.write(row, instance)
            self.idle.write(row, instance)

    def by_name(self) -> Ints:
        """[rows] the place of each among the names in their order."""
        if self._by_name is None:
            self._by_name = np.empty(len(self.instance_ids), np.int64)
            self._by_name[sorted(range(len(self.instance_ids)), key=self.instance_ids.__getitem__)] = np.arange(len(self.instance_ids))
        return self._by_name

    def row_of(self, instance_id: InstanceId) -> int | None:
        """None: it is not ready."""
        return self._row_of.get(instance_id)

    def __contains__(self, instance_id: InstanceId) -> bool:
        return instance_id in self._row_of

    def refresh(self, instance: Instance, in_view: bool) -> bool:
        """Writes the instance's row anew. False when who is ready, or where, has changed by it, so that `rebuild` is due."""
        row = self._row_of.get(instance.ref.instance_id)
        if not in_view or not self.ready(instance):
            return row is None
        if row is None or self.node_ids[row] != instance.ref.node_id:
            return False
        self.write(row, instance)
        if instance.idle or instance.load.idle.running or self.idle.attempts[row]:
            self.idle.write(row, instance)
        return True


class PrefillColumns(InstanceColumns[PrefillInstances]):
    role = Role.PREFILL

    def __init__(self) -> None:
        super().__init__(PrefillInstances)

    def locate(self, bits: list[int], nodes: list[int]) -> None:
        self.instances.bit[:] = bits
        self.instances.node[:] = nodes

    def write_load(self, row: int, instance: Instance) -> None:
        load, columns = instance.load, self.instances
        cost = load.prefill_cost
        assert cost is not None
        columns.queue_ms[row] = load.queue_ms
        columns.fixed_ms[row] = cost.fixed_ms
        columns.per_token_ms[row] = cost.per_token_ms
        columns.per_pair_ms[row] = cost.per_pair_ms
        columns.slowest_share[row] = cost.slowest_share
        columns.ssd_read_ms_per_block[row] = load.ssd_read_us_per_block / 1000
        columns.slots_total[row] = load.slots_total

    def write_placed(self, row: int, instance: Instance) -> None:
        columns = self.instances
        columns.reported_at[row] = instance.changed_at
        columns.placed_ms[row] = sum(attempt.prefill_ms for attempt in instance.unreported.values()) if instance.unreported else 0.0


class DecodeColumns(InstanceColumns[DecodeInstances]):
    role = Role.DECODE

    def __init__(self) -> None:
        super().__init__(DecodeInstances)

    def locate(self, bits: list[int], nodes: list[int]) -> None:
        self.instances.bit[:] = bits

    def write_load(self, row: int, instance: Instance) -> None:
        load, columns = instance.load, self.instances
        cost = load.decode_cost
        assert cost is not None
        columns.max_batch[row] = load.max_batch
        columns.running[row] = load.running
        columns.fixed_ms[row] = cost.fixed_ms
        columns.per_sequence_ms[row] = cost.per_sequence_ms
        columns.per_context_token_ms[row] = cost.per_context_token_ms
        columns.slots_total[row] = load.slots_total

    def write_placed(self, row: int, instance: Instance) -> None:
        load, columns, arriving = instance.load, self.instances, instance.arriving
        columns.attempts[row] = load.running + len(arriving)
        columns.context_tokens[row] = load.tokens + sum(attempt.num_tokens for attempt in arriving.values()) if arriving else load.tokens
        columns.slots_free[row] = instance.slots_free()
        columns.inlining_ms[row] = instance.inlining_ms() if arriving else 0.0

    def step_ms(self) -> Floats:
        """[instances] what their steps are predicted to take, without what is in idle capacity; 0 where nothing runs."""
        columns = self.instances
        at_once = np.where(columns.max_batch > 0, np.minimum(columns.attempts, columns.max_batch), columns.attempts)
        predicted = columns.fixed_ms + columns.per_sequence_ms * at_once + columns.per_context_token_ms * columns.context_tokens
        return np.asarray(np.where(columns.attempts > 0, predicted, 0.0))
