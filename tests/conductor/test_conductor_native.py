"""The C part of the Conductor beside its oracles; and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from conductor_oracles import estimates, forecast, holders
from conductor_support import keys_of
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor import _native
from conductor._native import HolderTable
from conductor.core.forecast.decode_forecast import ExpectedBatches, ForecastAttempts, ForecastInstances
from conductor.core.placement.instance_columns import DecodeInstances, PrefillInstances
from conductor.core.placement.transfer import LinkEnds
from conductor.core.types.arrays import Rows
from conductor.core.types.estimates import Asked, DecodeEstimates, PrefillEstimates
from springtide.chunking import Chunking
from springtide.cost import PrefillCost
from springtide.ids import InstanceId

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


# ---- the index's table ----


@given(operations)
@settings(max_examples=150, deadline=None)
def test_the_table_holds_what_a_dict_does_after_the_same(steps: list[tuple[str, int, int, int]]) -> None:
    compact, plain = HolderTable(), holders.HolderTable()
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
    table = HolderTable()
    keys = [bytes(8) + number.to_bytes(8, "little") for number in range(1000)] + [
        number.to_bytes(8, "little") * 2 for number in range(1, 500)
    ]
    assert table.add(keys, 1, int) == 1499
    assert table.discard(keys[::2], 1, int) == 750
    assert [table.get(key) for key in keys] == [0, 1] * 749 + [0]


def test_a_table_that_grows_in_parts_holds_all() -> None:
    compact, plain = HolderTable(), holders.HolderTable()
    keys = keys_of(50_000)
    for first in range(0, len(keys), 1000):
        for table in (compact, plain):
            table.add(keys[first : first + 1000], 1 << first % 3, int)
            table.discard(keys[first // 2 : first // 2 + 700], 1, int)
    assert len(compact) == len(plain) == len(compact.items())
    assert dict(compact.items()) == dict(plain.items())
    assert [compact.get(key) for key in keys] == [plain.get(key) for key in keys]
    assert swept(compact, 7, 1000) == swept(plain, 7, 1000) > 0
    assert len(compact) == 0


@pytest.mark.parametrize("keys", [[b"short"], ["text"], [None], [b"x" * 17]])
def test_what_is_no_key_is_refused(keys: list[Any]) -> None:
    table = HolderTable()
    table.add(KEYS[:1], 1, int)
    for tell in (table.add, table.discard):
        with pytest.raises(TypeError, match="16 bytes"):
            tell(keys, 1, int)


def test_a_failing_share_leaves_the_table_whole() -> None:
    table = HolderTable()
    table.add(KEYS, 1, int)
    with pytest.raises(ZeroDivisionError):
        table.add(KEYS, 2, lambda holders: holders // 0)
    assert {holders for _, holders in table.items()} == {1}


# ---- estimates ----

BY_NUMPY_AND_C: tuple[Any, Any] = (estimates, _native)


def names(count: int) -> tuple[InstanceId, ...]:
    return tuple(InstanceId(f"i{number}") for number in range(count))


def prefill_instances(chance: np.random.Generator, count: int) -> PrefillInstances:
    """Of some, parts of the cost are 0; of some it is that of one stage."""
    instances = PrefillInstances.zeros(count)
    instances.bit[:] = np.arange(count)
    instances.queue_ms[:], instances.reported_at[:], instances.placed_ms[:] = chance.random((3, count)) * [[300.0], [10.0], [100.0]]
    for cost, scale in ((instances.fixed_ms, 5.0), (instances.per_token_ms, 1.0), (instances.per_pair_ms, 1e-4)):
        cost[:] = np.where(chance.random(count) < 0.1, 0.0, chance.random(count) * scale)
    instances.slowest_share[:] = np.where(chance.random(count) < 0.5, 1.0, chance.random(count))
    instances.ssd_read_ms_per_block[:] = chance.random(count) * 20.0
    instances.slots_total[:] = chance.integers(0, 1_000_000, count)
    return instances


@given(st.integers(0, 2**32), st.integers(0, 40), st.booleans(), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_prefills_are_estimated_to_the_digit(
    seed: int, count: int, with_source: bool, with_ssd: bool, measured: bool, foreseen: bool
) -> None:
    chance = np.random.default_rng(seed)
    num_bits, num_nodes = 64, 80
    instances, links = prefill_instances(chance, count), LinkEnds.zeros(num_nodes)
    instances.node[:] = chance.integers(0, num_nodes, count)
    links.leaving[:], links.arriving[:] = chance.integers(0, 3, (2, num_nodes))
    held = chance.integers(0, 100, num_bits)
    in_dram = np.minimum(held, chance.integers(0, 100, num_bits)) if with_ssd else None
    rates = np.where(chance.random(num_nodes) < 0.5, np.nan, chance.random(num_nodes) * 1e6) if measured else None
    factors = chance.random((12, 12)) * 2.0 if foreseen else None
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
    found = []
    for by in BY_NUMPY_AND_C:
        into = PrefillEstimates.unfilled(names(count), None, best)
        by.estimate_prefills(instances.rows, held, in_dram, links.rows, rates, factors, asked, into)
        found.append(into.plain())
    assert found[0] == found[1]


ASKED = Asked(
    now=0.0,
    num_tokens=100,
    block_tokens=64,
    chunk_tokens=512,
    chunk_ms=0.0,
    most_reused=1,
    best=0,
    source=-1,
    threshold=1.0,
    bytes_per_block=6400,
    assumed_bytes_per_s=1e6,
)


def cost_of(instances: PrefillInstances, row: int) -> PrefillCost:
    columns = (instances.fixed_ms, instances.per_token_ms, instances.per_pair_ms, instances.slowest_share)
    return PrefillCost(*(float(column[row]) for column in columns))


@given(seed=st.integers(0, 2**32), chunk_tokens=st.sampled_from([1, 100, 512, 2048]), chunk_ms=st.sampled_from([None, 2.0, 300.0]))
@settings(max_examples=200, deadline=None)
def test_prefills_are_estimated_to_the_digit_as_prefill_nodes_cut_them(seed: int, chunk_tokens: int, chunk_ms: float | None) -> None:
    chance, count = np.random.default_rng(seed), 20
    instances, held = prefill_instances(chance, count), chance.integers(0, 2000, count)
    num_tokens = int(chance.integers(1, 200_000))
    most = (num_tokens - 1) // 64
    into = PrefillEstimates.unfilled(names(count), None, 0)
    asked = ASKED._replace(num_tokens=num_tokens, chunk_tokens=chunk_tokens, chunk_ms=chunk_ms or 0.0, most_reused=most)
    _native.estimate_prefills(instances.rows, held, None, LinkEnds.zeros(1).rows, None, None, asked, into)
    for row in range(count):
        chunking = Chunking(cost_of(instances, row), chunk_tokens, chunk_ms)
        cached = 64 * min(int(held[row]), most)
        assert into.prefill_ms[row] == chunking.prompt_ms(num_tokens - cached, cached)


@given(seed=st.integers(0, 2**32), chunk_tokens=st.sampled_from([1, 100, 512, 2048]), chunk_ms=st.sampled_from([None, 2.0, 300.0]))
@settings(max_examples=200, deadline=None)
def test_a_prompts_time_at_each_instance_is_that_of_its_chunks(seed: int, chunk_tokens: int, chunk_ms: float | None) -> None:
    chance, count = np.random.default_rng(seed), 20
    instances, into = prefill_instances(chance, count), np.empty(count)
    cached, fresh = int(chance.integers(0, 100_000)), int(chance.integers(1, 100_000))
    _native.prompts_ms(
        instances.rows, into, num_tokens=cached + fresh, cached_tokens=cached, chunk_tokens=chunk_tokens, chunk_ms=chunk_ms or 0.0
    )
    for row in range(count):
        chunking = Chunking(cost_of(instances, row), chunk_tokens, chunk_ms)
        assert into[row] == chunking.prompt_ms(fresh, cached)


@given(st.integers(0, 2**32), st.integers(0, 40))
def test_times_between_tokens_are_predicted_to_the_digit(seed: int, count: int) -> None:
    chance = np.random.default_rng(seed)
    instances = DecodeInstances.zeros(count)
    instances.bit[:] = np.arange(count)
    for name, least, most in (
        ("attempts", 0, 100),
        ("running", 0, 100),
        ("context_tokens", 0, 10**6),
        ("max_batch", 0, 64),
        ("slots_total", 0, 3000),
    ):
        instances.rows[name] = chance.integers(least, most, count)
    instances.slots_free[:] = chance.integers(-100, 1900, count)
    instances.fixed_ms[:], instances.per_sequence_ms[:], instances.per_context_token_ms[:] = chance.random((3, count)) * 50.0
    found = []
    for by in BY_NUMPY_AND_C:
        into = DecodeEstimates.unfilled(names(count))
        by.estimate_decodes(instances.rows, np.arange(count) * 3, 777, into)
        found.append(into.plain())
    assert found[0] == found[1]


@given(st.integers(1, 2**200), st.integers(0, 100))
def test_a_value_is_spread_over_the_places_of_a_mask(mask: int, value: int) -> None:
    columns = [np.zeros(200, np.int64), np.zeros(200, np.int64)]
    for column, by in zip(columns, BY_NUMPY_AND_C, strict=True):
        by.spread(column, value, (mask >> 1).to_bytes(25, "little"))
    assert columns[0].tolist() == columns[1].tolist()


# ---- looking ahead ----

AHEAD_BY_NUMPY_AND_C: tuple[Any, Any] = (forecast, _native)


@dataclass(frozen=True)
class Pool:
    """Some instances of any kind, and attempts on them."""

    instances: ForecastInstances
    attempts: ForecastAttempts
    survival: Any

    @classmethod
    def of(cls, chance: np.random.Generator, num_instances: int, num_attempts: int) -> Pool:
        instances, attempts = ForecastInstances.zeros(num_instances), ForecastAttempts.zeros(num_attempts)
        instances.ready[:] = chance.integers(0, 2, num_instances)
        instances.running[:], instances.decoding[:] = chance.integers(0, 10, (2, num_instances))
        instances.context_tokens[:] = chance.integers(0, 9000, num_instances)
        for name, scale in (("fixed_ms", 50.0), ("per_sequence_ms", 5.0), ("per_context_token_ms", 0.01), ("max_batch", 64.0)):
            instances.rows[name] = chance.random(num_instances) * scale
        for name, scale in (("pace_s", 0.1), ("produced", 500.0), ("paced_at", 90.0)):
            instances.rows[name] = chance.random(num_instances) * scale
        attempts.place[:] = chance.integers(0, num_instances, num_attempts)
        attempts.law[:] = chance.integers(0, 3, num_attempts)
        attempts.in_prefill[:] = chance.integers(0, 2, num_attempts)
        attempts.prompt_tokens[:] = chance.integers(1, 9000, num_attempts)
        for name, scale in (("joins_at", 200.0), ("joined", 500.0), ("most_tokens", 500.0)):
            attempts.rows[name] = chance.random(num_attempts) * scale
        return cls(instances, attempts, 0.001 + np.sort(chance.random((3, 100)))[:, ::-1].copy())


@given(st.integers(0, 2**32), st.integers(1, 20), st.integers(0, 40), st.booleans())
@settings(deadline=None)
def test_batches_to_come_are_expected_to_the_digit(seed: int, num_instances: int, num_attempts: int, joining: bool) -> None:
    chance = np.random.default_rng(seed)
    pool, at = Pool.of(chance, num_instances, num_attempts), 100.0 + chance.random() * 50
    instances, place, found = pool.instances.rows, num_instances - 1, []
    for by in AHEAD_BY_NUMPY_AND_C:
        batches = np.full(num_instances, np.nan, ExpectedBatches.dtype)
        by.expect_batches(instances, pool.attempts.rows, pool.survival, batches, now=100.0, at=at, joining=joining)
        outlook = by.look_at_pool(instances, batches, place=place, num_tokens=777)
        found.append((batches.tolist(), by.step_times_ms(instances, batches), tuple(outlook)))
    assert found[0] == found[1]


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 400), st.integers(1, 17))
@settings(deadline=None)
def test_an_instances_worst_moment_is_that_of_its_attempts(seed: int, num_instances: int, num_attempts: int, num_moments: int) -> None:
    """Within what numpy's own order of adding may change."""
    chance = np.random.default_rng(seed)
    pool, moments = Pool.of(chance, num_instances, num_attempts), 100.0 + np.sort(chance.random(num_moments)) * 50
    wanted, found = (
        by.look_at_instance(
            pool.instances.rows, pool.attempts.rows, pool.survival, moments, place=num_instances - 1, num_tokens=777, now=100.0
        )
        for by in AHEAD_BY_NUMPY_AND_C
    )
    assert tuple(found) == pytest.approx(wanted, rel=1e-12)


