"""The C part of the Conductor beside its twins in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conductor_support import keys_of
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.core.kernels import plain_estimating, plain_forecasting, plain_table
from conductor.core.kernels.plain_estimating import Asked
from conductor.core.types.estimates import Ints
from springtide.chunking import Chunking
from springtide.cost import PrefillCost

native = pytest.importorskip("conductor._native", reason="it takes a C compiler")

KEYS = keys_of(300)
MASKS = [1 << bit for bit in (0, 1, 2, 30, 31, 62, 63, 64, 999)]
operations = st.lists(
    st.tuples(st.sampled_from(["add", "discard", "sweep"]), st.integers(0, 299), st.integers(1, 120), st.sampled_from(MASKS)), max_size=40
)


def swept(table: Any, mask: int, step: int) -> int:
    """Bits that a whole sweep clears, once over and again until nothing is left."""
    cleared = 0
    while any(holders & mask for _, holders in table.items()):
        place, bits = table.sweep(0, step, mask, int)
        cleared += bits
        while place:
            place, bits = table.sweep(place, step, mask, int)
            cleared += bits
    return cleared


@given(operations)
@settings(max_examples=150, deadline=None)
def test_both_tables_hold_the_same_after_the_same(steps: list[tuple[str, int, int, int]]) -> None:
    compact, plain = native.HolderTable(), plain_table.HolderTable()
    for operation, first, count, mask in steps:
        if operation == "sweep":
            assert swept(compact, mask | 2, count) == swept(plain, mask | 2, count)
        else:
            keys = KEYS[first : first + count]
            assert getattr(compact, operation)(keys, mask, int) == getattr(plain, operation)(keys, mask, int)
        assert len(compact) == len(plain)
        assert sorted(compact.items()) == sorted(plain.items())
    assert [compact.get(key) for key in KEYS] == [plain.get(key) for key in KEYS]


def test_keys_that_begin_alike_are_told_apart() -> None:
    table = native.HolderTable()
    keys = [bytes(8) + number.to_bytes(8, "little") for number in range(1000)] + [
        number.to_bytes(8, "little") * 2 for number in range(1, 500)
    ]
    assert table.add(keys, 1, int) == 1499
    assert table.discard(keys[::2], 1, int) == 750
    assert [table.get(key) for key in keys] == [0, 1] * 749 + [0]


@pytest.mark.parametrize("keys", [[b"short"], ["text"], [None], [b"x" * 17]])
def test_what_is_no_key_is_refused(keys: list[Any]) -> None:
    table = native.HolderTable()
    table.add(KEYS[:1], 1, int)
    for tell in (table.add, table.discard):
        with pytest.raises(TypeError, match="16 bytes"):
            tell(keys, 1, int)


def test_a_failing_share_leaves_the_table_whole() -> None:
    table = native.HolderTable()
    table.add(KEYS, 1, int)
    with pytest.raises(ZeroDivisionError):
        table.add(KEYS, 2, lambda holders: holders // 0)
    assert {holders for _, holders in table.items()} == {1}


def prefill_table(chance: np.random.Generator, rows: int) -> np.ndarray:
    """Of some instances parts of the cost are 0, of some it is that of one stage."""
    scale = np.array([[300.0], [10.0], [100.0], [5.0], [1.0], [1e-4], [1.0], [20.0], [1e6]])
    table = chance.random((9, rows)) * scale
    table[3:6][chance.random((3, rows)) < 0.1] = 0.0
    table[6][chance.random(rows) < 0.5] = 1.0
    return table


@given(st.integers(0, 2**32), st.integers(0, 40), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_both_estimate_to_the_same_digit(seed: int, rows: int, with_source: bool, with_ssd: bool, measured: bool) -> None:
    chance = np.random.default_rng(seed)
    num_bits, num_nodes = 64, 80
    table = prefill_table(chance, rows)
    held = chance.integers(0, 100, num_bits)
    in_dram = np.minimum(held, chance.integers(0, 100, num_bits)) if with_ssd else None
    rates = np.where(chance.random(num_nodes) < 0.5, np.nan, chance.random(num_nodes) * 1e6) if measured else None
    num_tokens = int(chance.choice([chance.integers(1, 7000), chance.integers(1, 200_000)]))
    most = (num_tokens - 1) // 64
    best = min(most, int(held.max()))
    asked = Asked(
        now=float(chance.random() * 20),
        num_tokens=num_tokens,
        block_tokens=64,
        chunk_tokens=int(chance.choice([1, 100, 512])),
        chunk_ms=float(chance.choice([0.0, 2.0, 300.0])),
        most_reused=most,
        best=best,
        source=int(chance.integers(num_nodes)) if with_source and best else -1,
        threshold=float(chance.choice([1.0, 1.5, 8.0])),
        bytes_per_block=6400,
        assumed_bytes_per_s=1e6,
    )
    links: tuple[Ints, Ints, Ints] = (
        chance.integers(0, num_nodes, rows),
        chance.integers(0, 3, num_nodes),
        chance.integers(0, 3, num_nodes),
    )
    results = []
    for prefill in (plain_estimating.prefill, native.prefill):
        floats, ints = np.empty((5, rows)), np.empty((3, rows), np.int64)
        prefill(table, np.arange(rows), held, in_dram, *links, rates, floats, ints, asked)
        results.append((floats.tolist(), ints.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("prefill", [plain_estimating.prefill, native.prefill])
@given(seed=st.integers(0, 2**32), chunk_tokens=st.sampled_from([1, 100, 512, 2048]), chunk_ms=st.sampled_from([None, 2.0, 300.0]))
@settings(max_examples=200, deadline=None)
def test_prefills_are_estimated_to_the_digit_as_prefill_nodes_cut_them(
    prefill: Any, seed: int, chunk_tokens: int, chunk_ms: float | None
) -> None:
    chance, rows = np.random.default_rng(seed), 20
    table, held = prefill_table(chance, rows), chance.integers(0, 2000, rows)
    num_tokens = int(chance.integers(1, 200_000))
    most = (num_tokens - 1) // 64
    floats, ints, none = np.empty((5, rows)), np.empty((3, rows), np.int64), np.zeros(rows, np.int64)
    asked = Asked(0.0, num_tokens, 64, chunk_tokens, chunk_ms or 0.0, most, 0, -1, 1.0, 6400, 1e6)
    prefill(table, np.arange(rows), held, None, none, none, none, None, floats, ints, asked)
    for row in range(rows):
        chunking = Chunking(PrefillCost(*table[3:7, row].tolist()), chunk_tokens, chunk_ms)
        cached = 64 * min(int(held[row]), most)
        assert floats[2, row] == chunking.prompt_ms(num_tokens - cached, cached)


@given(st.integers(0, 2**32), st.integers(0, 40))
def test_both_predict_the_same_time_between_tokens(seed: int, rows: int) -> None:
    chance = np.random.default_rng(seed)
    table = np.floor(chance.random((8, rows)) * np.array([[100.0], [1e6], [64.0], [50.0], [9.0], [9.0], [2000.0], [3000.0]])) - 100.0 * (
        np.arange(8)[:, None] == 6
    )
    table[3:6] *= chance.random((3, rows))
    results = []
    for decode in (plain_estimating.decode, native.decode):
        floats, ints = np.empty((1, rows)), np.empty((5, rows), np.int64)
        decode(table, np.arange(rows), np.arange(rows) * 3, floats, ints, 777)
        results.append((floats.tolist(), ints.tolist()))
    assert results[0] == results[1]


@given(st.integers(0, 2**32), st.integers(1, 20), st.integers(0, 40), st.booleans())
@settings(deadline=None)
def test_both_look_ahead_to_the_same_digit(seed: int, num_instances: int, count: int, joining: bool) -> None:
    chance = np.random.default_rng(seed)
    instances = chance.random((plain_forecasting.INSTANCE_FIGURES, num_instances)) * np.array(
        [[1.0], [9.0], [9e3], [50.0], [5.0], [0.01], [64.0], [0.1], [500.0], [90.0], [9.0]]
    )
    instances[plain_forecasting.READY] = instances[plain_forecasting.READY].round()
    attempts = chance.random((plain_forecasting.ATTEMPT_FIGURES, 64)) * np.array([[200.0], [500.0], [9e3], [500.0], [1.0]])
    attempts[plain_forecasting.IN_PREFILL] = attempts[plain_forecasting.IN_PREFILL].round()
    places, laws = chance.integers(0, num_instances, 64), chance.integers(0, 3, 64)
    survival = 0.001 + np.sort(chance.random((3, 100)))[:, ::-1].copy()
    at = 100.0 + chance.random() * 50
    results = []
    for twin in (plain_forecasting, native):
        batches = np.full((plain_forecasting.BATCH_FIGURES, num_instances), np.nan)
        twin.pool(instances, attempts, places, laws, survival, batches, count, 100.0, at, joining)
        results.append((batches.tolist(), twin.with_one_more(instances, batches, num_instances - 1, 777)))
    assert results[0] == results[1]


@given(st.integers(1, 2**200), st.integers(0, 100))
def test_both_spread_a_value_over_the_same_places(mask: int, value: int) -> None:
    columns = [np.zeros(200, np.int64), np.zeros(200, np.int64)]
    for column, spread in zip(columns, (plain_estimating.spread, native.spread), strict=True):
        spread(column, value, (mask >> 1).to_bytes(25, "little"))
    assert columns[0].tolist() == columns[1].tolist()


def test_rows_that_name_what_is_not_there_are_refused() -> None:
    one = np.zeros(1, np.int64)
    with pytest.raises(IndexError):
        native.decode(np.zeros((8, 1)), one + 5, one, np.empty((1, 1)), np.empty((5, 1), np.int64), 1)
    with pytest.raises(ValueError, match="wanted"):
        native.decode(np.zeros((8, 1)), one, one, np.empty((1, 1)), np.empty((3, 1), np.int64), 1)


ONE = np.zeros(1, np.int64)
CALLS: dict[str, tuple[Any, dict[str, Any], tuple[Any, ...]]] = {
    "prefill": (
        native.prefill,
        {
            "table": np.ones((9, 1)),
            "bits": ONE,
            "held": ONE,
            "in_dram": ONE,
            "nodes": ONE,
            "leaving": ONE,
            "arriving": ONE,
            "rates": np.ones(1),
            "floats": np.empty((5, 1)),
            "ints": np.empty((3, 1), np.int64),
        },
        (Asked(0.0, 100, 64, 512, 0.0, 1, 0, -1, 1.0, 6400, 1e6),),
    ),
    "decode": (
        native.decode,
        {"table": np.ones((8, 1)), "bits": ONE, "held": ONE, "floats": np.empty((1, 1)), "ints": np.empty((5, 1), np.int64)},
        (7,),
    ),
    "spread": (native.spread, {"column": np.zeros(8, np.int64)}, (1, b"\x01")),
    "pool": (
        native.pool,
        {
            "instances": np.ones((plain_forecasting.INSTANCE_FIGURES, 1)),
            "attempts": np.ones((plain_forecasting.ATTEMPT_FIGURES, 1)),
            "places": ONE,
            "laws": ONE,
            "survival": np.ones((1, 4)),
            "batches": np.empty((plain_forecasting.BATCH_FIGURES, 1)),
        },
        (1, 0.0, 1.0, True),
    ),
    "with_one_more": (
        native.with_one_more,
        {"instances": np.ones((plain_forecasting.INSTANCE_FIGURES, 1)), "batches": np.ones((plain_forecasting.BATCH_FIGURES, 1))},
        (0, 10),
    ),
}


@pytest.mark.parametrize(("function", "name"), [(function, name) for function, (_, arrays, _) in CALLS.items() for name in arrays])
@pytest.mark.parametrize("dtype", ["f8", "i8", "u8", "f4", "i4", ">f8", ">i8", "S8", "c8"])
def test_arrays_are_taken_by_the_type_of_their_items_not_by_their_size(function: str, name: str, dtype: str) -> None:
    call, arrays, others = CALLS[function]
    call(*arrays.values(), *others)
    wrong = np.zeros(arrays[name].shape, dtype)
    if wrong.dtype != arrays[name].dtype:
        with pytest.raises(TypeError, match=f"^{name} must be an array of"):
            call(*{**arrays, name: wrong}.values(), *others)
    with pytest.raises(TypeError, match=f"^{name} must be an array of .*, not list"):
        call(*{**arrays, name: [0]}.values(), *others)


def test_a_column_lies_in_one_piece_that_can_be_written() -> None:
    column = np.zeros(16, np.int64)
    with pytest.raises(ValueError, match=r"^column must lie in one piece"):
        native.spread(column[::2], 1, b"\x01")
    column.flags.writeable = False
    with pytest.raises(ValueError, match=r"^column must be writable"):
        native.spread(column, 1, b"\x01")


def test_a_mask_is_bytes() -> None:
    with pytest.raises(TypeError, match=r"^mask must be bytes, not"):
        native.spread(np.zeros(64, np.int64), 1, np.ones(1, np.float32))


def test_looking_ahead_over_what_is_not_there_is_refused() -> None:
    instances = np.ones((plain_forecasting.INSTANCE_FIGURES, 2))
    attempts, batches = np.ones((plain_forecasting.ATTEMPT_FIGURES, 1)), np.empty((plain_forecasting.BATCH_FIGURES, 2))
    first, survival = np.zeros(1, np.int64), np.ones((1, 4))
    for places, laws, shares, error in (
        (first + 2, first, survival, IndexError),
        (first, first - 1, survival, IndexError),
        (first, first, np.ones((1, 0)), ValueError),
        (first, first, np.ones(4), ValueError),
    ):
        with pytest.raises(error):
            native.pool(instances, attempts, places, laws, shares, batches, 1, 0.0, 1.0, True)
    with pytest.raises(IndexError):
        native.with_one_more(instances, batches, 2, 1)
