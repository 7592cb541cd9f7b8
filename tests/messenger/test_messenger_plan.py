"""Batches on their way to the C part and to rdma: checked alike, and moved as their slices say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messenger.base import InvalidSlice, Slice
from messenger.batch import invalid_slice, native_batch
from messenger.rdma.plan import make_plan

GRANULE = 64


@st.composite
def batches(draw: st.DrawFn) -> list[Slice]:
    """Slices of 16 granules, many of them neighbours of the one before."""
    batch: list[Slice] = []
    for _ in range(draw(st.integers(0, 30))):
        last = batch[-1] if batch else None
        if last is not None and draw(st.booleans()) and (last.remote_offset + last.length) % GRANULE:
            remote, local = last.remote_offset + last.length, last.local_offset + last.length
        else:
            remote, local = draw(st.integers(0, 16 * GRANULE - 1)), draw(st.integers(0, 2000))
        length = draw(st.integers(1, GRANULE - remote % GRANULE))
        batch.append(Slice(local, remote, length, draw(st.integers(1, 2))))
    return batch


@given(batches(), st.integers(1, 80), st.integers(1, 100), st.integers(1, 5))
def test_a_plan_moves_the_same_bytes_as_its_slices(batch: list[Slice], max_piece: int, stripe_bytes: int, stripe_pieces: int) -> None:
    plan = make_plan(batch, 1 << 20, 16 * GRANULE, GRANULE, max_piece)
    wanted = [(s.local_offset + i, s.remote_offset + i, s.generation) for s in batch for i in range(s.length)]
    rows = zip(plan.local.tolist(), plan.remote.tolist(), plan.length.tolist(), plan.generation.tolist(), strict=True)
    assert [(local + i, remote + i, generation) for local, remote, length, generation in rows for i in range(length)] == wanted
    assert plan.num_bytes == len(wanted)
    assert all(1 <= length <= max_piece for length in plan.length.tolist())
    covered = [piece for stripe in plan.stripes(stripe_bytes, stripe_pieces) for piece in range(stripe.start, stripe.stop)]
    assert covered == list(range(plan.num_pieces))
    assert all(stripe.stop - stripe.start <= stripe_pieces for stripe in plan.stripes(stripe_bytes, stripe_pieces))


@given(batches(), st.integers(1, 80))
def test_exactly_the_slices_of_a_stale_granule_fail(batch: list[Slice], max_piece: int) -> None:
    plan = make_plan(batch, 1 << 20, 16 * GRANULE, GRANULE, max_piece)
    stale = (plan.granule == 3) & (plan.generation == 1)
    completion = plan.completion(stale)
    expected = {i for i, s in enumerate(batch) if s.remote_offset // GRANULE == 3 and s.generation == 1}
    assert set(completion.failed) == expected
    assert completion.num_bytes == sum(s.length for i, s in enumerate(batch) if i not in expected)


SIZE = 16 * GRANULE
NUMBERS = st.one_of(st.integers(-2, 2 * GRANULE), st.integers(SIZE - 2, SIZE + 2), st.sampled_from((2**63 - 1, 2**63, -(2**63) - 1, 2**70)))
GENERATIONS = st.sampled_from((0, 1, 2**64 - 1, 2**64, -1))


def refusal(make: Callable[[], object]) -> str | None:
    try:
        make()
    except InvalidSlice as error:
        return error.message
    return None


@given(st.lists(st.builds(Slice, NUMBERS, NUMBERS, NUMBERS, GENERATIONS), max_size=4))
def test_the_c_part_and_rdma_refuse_the_same_slices_for_the_same_reasons(batch: list[Slice]) -> None:
    refused = refusal(lambda: native_batch(batch, SIZE, SIZE, GRANULE))
    assert refusal(lambda: make_plan(batch, SIZE, SIZE, GRANULE, 10)) == refused
    if refused is None:
        with pytest.raises(AssertionError, match="no slice"):
            invalid_slice(batch, SIZE, SIZE, GRANULE)
    else:
        assert refused == invalid_slice(batch, SIZE, SIZE, GRANULE).message