# ---- what is refused ----

ONE = np.zeros(1, np.int64)


@dataclass(frozen=True)
class Call:
    """Arguments that are taken: arrays by name, the columns of `into` among them, and others."""

    function: Callable[..., Any]
    arrays: dict[str, Any]
    others: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    into: PrefillEstimates | DecodeEstimates | None = None

    @property
    def names(self) -> list[str]:
        """Of the arrays that it takes: who is whose twin, it does not ask."""
        columns = [] if self.into is None else [name for name, column in self.into.plain().items() if isinstance(column, list)]
        return [*self.arrays, *(name for name in columns if name != "twin")]

    def given(self, name: str) -> Any:
        return self.arrays[name] if name in self.arrays else getattr(self.into, name)

    def __call__(self, **changed: Any) -> None:
        arrays = {name: changed.get(name, array) for name, array in self.arrays.items()}
        into = () if self.into is None else (replace(self.into, **{name: changed[name] for name in changed.keys() - arrays.keys()}),)
        self.function(*arrays.values(), *self.others, *into, **self.keywords)


INSTANCES, ATTEMPTS, BATCHES = (kind.zeros(1).rows for kind in (ForecastInstances, ForecastAttempts, ExpectedBatches))
CALLS = {
    "estimate_prefills": Call(
        _native.estimate_prefills,
        {
            "instances": PrefillInstances.zeros(1).rows,
            "held": ONE,
            "in_dram": ONE,
            "links": LinkEnds.zeros(1).rows,
            "rates": np.ones(1),
            "factors": np.ones((1, 1)),
        },
        (ASKED,),
        into=PrefillEstimates.unfilled(names(1), None, 0),
    ),
    "estimate_decodes": Call(
        _native.estimate_decodes,
        {"instances": DecodeInstances.zeros(1).rows, "held": ONE},
        (7,),
        into=DecodeEstimates.unfilled(names(1)),
    ),
    "prompts_ms": Call(
        _native.prompts_ms,
        {"instances": PrefillInstances.zeros(1).rows, "into": np.ones(1)},
        keywords={"num_tokens": 9, "cached_tokens": 8, "chunk_tokens": 512, "chunk_ms": 0.0},
    ),
    "spread": Call(_native.spread, {"column": np.zeros(8, np.int64)}, (1, b"\x01")),
    "expect_batches": Call(
        _native.expect_batches,
        {"instances": INSTANCES, "attempts": ATTEMPTS, "survival": np.ones((1, 4)), "into": BATCHES},
        keywords={"now": 0.0, "at": 1.0, "joining": True},
    ),
    "step_times_ms": Call(_native.step_times_ms, {"instances": INSTANCES, "batches": BATCHES}),
    "look_at_pool": Call(_native.look_at_pool, {"instances": INSTANCES, "batches": BATCHES}, keywords={"place": 0, "num_tokens": 10}),
    "look_at_instance": Call(
        _native.look_at_instance,
        {"instances": INSTANCES, "attempts": ATTEMPTS, "survival": np.ones((1, 4)), "moments": np.ones(1)},
        keywords={"place": 0, "num_tokens": 10, "now": 0.0},
    ),
}


