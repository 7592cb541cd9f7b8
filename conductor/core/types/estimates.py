"""What a request may expect of every instance, as columns.

One row an instance, one numpy array a figure: estimating and choosing are then a few operations on whole columns, however many instances
there are. As sequences they yield a row as a named tuple, made when somebody looks at it: a log line, the reply's debug field, a test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Self, TypeVar, overload

import numpy as np

from conductor.core.types.arrays import Bools, Floats, Ints
from springtide.ids import InstanceId, NodeId

Branch = Literal["cache-aware", "fetch", "recompute", "await"]
"""Of Algorithm 1: `cache-aware` uses the node's own prefix, for the best one is not much longer; else the rest is fetched, or computed
where that is predicted to be quicker. Beyond it, `await`: what another prompt will have computed there counts as the node's own."""
BRANCHES: tuple[Branch, ...] = ("cache-aware", "fetch", "recompute", "await")
FETCH = BRANCHES.index("fetch")
RECOMPUTE = BRANCHES.index("recompute")
AWAIT = BRANCHES.index("await")


class Asked(NamedTuple):
    """What a prompt's estimates depend on beside the instances."""

    now: float
    num_tokens: int
    block_tokens: int
    chunk_tokens: int
    chunk_ms: float
    """As of Chunking, 0 for None."""
    most_reused: int
    """Blocks: the last token is always computed."""
    best: int
    """Blocks of the longest match, at most `most_reused`."""
    source: int
    """Number of the node that would be fetched from; -1 for none."""
    threshold: float
    """`kvcache_balancing_threshold`"""
    bytes_per_block: int
    assumed_bytes_per_s: float
    """Of links that were not measured."""


class PrefillEstimate(NamedTuple):
    """What the request may expect of one prefill instance. Milliseconds."""

    instance_id: InstanceId
    local_blocks: int
    source_id: NodeId | None
    source_blocks: int
    """The first blocks of the prompt that lie at the source, the local ones included; 0 without a source."""
    queue_ms: float
    transfer_ms: float
    prefill_ms: float
    saved_ms: float
    """By which computing would take longer, were nothing fetched; 0 without a source."""
    slots_total: int
    branch: Branch

    @property
    def ttft_ms(self) -> float:
        return self.queue_ms + self.transfer_ms + self.prefill_ms


class DecodeEstimate(NamedTuple):
    """What the request may expect of one decode node, everything already promised to it included."""

    instance_id: InstanceId
    prefix_blocks: int
    tbt_ms: float
    batch: int
    """Attempts in its batch with this one."""
    running: int
    """Of them those that were running when it reported."""
    slots_free: int
    """Without this request's; negative when more is promised than there is."""
    slots_total: int
    max_batch: int
    """0: not limited."""
    wait_ms: float = 0.0
    """Until there is room for it, where there is none now."""


_Row = TypeVar("_Row", PrefillEstimate, DecodeEstimate, covariant=True)


