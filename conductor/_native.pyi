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

BINS_PER_ROOT: float
"""Bins of `survival` grow with the square root of the length: an output of n tokens is in bin sqrt(n) * BINS_PER_ROOT, or the last one."""

def estimate_prefills(
    instances: Rows, held: Ints, in_dram: Ints | None, links: Rows, rates: Floats | None, asked: Asked, into: PrefillEstimates, /
) -> None:
    """Fills the columns of `into`, all but `ttft_ms`, from PrefillInstances: lines 4 to 20 of Algorithm 1 (arXiv 2407.00079, section 6).

    `held` and `in_dram` [bits of the index] are the blocks that each store holds in all and in DRAM (None: the same), `links` the LinkEnds
    of the nodes, `rates` [nodes] the measured bytes a second from the source (NaN or None: not measured).

    The paper always fetches when the threshold says so; here, what is computed sooner is computed.
    """

def prompts_ms(instances: Rows, into: Floats, *, num_tokens: int, cached_tokens: int, chunk_tokens: int, chunk_ms: float) -> None:
    """Fills `into` with the time that a prompt takes at each of PrefillInstances. Of its `num_tokens`, the first `cached_tokens` need not
    be computed. `chunk_tokens` and `chunk_ms` are those of Chunking, 0 for None."""

def estimate_decodes(instances: Rows, held: Ints, num_tokens: int, into: DecodeEstimates, /) -> None:
    """Fills the columns of `into` from DecodeInstances, for one more attempt of `num_tokens`. `held` as above. Attempts beyond the largest
    batch wait for a place in it."""

def queue_class(ms: float, classes: int, /) -> int:
    """The class of so much work: powers of two of a millisecond, below one the first, and beyond the last that one."""

def queue_factors(own_ms: Floats, ahead_ms: Floats, factors: Floats, into: Floats, /) -> None:
    """Fills `into` with those of the `factors` [classes, classes] that are of the `queue_class` of own work and of that of the work
    ahead."""

def least_rows(rows: Ints, column: Ints | Floats, into: Ints, /) -> int:
    """Fills `into` with the ones of `rows`, in their order, that are least in the column, and returns how many there are.
    A NaN is no less and no more than anything."""

def most_rows(rows: Ints, column: Ints | Floats, into: Ints, /) -> int:
    """The same with those that are greatest."""

def spread(column: Ints, value: int, mask: bytes, /) -> None:
    """Writes `value` into those places of `column` whose bit is set in `mask`, the lowest bit first."""

def expect_batches(instances: Rows, attempts: Rows, survival: Floats, into: Rows, *, now: float, at: float, joining: bool) -> None:
    """Fills `into`, rows of ExpectedBatches, with what each of the ForecastInstances is expected to have in its batch at `at` (s, not
    before `now`), by the ForecastAttempts. Without `joining`, of those only that are in it now.

    `survival` [laws, bins]: the share of outputs under each law that are longer than a bin's edge.
    """

def step_times_ms(instances: Rows, batches: Rows, /) -> list[float]:
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

def look_at_pool(instances: Rows, batches: Rows, *, place: int, num_tokens: int) -> PoolOutlook:
    """The outlook of the ExpectedBatches, once an attempt of `num_tokens` has joined the instance at `place`."""

class InstanceOutlook(NamedTuple):
    """Times between tokens of one instance once one more attempt has joined."""

    first_ms: float
    """Expected at the first moment."""
    worst_ms: float
    """The greatest, as in `PoolOutlook.mean_ms`."""

def look_at_instance(
    instances: Rows, attempts: Rows, survival: Floats, moments: Floats, *, place: int, num_tokens: int, now: float
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

def split_frames(received: bytearray, largest: int, /) -> tuple[list[tuple[int, int, int, bytes]], int]:
    """The whole frames of HTTP/2 (RFC 9113, section 4.1) that `received` begins with, each as its kind, flags, stream and payload, and how
    many bytes they are. Raises ConnectionError for a payload of more than `largest` bytes."""

def split_messages(received: bytearray, largest: int, /) -> tuple[list[bytes], int]:
    """The whole messages that `received` begins with, as gRPC frames them, and how many bytes they are. Raises ConnectionError for one that
    is compressed or of more than `largest` bytes."""