@pytest.mark.parametrize(("function", "name"), [(function, name) for function, call in CALLS.items() for name in call.names])
@pytest.mark.parametrize("dtype", ["f8", "i8", "u8", "f4", "i4", ">f8", ">i8", "S8", "c8"])
def test_arrays_are_taken_by_the_type_of_their_items_not_by_their_size(function: str, name: str, dtype: str) -> None:
    call = CALLS[function]
    call()
    wrong = np.zeros(call.given(name).shape, dtype)
    if wrong.dtype != call.given(name).dtype:
        with pytest.raises(TypeError, match=f"^{name} must be an array of"):
            call(**{name: wrong})
    with pytest.raises(TypeError, match=f"^{name} must be an array of .*, not list"):
        call(**{name: [0]})


Fields = list[tuple[str, str]]
CHANGES: dict[str, tuple[Callable[[Fields], Fields], Callable[[Fields], tuple[int, str, str]]]] = {
    "another name": (
        lambda fields: [("another", fields[0][1]), *fields[1:]],
        lambda fields: (1, said(fields[0]), said(("another", fields[0][1]))),
    ),
    "another type": (
        lambda fields: [(fields[0][0], "u8"), *fields[1:]],
        lambda fields: (1, said(fields[0]), said((fields[0][0], "u8"))),
    ),
    "another order": (
        lambda fields: [*fields[:-2], fields[-1], fields[-2]],
        lambda fields: (len(fields) - 1, said(fields[-2]), said(fields[-1])),
    ),
    "one fewer": (lambda fields: fields[:-1], lambda fields: (len(fields), said(fields[-1]), "nothing")),
    "one more": (lambda fields: [*fields, ("more", "<f8")], lambda fields: (len(fields) + 1, "nothing", "more (d)")),
}