class _Estimates(Sequence[_Row]):
    """Base of both: the dataclass fields of a subclass are its columns, unfilled until they are estimated and not to be written then."""

    instance_ids: tuple[InstanceId, ...]

    def row(self, index: int) -> _Row:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.instance_ids)

    @overload
    def __getitem__(self, index: int) -> _Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_Row]: ...
    def __getitem__(self, index: int | slice) -> _Row | Sequence[_Row]:
        if isinstance(index, slice):
            return [self.row(row) for row in range(*index.indices(len(self)))]
        return self.row(range(len(self))[index])

    def __iter__(self) -> Iterator[_Row]:
        return map(self.row, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def picked(self, rows: Ints) -> Self:
        """The same of these rows alone."""
        columns = {column.name: getattr(self, column.name) for column in fields(self)}  # type: ignore[arg-type]
        chosen = {name: column[rows] for name, column in columns.items() if isinstance(column, np.ndarray)}
        return type(self)(**{**columns, **chosen, "instance_ids": tuple(self.instance_ids[row] for row in rows.tolist())})

    def replace(self, rows: Ints, others: Self) -> None:
        """Takes these rows' figures from `others`, which are of the same instances."""
        for column in fields(self):  # type: ignore[arg-type]
            figures = getattr(self, column.name)
            if isinstance(figures, np.ndarray):
                figures[rows] = getattr(others, column.name)[rows]

    def plain(self) -> dict[str, Any]:
        """The columns as what JSON has, from which `of_plain` makes them again, digit for digit."""
        columns = {column.name: getattr(self, column.name) for column in fields(self)}  # type: ignore[arg-type]
        return {name: column.tolist() if isinstance(column, np.ndarray) else column for name, column in columns.items()}

    @classmethod
    def of_plain(cls, columns: Mapping[str, Any]) -> Self:
        numbers = {"Ints": np.int64, "Floats": np.float64}
        types = {column.name: numbers.get(str(column.type)) for column in fields(cls)}  # type: ignore[arg-type]
        values = {name: columns[name] if kind is None else np.array(columns[name], kind) for name, kind in types.items()}
        return cls(**{**values, "instance_ids": tuple(columns["instance_ids"])})


@dataclass(slots=True, eq=False)
class PrefillEstimates(_Estimates[PrefillEstimate]):
    """Columns of PrefillEstimate. Whoever fetches does so from one source, which has `source_blocks` of the prompt."""

    instance_ids: tuple[InstanceId, ...]
    source_id: NodeId | None
    source_blocks: int
    local_blocks: Ints
    queue_ms: Floats
    transfer_ms: Floats
    prefill_ms: Floats
    ttft_ms: Floats
    saved_ms: Floats
    slots_total: Ints
    branch: Ints
    """Index into BRANCHES."""
    twin: Ints
    """Of an instance that decodes, too: its row among the decode estimates; -1 of others."""

    @classmethod
    def unfilled(cls, instance_ids: tuple[InstanceId, ...], source_id: NodeId | None, source_blocks: int, twin: Ints | None = None) -> Self:
        """Estimates with columns that are still to be filled, all but `twin`; None: nobody has one."""
        count = len(instance_ids)
        return cls(
            instance_ids=instance_ids,
            source_id=source_id,
            source_blocks=source_blocks,
            local_blocks=np.empty(count, np.int64),
            queue_ms=np.empty(count),
            transfer_ms=np.empty(count),
            prefill_ms=np.empty(count),
            ttft_ms=np.empty(count),
            saved_ms=np.empty(count),
            slots_total=np.empty(count, np.int64),
            branch=np.empty(count, np.int64),
            twin=np.full(count, -1, np.int64) if twin is None else twin,
        )

    def row(self, index: int) -> PrefillEstimate:
        branch = self.branch.item(index)
        return PrefillEstimate(
            self.instance_ids[index],
            self.local_blocks.item(index),
            self.source_id if branch == FETCH else None,
            self.source_blocks if branch == FETCH else 0,
            self.queue_ms.item(index),
            self.transfer_ms.item(index),
            self.prefill_ms.item(index),
            self.saved_ms.item(index),
            self.slots_total.item(index),
            BRANCHES[branch],
        )


@dataclass(slots=True, eq=False)
class DecodeEstimates(_Estimates[DecodeEstimate]):
    """Columns of DecodeEstimate."""

    instance_ids: tuple[InstanceId, ...]
    prefix_blocks: Ints
    tbt_ms: Floats
    batch: Ints
    running: Ints
    slots_free: Ints
    slots_total: Ints
    max_batch: Ints

    @classmethod
    def unfilled(cls, instance_ids: tuple[InstanceId, ...]) -> Self:
        """Estimates with columns that are still to be filled."""
        count = len(instance_ids)
        return cls(
            instance_ids=instance_ids,
            prefix_blocks=np.empty(count, np.int64),
            tbt_ms=np.empty(count),
            batch=np.empty(count, np.int64),
            running=np.empty(count, np.int64),
            slots_free=np.empty(count, np.int64),
            slots_total=np.empty(count, np.int64),
            max_batch=np.empty(count, np.int64),
        )

    def place_in_batch(self) -> Bools:
        """[rows] whether the attempt has one there."""
        return (self.max_batch <= 0) | (self.batch <= self.max_batch)

    def row(self, index: int) -> DecodeEstimate:
        return DecodeEstimate(
            self.instance_ids[index],
            self.prefix_blocks.item(index),
            self.tbt_ms.item(index),
            self.batch.item(index),
            self.running.item(index),
            self.slots_free.item(index),
            self.slots_total.item(index),
            self.max_batch.item(index),
        )


@dataclass(slots=True, eq=False)
class OthersEstimates:
    """What those that are not in idle capacity come to at each instance, for a request that is: columns beside those of its estimates,
    which count all."""

    queue_ms: Floats
    """[prefill instances]"""
    step_ms: Floats
    """[decode instances] of them alone; 0 where there are none."""

    def plain(self) -> dict[str, Any]:
        """The columns as what JSON has, from which `of_plain` makes them again."""
        return {column.name: getattr(self, column.name).tolist() for column in fields(self)}

    @classmethod
    def of_plain(cls, columns: Mapping[str, Any]) -> Self:
        return cls(**{name: np.array(column, np.float64) for name, column in columns.items()})


class InlineEstimate(NamedTuple):
    """What the request may expect of one decode node that computes its prompt. Milliseconds."""

    row: int
    """Of the node among the decode estimates."""
    instance_id: InstanceId
    prefix_blocks: int
    """In its store's DRAM; SSDs are not waited for."""
    new_tokens: int
    wait_ms: float
    step_ms: float
    """Of the step with the prompt's rest in it."""

    @property
    def ttft_ms(self) -> float:
        return self.wait_ms + self.step_ms

    def as_prefill(self, slots_total: int) -> PrefillEstimate:
        """The decode node in the place of the prefill side."""
        return PrefillEstimate(
            self.instance_id,
            self.prefix_blocks,
            None,
            0,
            self.wait_ms,
            0.0,
            self.step_ms,
            0.0,
            slots_total=slots_total,
            branch="cache-aware",
        )
