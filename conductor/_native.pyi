"""The C part of the Conductor (conductor/native/): what is worked out for all instances at once, the index's table, and what comes
twenty times a second from each.

Rows are those of a StructuredArray, whose fields are those of the struct of its name (native/structs.h). Any other array, or one that is
too short, is refused with TypeError or ValueError, which name it and what is wrong; a row that names a place that is none, with IndexError.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from conductor.core.types.arrays import Floats, Ints, Rows
from conductor.core.types.estimates import Asked, DecodeEstimates, PrefillEstimates
from springtide.ids import BlockKey

Table = Rows | memoryview
"""`rows` of a StructuredArray, or their `view`."""

BINS_PER_ROOT: float
"""Bins of `survival` grow with the square root of the length: an output of n tokens is in bin sqrt(n) * BINS_PER_ROOT, or the last one."""

def estimate_prefills(
    instances: Table,
    held: Ints,
    in_dram: Ints | None,
    links: Table,
    rates: Floats | None,
    factors: Floats | None,
    asked: Asked,
    into: PrefillEstimates,
    /,
) -> None:
    """Fills the columns of `into` from PrefillInstances: lines 4 to 20 of Algorithm 1 (arXiv 2407.00079, section 6).

    `held` and `in_dram` [bits of the index] are the blocks that each store holds in all and in DRAM (None: the same), `links` the LinkEnds
    of the nodes, `rates` [nodes] the measured bytes a second from the source (NaN or None: not measured), `factors` those of
    `queue_factors` by which the work ahead is multiplied (None: it is all waited for).

    The paper always fetches when the threshold says so; here, what is computed sooner is computed.
    """

def prompts_ms(instances: Table, into: Floats, *, num_tokens: int, cached_tokens: int, chunk_tokens: int, chunk_ms: float) -> None:
    """Fills `into` with the time that a prompt takes at each of PrefillInstances. Of its `num_tokens`, the first `cached_tokens` need not
    be computed. `chunk_tokens` and `chunk_ms` are those of Chunking, 0 for None."""

def estimate_decodes(instances: Table, held: Ints, num_tokens: int, into: DecodeEstimates, /) -> None:
    """Fills the columns of `into` from DecodeInstances, for one more attempt of `num_tokens`. `held` as above. Attempts beyond the largest
    batch wait for a place in it."""

def queue_class(ms: float, classes: int, /) -> int:
    """The class of so much work: powers of two of a millisecond, below one the first, and beyond the last that one."""

def queue_factors(own_ms: Floats, ahead_ms: Floats, factors: Floats, into: Floats, /) -> None:
    """Fills `into` with those of the `factors` [classes, classes] that are of the `queue_class` of own work and of that of the work
    ahead."""

def best_row(rows: Ints, order: str, /, *columns: Ints | Floats) -> int:
    """The one of `rows`, of which there is at least one, that is best in the first column; of equals the one that is best in the second,
    and so on; of equals the first. `order` has a character for each column: `<` where the least is best, `>` where the greatest is. A NaN
    is no less and no more than anything."""

def rows_from(column: Ints, least: int, into: Ints, /) -> int:
    """Fills `into` with the rows whose value in `column` is at least `least`, and returns how many there are."""

def roomy_rows(rows: Ints, batch: Ints, max_batch: Ints, slots_free: Ints, least_free: int, into: Ints, /) -> int:
    """Fills `into` with the ones of `rows` that have a place in their batch, and at least so many free slots; returns how many there are.
    The columns are those of DecodeEstimates."""

def least_busy(mask: bytes, node_of_bit: Ints, links: Table, most: int, /) -> list[int]:
    """So many of the bits that are set in `mask`, the lowest first, at most 64: those first from whose node (number, by the bit) fewer
    transfers leave, of equals the lower ones. `links` are LinkEnds."""

def spread(column: Ints, value: int, mask: bytes, /) -> None:
    """Writes `value` into those places of `column` whose bit is set in `mask`, the lowest bit first."""

def expect_batches(instances: Table, attempts: Table, survival: Floats, into: Table, *, now: float, at: float, joining: bool) -> None:
    """Fills `into`, rows of ExpectedBatches, with what each of the ForecastInstances is expected to have in its batch at `at` (s, not
    before `now`), by the ForecastAttempts. Without `joining`, of those only that are in it now.

    `survival` [laws, bins]: the share of outputs under each law that are longer than a bin's edge.
    """

def step_times_ms(instances: Table, batches: Table, /) -> list[float]:
    """Time between tokens of each of the ForecastInstances, by the ExpectedBatches; of an empty one, 0."""

class PoolOutlook(NamedTuple):
    """Times between tokens of the pool once one more attempt has joined."""

    expected_ms: float
    """Of the instance that it joins."""
    mean_ms: float
    """Over the instances that are ready; a standard deviation above what is expected, as half of the requests would miss an objective that
    is expected to be just met."""
    idle_mean_ms: float
    """The same with nobody else there."""

def look_at_pool(instances: Table, batches: Table, *, place: int, num_tokens: int) -> PoolOutlook:
    """The outlook of the ExpectedBatches, once an attempt of `num_tokens` has joined the instance at `place`."""

class InstanceOutlook(NamedTuple):
    """Times between tokens of one instance once one more attempt has joined."""

    first_ms: float
    """Expected at the first moment."""
    worst_ms: float
    """The greatest, as in `PoolOutlook.mean_ms`."""

def look_at_instance(
    instances: Table, attempts: Table, survival: Floats, moments: Floats, *, place: int, num_tokens: int, now: float
) -> InstanceOutlook:
    """The outlook of the instance at `place` at the `moments` (s, not before `now`), at least one, once an attempt of `num_tokens` has
    joined it."""

Share = Callable[[int], int]
"""Holders -> the int that stands for them in the table."""

class HolderTable:
    """Block key -> holders, which are a non-zero int, a bit each; a block without any is not in the table."""

    def __new__(cls) -> HolderTable: ...
    def __len__(self) -> int: ...
    def get(self, key: BlockKey, /) -> int:
        """0 when it is not in the table."""

    def items(self) -> list[tuple[BlockKey, int]]: ...
    def add(self, keys: Sequence[BlockKey], mask: int, share: Share, /) -> int:
        """Sets the bit of `mask` in the holders of each. Returns of how many it was not set."""

    def discard(self, keys: Sequence[BlockKey], mask: int, share: Share, /) -> int:
        """Clears the bit of `mask` in the holders of each. Returns of how many it was set."""

    def sweep(self, first: int, count: int, mask: int, share: Share, /) -> tuple[int, int]:
        """Clears the bits of `mask` at `count` places of the table, from place `first` on. Returns the place to go on at, 0 at the end of
        the table, and how many bits were cleared. What is added, or has its place changed by what is discarded, between two calls may
        be passed over: when bits are left, go over the table again."""

def match_ends(dram: HolderTable, ssd: HolderTable | None, keys: Sequence[BlockKey], live: int, /) -> list[tuple[int, int]]:
    """Pairs of a number of the first `keys` and those who hold exactly so many, a bit each, the longest first: everybody of `live` who
    holds any of them in one of the tables, once. It looks at few of the keys: conductor/core/prefix_index.py says how."""

def split_frames(received: bytearray, largest: int, /) -> tuple[list[tuple[int, int, int, bytes]], int]:
    """The whole frames of HTTP/2 (RFC 9113, section 4.1) that `received` begins with, each as its kind, flags, stream and payload, and how
    many bytes they are. Raises ConnectionError for a payload of more than `largest` bytes."""

def split_messages(received: bytearray, largest: int, /) -> tuple[list[bytes], int]:
    """The whole messages that `received` begins with, as gRPC frames them, and how many bytes they are. Raises ConnectionError for one that
    is compressed or of more than `largest` bytes."""