def said(of: tuple[str, str]) -> str:
    return f"{of[0]} ({np.dtype(of[1]).char})"


def fields_of(rows: Any) -> Fields | None:
    return None if rows.dtype.names is None else [(name, rows.dtype[name].str) for name in rows.dtype.names]


@pytest.mark.parametrize(
    ("function", "name"),
    [(function, name) for function, call in CALLS.items() for name, array in call.arrays.items() if fields_of(array) is not None],
)
@pytest.mark.parametrize("change", CHANGES)
def test_rows_are_taken_by_the_names_and_types_of_their_fields_in_order(function: str, name: str, change: str) -> None:
    call, (make, tell) = CALLS[function], CHANGES[change]
    fields = fields_of(call.given(name))
    assert fields is not None
    number, wanted, given = tell(fields)
    with pytest.raises(TypeError) as refused:
        call(**{name: np.zeros(1, np.dtype(make(fields)))})
    assert str(refused.value).startswith(f"{name} must be an array of ")
    assert str(refused.value).endswith(f" rows: field {number} is {wanted}, not {given}")


@pytest.mark.parametrize("function", CALLS)
def test_an_array_that_is_too_short_is_refused(function: str) -> None:
    call = CALLS[function]
    for name in call.names:
        if name not in ("instances", "attempts", "survival", "column", "links", "held"):
            with pytest.raises(ValueError, match=f"^{name} has 0 items; 1 are wanted"):
                call(**{name: call.given(name)[:0]})


