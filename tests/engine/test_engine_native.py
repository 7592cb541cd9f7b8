"""The C kernels compute what plain torch does in float32 from the same bfloat16 inputs, to bfloat16's rounding."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends import choice as backends
from engine.backends.base import HeadNorms, Norm, Ops
from engine.backends.plain import PlainOps, TorchAttention
from engine.batch import SequenceChunk
from engine.formats.files import describe, read_config
from engine.layers.rope import Rotary
from engine.loader import load_model
from engine.model.decoder import DecoderModel
from engine.model_config import RopeConfig
from springtide.errors import ConfigError
from springtide.modelinfo import ModelInfo
from tests.engine.sequences import Harness
from tests.support.models import demo_gguf, make_tiny_model
from tests.support.reference import random_prompt

needs_kernels = pytest.mark.skipif(not backends.native_can_run(read_config(demo_gguf())), reason="this machine has no AVX2")
pytestmark = pytest.mark.usefixtures("instruction_set")


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Geometry:
    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    window: int | None
    norms: bool
    chunks: tuple[tuple[int, int], ...]
    """(tokens before, new tokens) of each sequence."""

    num_layers = 3
    layer = 1

    def arena(self, slots: int) -> torch.Tensor:
        """NaN in every place: what nobody wrote must not be read."""
        shape = (slots, self.num_layers, 2, self.block_tokens, self.kv_heads, self.head_dim)
        return torch.full(shape, torch.nan, dtype=torch.bfloat16)


GEOMETRIES = st.builds(
    lambda group, kv_heads, head_dim, **fields: Geometry(group * kv_heads, kv_heads, head_dim, **fields),
    group=st.sampled_from((1, 2, 3, 4, 7, 8, 16)),
    kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from((32, 64, 96, 128, 256)),
    block_tokens=st.sampled_from((1, 4, 16, 64)),
    window=st.sampled_from((None, None, 1, 5, 64, 100)),
    norms=st.booleans(),
    chunks=st.lists(st.tuples(st.integers(0, 300), st.sampled_from((1, 1, 2, 5, 33, 64, 130))), min_size=1, max_size=5).map(tuple),
)


def attend(geometry: Geometry, backend: backends.Backend, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes out, and the arena afterwards, in float32; the same inputs for the same geometry."""
    generator = torch.Generator().manual_seed(0)
    size = geometry.block_tokens
    counts = [-(-(before + new) // size) for before, new in geometry.chunks]
    slots = list(range(sum(counts) + 3))
    random.Random(0).shuffle(slots)
    arena = geometry.arena(len(slots))
    batch = []
    for (before, new), count in zip(geometry.chunks, counts, strict=True):
        own, slots = slots[:count], slots[count:]
        tokens = torch.randn(count * size, 2, geometry.kv_heads, geometry.head_dim, generator=generator).bfloat16()
        # A block that someone has begun to write is zero from there on.
        arena[own[: -(-before // size)], geometry.layer] = 0
        for position in range(before):
            arena[own[position // size], geometry.layer, :, position % size] = tokens[position]
        batch.append(SequenceChunk([0] * new, before, own))
    arena = arena.to(dtype)
    rows = sum(new for _, new in geometry.chunks)
    qkv = torch.randn(rows, geometry.heads + 2 * geometry.kv_heads, geometry.head_dim, generator=generator).bfloat16().to(dtype)
    norms = None
    if geometry.norms:
        scales = 1 + 0.1 * torch.randn(2, geometry.head_dim, generator=generator)
        norms = HeadNorms(Norm(scales[0].contiguous(), 1e-6), Norm(scales[1].contiguous(), 1e-6))
    attention = backend.attention(arena, geometry.heads, [geometry.window] * geometry.num_layers)
    rotary = Rotary(RopeConfig(), geometry.head_dim)
    planned = attention.plan(batch)
    result = planned.run(geometry.layer, qkv, rotary(planned.positions), norms)
    return result.float(), arena.float()


def assert_close(result: torch.Tensor, wanted: torch.Tensor) -> None:
    """Each head's output as a vector, within what bfloat16 rounds of the weights and the output: over many keys outputs are small, and a
    forgotten one is a small part of them."""
    assert ((result - wanted).norm(dim=-1) <= 0.02 * wanted.norm(dim=-1) + 1e-3).all()


PLAN: dict[str, Any] = {"arena": np.zeros(4 * 2 * 2 * 64, np.int16), "slots": np.arange(4, dtype=np.int32)}


def make_plan(arena: Any, slots: Any) -> Any:
    """Of two tokens in blocks of two, with one head of 64."""
    return backends._native.Plan(arena, 4, (2 * 2 * 64, 2 * 64, 64), 2, 1, 1, 64, [(0, 2, slots)])


@needs_kernels
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("arena", "f2"), ("arena", "u1"), ("arena", "i4"), ("slots", "f4"), ("slots", "u4"), ("slots", "i8"), ("slots", ">i4")],
)
def test_arrays_are_taken_by_the_type_of_their_items_not_by_their_size(name: str, dtype: str) -> None:
    make_plan(**PLAN)
    with pytest.raises(TypeError, match=f"^{name} must be an array of"):
        make_plan(**{**PLAN, name: PLAN[name].astype(dtype)})


@needs_kernels
def test_positions_are_written_where_there_is_room_for_int64() -> None:
    plan, positions = make_plan(**PLAN), np.zeros(2, np.int64)
    plan.positions(positions)
    assert positions.tolist() == [0, 1]
    for wrong in (positions.astype(np.float64), positions.astype(np.uint64)):
        with pytest.raises(TypeError, match=r"^positions must be an array of int64"):
            plan.positions(wrong)


@needs_kernels
def test_slots_that_are_no_int32_are_not_rounded() -> None:
    attention = backends.native().attention(torch.zeros(4, 1, 2, 2, 1, 64, dtype=torch.bfloat16), 1, [None])
    with pytest.raises(TypeError, match=r"^slots must be an array of int32, not of format 'f'"):
        attention.plan([SequenceChunk([1, 2], 0, np.array([1.5], np.float32))])


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(GEOMETRIES)
def test_attention_is_that_of_plain_torch(geometry: Geometry) -> None:
    result, arena = attend(geometry, backends.native(), torch.bfloat16)
    wanted, wanted_arena = attend(geometry, backends.PLAIN, torch.float32)
    assert torch.equal(arena.isnan(), wanted_arena.isnan())
    assert torch.allclose(arena.nan_to_num(), wanted_arena.nan_to_num(), rtol=2**-8, atol=1e-5)
    assert_close(result, wanted)


@needs_kernels
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("window", [None, 700])
def test_a_long_context_is_split_among_threads(threads: Any, count: int, window: int | None) -> None:
    geometry = Geometry(8, 2, 64, 16, window, False, ((3000, 1), (10, 40), (900, 2)))
    threads(count)
    result, _ = attend(geometry, backends.native(), torch.bfloat16)
    wanted, _ = attend(geometry, backends.PLAIN, torch.float32)
    assert_close(result, wanted)


@needs_kernels
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("window", [None, 64, 100])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 400])
def test_every_visible_key_is_seen_and_no_other(threads: Any, count: int, window: int | None, length: int) -> None:
    """One key at a time is like the query, all others are unlike it: its value is what comes out, or nothing of it."""
    threads(count)
    first = 0 if window is None else max(0, length - window)
    for needle in sorted({0, 62, 63, 64, first - 1, first, first + 1, length // 2, length - 2} & set(range(length - 1))):
        arena = torch.zeros(-(-length // 16), 1, 2, 16, 1, 32, dtype=torch.bfloat16)
        tokens = torch.zeros(length, 2, 32, dtype=torch.bfloat16)
        tokens[:, 0, 31], tokens[needle, 0, 31], tokens[needle, 1] = -30.0, 30.0, 1.0
        for position in range(length - 1):
            arena[position // 16, 0, :, position % 16, 0] = tokens[position]
        qkv = torch.zeros(1, 3, 32, dtype=torch.bfloat16)
        qkv[0, 0, 31], qkv[0, 1, 31] = 30.0, -30.0
        planned = backends.native().attention(arena, 1, [window]).plan([SequenceChunk([0], length - 1, range(len(arena)))])
        unrotated = Rotary(RopeConfig(), 32, divisors=torch.full((16,), torch.inf))(planned.positions)
        assert (planned.run(0, qkv, unrotated, None) == (1.0 if needle >= first else 0.0)).all(), needle


@needs_kernels
def test_the_kernels_have_torch_s_threads(threads: Any) -> None:
    for count in (1, 3):
        threads(count)
        assert backends._native.max_threads() == count


@needs_kernels
@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("size", [16, 40, 576])
def test_operators_between_the_products_are_those_of_plain_torch(rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(rows * size)
    x, delta = (torch.randn(rows, size, generator=generator).bfloat16() for _ in range(2))
    norm = Norm(torch.rand(size, generator=generator), 1e-5)
    ops, plain = backends.native().ops, PlainOps()
    assert torch.allclose(ops.norm(x, norm).float(), plain.norm(x.float(), norm), rtol=2**-7, atol=1e-6)
    residual = x.clone()
    normed = ops.add_norm(residual, delta, norm)
    assert torch.equal(residual, x + delta)
    assert torch.allclose(normed.float(), plain.norm(residual.float(), norm), rtol=2**-7, atol=1e-6)


@needs_kernels
def test_sums_are_rounded_to_the_nearest_bfloat16_of_two_the_even_one() -> None:
    halves = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-16, -1 - 2**-8, -1 - 3 * 2**-8, 1 + 2**-8 - 2**-16]
    x = torch.tensor([[*halves, 3e38, torch.inf, -torch.inf, torch.nan, 0.0]])
    for size in (11, 16, 40):
        parts = torch.nn.functional.pad(x, (0, size - 11))
        residual = parts.bfloat16()
        delta = (parts - residual.float()).nan_to_num(0, 0, 0).bfloat16()
        delta[0, 6] = 3e38
        wanted = residual + delta
        backends.native().ops.add_norm(residual, delta, Norm(torch.ones(size), 1e-5))
        assert torch.equal(residual.nan_to_num(7e37), wanted.nan_to_num(7e37)) and residual[0, 6].isinf() and residual[0, 9].isnan()


@needs_kernels
def test_an_instruction_set_that_this_machine_lacks_is_not_used() -> None:
    before = backends._native.instruction_set()
    with pytest.raises(ValueError, match=r"^this CPU has no kernels in AltiVec$"):
        backends._native.use("AltiVec")
    assert backends._native.instruction_set() == before == backends.native().kernels.removeprefix("native ")


PRODUCTS = st.tuples(st.sampled_from((1, 2, 5, 6, 7, 13, 130)), st.sampled_from((1, 33, 64, 200)), st.sampled_from((2, 30, 31, 576)))


@needs_kernels
@settings(max_examples=40, deadline=None)
@given(PRODUCTS, st.booleans(), st.sampled_from((None, "silu", "gelu_tanh")), st.integers(0, 100))
def test_products_are_those_of_plain_torch(sizes: tuple[int, int, int], has_bias: bool, activation: Any, seed: int) -> None:
    rows, outputs, inputs = sizes
    generator = torch.Generator().manual_seed(seed)
    columns = outputs if activation is None else 2 * outputs
    x, weight = (torch.randn(count, inputs, generator=generator).bfloat16() for count in (rows, columns))
    bias = torch.randn(columns, generator=generator).bfloat16() if has_bias else None
    inexact = 2**-7 * inputs**0.5

    def computed(ops: Ops, dtype: torch.dtype) -> torch.Tensor:
        given = (weight.to(dtype), None if bias is None else bias.to(dtype))
        product = ops.linear(*given) if activation is None else ops.gated(*given, activation)
        return product(x.to(dtype)).float()

    ours, wanted = computed(backends.native().ops, torch.bfloat16), computed(PlainOps(), torch.float32)
    assert ours.shape == (rows, outputs)
    assert torch.allclose(ours, wanted, rtol=2**-7 if inputs % 2 == 0 else 2**-5, atol=inexact)


@needs_kernels
@pytest.mark.parametrize("inputs", [2, 190, 192, 194, 386, 600, 768, 770, 1190])
@pytest.mark.parametrize("outputs", [1, 64, 200, 330])
def test_a_row_s_product_does_not_depend_on_its_company(threads: Any, inputs: int, outputs: int) -> None:
    """To the last bit: however many rows and threads share a panel, and in however many parts its pairs are taken."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(130, inputs, generator=generator).bfloat16()
    products = [
        backends.native().ops.linear(torch.randn(outputs, inputs, generator=generator).bfloat16(), torch.randn(outputs).bfloat16()),
        backends.native().ops.gated(torch.randn(2 * outputs, inputs, generator=generator).bfloat16(), None, "silu"),
    ]
    for product in products:
        threads(1)
        alone = torch.cat([product(row[None]) for row in x])
        for count in (1, 3, 5):
            threads(count)
            for rows in (*range(1, 27), 31, 32, 33, 48, 60, 64, 65, 119, 120, 121, 130):
                assert torch.equal(product(x[:rows]), alone[:rows]), (count, rows)


@needs_kernels
def test_a_row_s_product_does_not_depend_on_how_many_pieces_there_are(threads: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1300, 770, generator=generator).bfloat16()
    product = backends.native().ops.linear(torch.randn(70, 770, generator=generator).bfloat16(), None)
    for count in (1, 3):
        threads(count)
        alone = torch.cat([product(part) for part in x.split(20)])
        for rows in (640, 641, 1300):
            assert torch.equal(product(x[:rows]), alone[:rows]), (count, rows)


@needs_kernels
def test_torch_s_own_products_in_between_change_nothing(threads: Any) -> None:
    """Where torch computes with the same units of the CPU, whoever comes next finds them as it needs them."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(count, 96, generator=generator).bfloat16() for count in (70, 130))
    query = torch.randn(1, 2, 70, 64, generator=generator).bfloat16()
    product = backends.native().ops.linear(weight, None)
    for count in (1, 3):
        threads(count)
        ours, theirs = product(x), torch.nn.functional.linear(x, weight)
        attended = torch.nn.functional.scaled_dot_product_attention(query, query, query)
        for rows in (70, 5, 33, 70):
            assert torch.equal(product(x[:rows]), ours[:rows])
            assert torch.equal(torch.nn.functional.linear(x, weight), theirs)
            assert torch.equal(product(x[:rows]), ours[:rows])
            assert torch.equal(torch.nn.functional.scaled_dot_product_attention(query, query, query), attended)


@needs_kernels
def test_a_gate_takes_extreme_values() -> None:
    gates = torch.tensor([-3e38, -100.0, -1.0, 0.0, 1.0, 100.0, 3e38])
    weight = torch.stack((torch.cat((gates, torch.ones(7))), torch.zeros(14)), 1)
    x = torch.tensor([[1.0, 0.0]])
    for activation in ("silu", "gelu_tanh"):
        ours = backends.native().ops.gated(weight.bfloat16(), None, activation)(x.bfloat16()).float()
        wanted = PlainOps().gated(weight.bfloat16().float(), None, activation)(x)
        assert torch.allclose(ours, wanted, rtol=2**-7, atol=1e-4)


@needs_kernels
def test_the_demo_model_computes_the_same_with_and_without_the_kernels(demo_info: ModelInfo, demo_bf16: Harness) -> None:
    plain = Harness(load_model(demo_info, "bfloat16", kernels="plain"), demo_bf16.spec, num_slots=20)
    assert demo_bf16.runner.model.backend.kernels.removeprefix("native ") in backends._native.instruction_sets()
    assert plain.runner.model.backend.kernels == "torch"
    demo_bf16.foul()
    prompt = random_prompt(7, 300)
    ours = demo_bf16.prefill(prompt, demo_bf16.slots(300), chunk=128)
    theirs = plain.prefill(prompt, plain.slots(300), chunk=300)
    assert (ours - theirs).abs().max() < 0.03 * theirs.abs().max()


FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True, "hidden_size": 92, "intermediate_size": 130},
    "Qwen3": {},
    "Gemma": {},
    "Mistral": {"sliding_window": 40},
}


class Steps:
    """Hooks that say what was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def before(self, layer: int) -> None:
        self.calls.append(("before", layer))

    def after(self, layer: int) -> None:
        self.calls.append(("after", layer))


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_in_one_go_compute_what_they_do_one_by_one(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: Any
) -> None:
    """Down to the last bit, with hooks between the layers and without."""
    info = describe(str(make_tiny_model(tmp_path / "tiny", family, head_dim=32, num_hidden_layers=3, **FAMILIES[family])))
    spec = info.kv_spec("bfloat16", 16)
    fused = Harness(load_model(info, "bfloat16"), spec, num_slots=30)
    monkeypatch.setattr(backends, "native", lambda native=backends.native: replace(native(), fuse=None))
    single = Harness(load_model(info, "bfloat16"), spec, num_slots=30)
    assert fused.runner.model.backend.fuse is not None and single.runner.model.backend.fuse is None
    prompt = [token % info.vocab_size for token in random_prompt(1, 150)]
    batch = [SequenceChunk(prompt[100:], 100, range(10)), SequenceChunk(prompt[60:61], 60, range(20, 26))]
    for count in (1, 2, 3, 5):
        threads(count)
        results = []
        for harness, hooks in ((fused, None), (fused, Steps()), (single, Steps())):
            harness.arena[:] = 0
            for chunk in batch:
                harness.prefill(prompt[: chunk.start], chunk.slots, chunk=64)
            results.append(harness.runner.forward(batch, hooks))
            assert hooks is None or hooks.calls == [(call, layer) for layer in range(3) for call in ("before", "after")]
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
        assert np.array_equal(fused.arena, single.arena)


def passes(harness: Harness, batch: Sequence[SequenceChunk], hooks: Steps | None) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """What comes of the last layer, and the arena."""
    harness.arena[:] = 0
    return harness.runner.forward_layers(batch, None, hooks), harness.arena.copy()


@needs_kernels
@pytest.mark.parametrize("hooks", [None, Steps()])
def test_of_a_pass_without_logits_the_last_layer_computes_keys_and_values_alone(tmp_path: Path, hooks: Steps | None) -> None:
    info = describe(str(make_tiny_model(tmp_path / "tiny", "Llama", head_dim=32, num_hidden_layers=3)))
    harness = Harness(load_model(info, "bfloat16"), info.kv_spec("bfloat16", 16), num_slots=4)
    chunk = SequenceChunk([token % info.vocab_size for token in random_prompt(2, 50)], 0, range(4))
    whole, wanted_arena = passes(harness, [chunk], hooks)
    left, arena = passes(harness, [replace(chunk, wants_logits=False)], hooks)
    assert np.array_equal(arena, wanted_arena) and arena.any()
    assert not torch.equal(left, whole), "the rest of it was computed too"


@needs_kernels
@pytest.mark.parametrize("lengths", [(100,), (1, 90, 1, 40), (30, 70)])
@pytest.mark.parametrize("hooked", [False, True])
def test_the_last_layer_is_computed_for_those_alone_who_want_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: Sequence[int], hooked: bool
) -> None:
    steps, run_last = Steps(), DecoderModel._run_last

    def running_last(*arguments: Any) -> None:
        steps.calls.append(("last rows", 2))
        run_last(*arguments)

    hooks = steps if hooked else None
    info = describe(str(make_tiny_model(tmp_path / "tiny", "Llama", head_dim=32, num_hidden_layers=3)))
    harness = Harness(load_model(info, "bfloat16"), info.kv_spec("bfloat16", 16), num_slots=8 * len(lengths))
    prompts = [[token % info.vocab_size for token in random_prompt(seed, length)] for seed, length in enumerate(lengths)]
    batch = [SequenceChunk(prompt, 0, range(8 * i, 8 * i + 8), wants_logits=i != 1) for i, prompt in enumerate(prompts)]
    monkeypatch.setattr("engine.backends.native_cpu.attention.LEAST_SPARED", 1000)
    whole, wanted_arena = passes(harness, batch, hooks)
    logits = harness.runner.logits(batch, whole)
    monkeypatch.setattr("engine.backends.native_cpu.attention.LEAST_SPARED", 64)
    monkeypatch.setattr(DecoderModel, "_run_last", running_last)
    steps.calls.clear()
    narrow, arena = passes(harness, batch, hooks)
    layers = [(call, layer) for layer in range(3) for call in ("before", "after")] if hooked else []
    assert steps.calls == [*layers[:-1], ("last rows", 2), *layers[-1:]], "before anybody hears that the layer is done"
    ends = [sum(lengths[: i + 1]) - 1 for i in range(len(lengths)) if i != 1]
    apart = [i for i in range(len(whole)) if not torch.equal(narrow[i], whole[i])]
    assert len(apart) >= len(whole) - len(ends) and not torch.allclose(narrow.float(), whole.float(), atol=0.1)
    assert torch.allclose(harness.runner.logits(batch, narrow), logits, atol=0.02 * float(logits.abs().max()))
    differing = np.flatnonzero(arena != wanted_arena)
    assert len(differing) <= len(ends) * harness.spec.bytes_per_token // 3, "but for the last digits of the rows that were computed twice"


@needs_kernels
@pytest.mark.parametrize("wanted", [False, True])
def test_a_stage_before_the_last_one_computes_all_of_its_layers(tmp_path: Path, wanted: bool) -> None:
    info = describe(str(make_tiny_model(tmp_path / "tiny", "Llama", head_dim=32, num_hidden_layers=3)))
    spec, batch = info.kv_spec("bfloat16", 16), [SequenceChunk([5] * 40, 0, range(4), wants_logits=wanted)]
    whole, first, last = (Harness(load_model(info, "bfloat16", span), spec, num_slots=4) for span in ((0, 3), (0, 1), (1, 3)))
    for harness in (whole, first, last):
        harness.arena[:] = 0
    logits = last.runner.logits(batch, last.runner.forward_layers(batch, first.runner.forward_layers(batch, None)))
    assert torch.equal(logits, whole.runner.forward(batch))
    assert np.array_equal(first.arena | last.arena, whole.arena)


@needs_kernels
def test_layers_of_which_a_part_is_not_the_kernels_are_computed_one_by_one(tmp_path: Path) -> None:
    info = describe(str(make_tiny_model(tmp_path / "tiny", "Llama", head_dim=32, intermediate_size=127)))
    harness = Harness(load_model(info, "bfloat16"), info.kv_spec("bfloat16", 16), num_slots=4)
    plain = Harness(load_model(info, "bfloat16", kernels="plain"), harness.spec, num_slots=4)
    ours, theirs = (each.prefill([1, 2, 3, 4, 5], each.slots(5), chunk=3) for each in (harness, plain))
    assert (ours - theirs).abs().max() < 0.03 * theirs.abs().max()


@needs_kernels
def test_some_layers_and_heads_of_a_larger_arena_are_computed_in_place() -> None:
    whole = Geometry(8, 4, 32, 4, None, False, ()).arena(5)
    alone = Geometry(4, 2, 32, 4, None, False, ()).arena(5)
    qkv = torch.randn(6, 8, 32).bfloat16()
    results = []
    for arena in (whole[:, 1:, :, :, 2:], alone[:, 1:]):
        planned = backends.native().attention(arena, 4, [None, None]).plan([SequenceChunk([0] * 6, 0, [4, 2])])
        results.append(planned.run(1, qkv.clone(), Rotary(RopeConfig(), 32)(planned.positions), None))
    assert torch.equal(*results)
    assert torch.equal(whole[:, :, :, :, 2:].nan_to_num(7), alone.nan_to_num(7))
    assert whole[:, :, :, :, :2].isnan().all() and whole[:, :2].isnan().all()


@needs_kernels
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([SequenceChunk([0], 0, [3])], "slot 3 is outside the arena of 3 slots"),
        ([SequenceChunk([0], 0, [-1])], "slot -1 is outside the arena of 3 slots"),
        ([SequenceChunk([0] * 9, 0, [0, 1])], "2 slots of 4 tokens cannot hold 9 tokens"),
        ([SequenceChunk([0], -1, [0])], "a chunk of 1 tokens cannot begin at -1"),
    ],
)
def test_slots_that_do_not_hold_a_chunk_are_refused(batch: list[SequenceChunk], message: str) -> None:
    arena = Geometry(4, 2, 32, 4, None, False, ()).arena(3)
    with pytest.raises(ValueError, match=message):
        backends.native().attention(arena, 4, [None] * 3).plan(batch)


def test_slots_may_be_an_array() -> None:
    arena = torch.zeros(3, 1, 2, 4, 2, 32)
    planned = TorchAttention(arena, 4, [None]).plan([SequenceChunk([0] * 5, 0, np.array([2, 0], np.int32))])
    planned.run(0, torch.ones(5, 8, 32), Rotary(RopeConfig(), 32)(planned.positions), None)
    assert arena[2].all() and not arena[1].any()


def test_heads_that_the_kernels_are_not_made_for_are_computed_in_plain_torch() -> None:
    config = read_config(demo_gguf())
    assert backends.choose(replace(config, head_dim=80), torch.bfloat16).name == "plain"
    assert backends.choose(config, torch.float32).name == "plain"
    assert backends.choose(config, torch.float32).kernels == "torch"
    assert backends.choose(config, torch.bfloat16, "plain").name == "plain"
    with pytest.raises(ConfigError, match="kernels must be one of auto, plain, not 'fast'"):
        backends.choose(config, torch.bfloat16, "fast")