def test_rows_that_name_what_is_not_there_are_refused() -> None:
    prefill, decode = PrefillInstances.zeros(1), DecodeInstances.zeros(1)
    for column in (prefill.bit, prefill.node, decode.bit):
        for place in (5, -1):
            column[0] = place
            call = CALLS["estimate_decodes" if column is decode.bit else "estimate_prefills"]
            with pytest.raises(IndexError):
                call(instances=(decode if column is decode.bit else prefill).rows)
        column[0] = 0


@pytest.mark.parametrize("changed", [{"source": 1}, {"block_tokens": 0}, {"chunk_tokens": 0}])
def test_what_is_asked_makes_sense(changed: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="that is none"):
        replace(CALLS["estimate_prefills"], others=(ASKED._replace(**changed),))()


def test_what_is_asked_is_read_by_name() -> None:
    for asked, error in ((tuple(ASKED), AttributeError), (ASKED._replace(now="soon"), TypeError), (ASKED._replace(best=1.5), TypeError)):
        with pytest.raises(error):
            replace(CALLS["estimate_prefills"], others=(asked,))()


def test_a_column_lies_in_one_piece_that_can_be_written() -> None:
    column = np.zeros(16, np.int64)
    with pytest.raises(ValueError, match=r"^column must lie in one piece"):
        _native.spread(column[::2], 1, b"\x01")
    column.flags.writeable = False
    with pytest.raises(ValueError, match=r"^column must be writable"):
        _native.spread(column, 1, b"\x01")


def test_a_mask_is_bytes_and_no_longer_than_its_column() -> None:
    with pytest.raises(TypeError, match=r"^mask must be bytes, not"):
        _native.spread(np.zeros(64, np.int64), 1, np.ones(1, np.float32))  # type: ignore[arg-type]
    with pytest.raises(IndexError):
        _native.spread(np.zeros(7, np.int64), 1, b"\x80")


def attempt(**changed: int) -> Rows:
    rows = np.zeros(1, ForecastAttempts.dtype)
    for name, value in changed.items():
        rows[name] = value
    return rows


@pytest.mark.parametrize("function", ["expect_batches", "look_at_instance"])
def test_looking_ahead_over_what_is_not_there_is_refused(function: str) -> None:
    call = CALLS[function]
    for law in (1, -1):
        with pytest.raises(IndexError):
            call(attempts=attempt(law=law))
    for survival in (np.ones((1, 0)), np.ones(4)):
        with pytest.raises(ValueError):
            call(survival=survival)


def test_a_place_is_that_of_an_instance() -> None:
    for place in (1, -1):
        with pytest.raises(IndexError):
            CALLS["expect_batches"](attempts=attempt(place=place))
        for function in ("look_at_pool", "look_at_instance"):
            call = CALLS[function]
            with pytest.raises(IndexError):
                replace(call, keywords={**call.keywords, "place": place})()


frames = st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, (1 << 31) - 1), st.binary(max_size=40)), max_size=12)


@given(frames, st.data())
def test_frames_are_found_whole_however_they_come(sent: list[tuple[int, int, int, bytes]], data: st.DataObject) -> None:
    stream = b"".join(
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big") + payload
        for kind, flags, number, payload in sent
    )
    assert_found_whole(stream, sent, lambda received: _native.split_frames(received, 40), data)


@given(st.lists(st.binary(max_size=40), max_size=12), st.data())
def test_messages_are_found_whole_however_they_come(sent: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(b"\0" + len(message).to_bytes(4, "big") + message for message in sent)
    assert_found_whole(stream, sent, lambda received: _native.split_messages(received, 40), data)


def assert_found_whole(stream: bytes, sent: list[Any], split: Callable[[bytearray], tuple[list[Any], int]], data: st.DataObject) -> None:
    received, found = bytearray(), list[Any]()
    for begin, end in pairwise([0, *sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8))), len(stream)]):
        received += stream[begin:end]
        whole, used = split(received)
        assert (whole == []) == (used == 0)
        del received[:used]
        found += whole
    assert (found, received) == (sent, b"")


def test_what_is_too_large_or_compressed_is_refused() -> None:
    assert _native.split_frames(bytearray(b"\0\0\x05" + bytes(6) + b"12345"), 5) == ([(0, 0, 0, b"12345")], 14)
    with pytest.raises(ConnectionError, match="a frame of 6 bytes came, where 5 are allowed"):
        _native.split_frames(bytearray(b"\0\0\x06" + bytes(6)), 5)
    with pytest.raises(ConnectionError, match="of 4294967295 bytes"):
        _native.split_messages(bytearray(b"\0\xff\xff\xff\xff"), 5)
    with pytest.raises(ConnectionError, match="compressed"):
        _native.split_messages(bytearray(b"\x01\0\0\0\0"), 5)
    with pytest.raises(TypeError):
        _native.split_frames("text", 5)  # type: ignore[arg-type]


milliseconds = st.one_of(st.floats(0, 1e8), st.floats(0), st.sampled_from([0.0, 0.5, 1.0, 2.0, 1e-320, 2.0**22, 2.0**23]))


@given(st.lists(st.tuples(milliseconds, milliseconds)))
def test_queue_factors_are_those_of_the_classes(times: list[tuple[float, float]]) -> None:
    own_ms, ahead_ms = (np.array(column, np.float64) for column in (zip(*times, strict=True) if times else ((), ())))
    factors, into = np.arange(24.0 * 24).reshape(24, 24), np.empty(len(times))
    _native.queue_factors(own_ms, ahead_ms, factors, into)
    assert [_native.queue_class(own, 24) for own, _ in times] == [classed(own) for own, _ in times]
    assert into.tolist() == [24 * (classed(own) + 0.0) + classed(ahead) for own, ahead in times]
    with pytest.raises(ValueError, match=r"factors is \[classes, classes\]"):
        _native.queue_factors(own_ms, ahead_ms, np.ones(24), into)
    with pytest.raises(ValueError, match="ahead_ms has 0 items"):
        _native.queue_factors(np.ones(1), np.ones(0), factors, np.ones(1))


def classed(ms: float) -> int:
    return min(max(math.frexp(ms)[1], 0), 23)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-1, 1), st.booleans()), min_size=1), st.sampled_from(["<<", "<>", "><", ">>"]))
def test_the_best_row_is_so_in_one_column_after_the_other(values: list[tuple[int, int, bool]], order: str) -> None:
    floats, ints = np.array([value / 3 for value, _, _ in values]), np.array([value << 40 for _, value, _ in values])
    rows = np.array([row for row, (_, _, wanted) in enumerate(values) if wanted] or [0])
    signs = [1 if sign == "<" else -1 for sign in order]
    best = min(rows.tolist(), key=lambda row: (signs[0] * floats[row], signs[1] * ints[row]))
    assert _native.best_row(rows, order, floats, ints) == best
    assert _native.best_row(rows, order[0], floats) == min(rows.tolist(), key=lambda row: signs[0] * floats[row])


def test_of_no_rows_of_rows_beyond_a_column_and_by_no_column_there_is_no_best() -> None:
    three, two = np.zeros(3), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="rows has 0 items"):
        _native.best_row(np.zeros(0, np.int64), "<", three)
    for rows in ([-1], [0, -1], [2], [0, 2]):
        with pytest.raises(IndexError, match="a row names a place that is none"):
            _native.best_row(np.array(rows), "<>", three, two)
    with pytest.raises(TypeError, match="by 1 to 15 columns, not 0"):
        _native.best_row(np.array([0]), "")
    for order in ("<", "<<<", "<="):
        with pytest.raises(ValueError, match=f"a < or a > for each of 2 columns, not '{order}'"):
            _native.best_row(np.array([0]), order, three, two)
    with pytest.raises(TypeError, match="column must be an array of int64 or float64, not of format 'f'"):
        _native.best_row(np.array([0, 1]), "<", np.zeros(3, np.float32))


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-1, 2), st.integers(-2, 2), st.booleans())), st.integers(-2, 2))
def test_rows_with_room_are_found_in_their_order(instances: list[tuple[int, int, int, bool]], least: int) -> None:
    batch, max_batch, slots_free = (np.array([instance[column] for instance in instances], np.int64) for column in range(3))
    rows = np.array([row for row, (*_, wanted) in enumerate(instances) if wanted], np.int64)
    into = np.empty(len(instances), np.int64)
    wanted = [row for row in rows.tolist() if (max_batch[row] <= 0 or batch[row] <= max_batch[row]) and slots_free[row] >= least]
    assert into[: _native.roomy_rows(rows, batch, max_batch, slots_free, least, into)].tolist() == wanted
    assert into[: _native.rows_from(slots_free, least, into)].tolist() == (slots_free >= least).nonzero()[0].tolist()


def test_rows_beyond_the_columns_have_no_room_and_none_is_written_beyond_the_array() -> None:
    one, two, into = np.zeros(1, np.int64), np.zeros(2, np.int64), np.zeros(2, np.int64)
    for row in (-1, 2):
        with pytest.raises(IndexError, match="a row names a place that is none"):
            _native.roomy_rows(np.array([row]), two, two, two, 0, into)
    for batch, max_batch, slots_free, name in ((two, one, two, "max_batch"), (two, two, one, "slots_free")):
        with pytest.raises(ValueError, match=f"{name} has 1 items; 2 are wanted"):
            _native.roomy_rows(two, batch, max_batch, slots_free, 0, into)
    for write in (lambda: _native.roomy_rows(two, two, two, two, 0, one), lambda: _native.rows_from(two, 0, one)):
        with pytest.raises(ValueError, match="into has 1 items; 2 are wanted"):
            write()


@given(st.integers(0, 2**100 - 1), st.integers(0, 2**32), st.integers(0, 8))
def test_the_least_busy_holders_are_those_whose_nodes_fewest_transfers_leave(mask: int, seed: int, most: int) -> None:
    chance = np.random.default_rng(seed)
    node_of_bit, links = chance.permutation(100), LinkEnds.zeros(100)
    links.leaving[:] = chance.integers(0, 4, 100)
    held = [bit for bit in range(100) if mask >> bit & 1]
    wanted = sorted(held, key=lambda bit: links.leaving[node_of_bit[bit]])[:most]
    assert _native.least_busy(mask.to_bytes(13, "little"), node_of_bit, links.rows, most) == wanted


def test_a_holder_without_a_node_and_too_many_holders_are_refused() -> None:
    links = LinkEnds.zeros(2).rows
    for mask, node_of_bit in ((b"\x04", [0, 1]), (b"\x01", [2, 0]), (b"\x01", [-1, 0])):
        with pytest.raises(IndexError, match="a row names a place that is none"):
            _native.least_busy(mask, np.array(node_of_bit), links, 1)
    for most in (-1, 65):
        with pytest.raises(ValueError, match=f"{most} bits are asked for; there may be 64"):
            _native.least_busy(b"", np.zeros(1, np.int64), links, most)
