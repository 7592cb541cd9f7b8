"""Hardware models: faithful to the profiles that they were fitted to, well-behaved where there was no measurement, and cheap to ask."""

import csv
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.hardware import KNOWN, Hardware, from_profile, load
from simulator.hardware.catalog import MACHINES, Roofline
from simulator.hardware.fit import ELEMENTWISE, PROFILES, fit_all_reduce, fit_elementwise, fit_line, fit_products, main
from simulator.hardware.regression import fit
from simulator.hardware.roofline import AllReduce, Elementwise, Line, Products
from simulator.hardware.shapes import LLAMA2_70B, LLAMA3_8B, PRODUCTS_PER_LAYER
from springtide.cost import DecodeCost, PrefillCost
from springtide.errors import ConfigError
from springtide.modelinfo import KVSpec

HARDWARE = {name: load(name) for name in KNOWN}
NAMES = st.sampled_from(KNOWN)
ROWS = st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 200_000)), min_size=2, max_size=8)

# What the products below are made of in the tests that find it again; not a machine of anybody's.
PRODUCTS = Products(launch_ms=0.004, bytes_per_s=1.2e12, flops_per_s=1.5e14, idle_tokens=40.0)
ELEMENTS = Elementwise(floor_ms=0.03, replicated_ms_per_token=2e-4, divided_ms_per_token=3e-4)
ALL_REDUCE = AllReduce(Line(0.02, 2e-8), Line(0.08, 8e-9))
TOKENS = np.array([1, 2, 4, *range(8, 512, 8), *range(512, 4097, 64)], dtype=np.float64)


@pytest.fixture(params=KNOWN)
def hardware(request: pytest.FixtureRequest) -> Hardware:
    return HARDWARE[request.param]


@pytest.mark.parametrize(
    ("name", "tokens", "measured_ms"),
    [
        ("a100-llama2-70b", 4096, 29.25),
        ("a100-llama2-70b", 1, 1.07),
        ("h100-llama2-70b", 4096, 10.09),
        ("h100-llama2-70b", 1, 0.59),
    ],
)
def test_a_layers_products_on_one_device_take_what_the_profiles_measured(name: str, tokens: int, measured_ms: float) -> None:
    products = Roofline.read(name, MACHINES[name].accelerator).products
    ms = products.ms(LLAMA2_70B.layer_weights, PRODUCTS_PER_LAYER, np.array([float(tokens)]), np.ones(1))
    assert ms[0] == pytest.approx(measured_ms, rel=0.05)


def test_no_rate_is_beyond_what_the_accelerators_maker_promises() -> None:
    peaks = {"a100": (2.04e12, 312e12), "h100": (3.35e12, 989e12)}
    for name, machine in MACHINES.items():
        products = Roofline.read(name, machine.accelerator).products
        bytes_per_s, flops_per_s = peaks[machine.accelerator]
        assert products.bytes_per_s < bytes_per_s
        assert products.flops_per_s < flops_per_s


def test_the_geometry_is_that_of_the_models() -> None:
    assert LLAMA2_70B.kv_bytes_per_token == 327_680
    assert LLAMA3_8B.kv_bytes_per_token == 131_072
    assert LLAMA2_70B.weight_bytes / 2 == pytest.approx(68.98e9, rel=1e-3)
    assert LLAMA3_8B.weight_bytes / 2 == pytest.approx(8.03e9, rel=1e-3)
    for name, machine in MACHINES.items():
        assert HARDWARE[name].kv_bytes_per_token == machine.shape.kv_bytes_per_token
        assert HARDWARE[name].num_layers == machine.shape.layers


def test_kv_and_weights_fit_in_the_memory_of_the_devices() -> None:
    for name, machine in MACHINES.items():
        used = HARDWARE[name].device_tokens * machine.shape.kv_bytes_per_token + machine.shape.weight_bytes
        assert 0.85 * machine.degree * 80e9 < used < machine.degree * 80e9


@given(NAMES, st.integers(1, 40_000), st.integers(0, 500_000), st.integers(1, 5_000))
def test_a_longer_pass_or_a_longer_prefix_takes_longer(name: str, new: int, before: int, more: int) -> None:
    hardware = HARDWARE[name]
    ms = hardware.pass_ms([(new, before)])
    assert hardware.pass_ms([(new + more, before)]) > ms
    assert hardware.pass_ms([(new, before + more)]) > ms


@given(NAMES, st.integers(1, 400), st.integers(0, 2_000_000), st.integers(1, 200))
def test_a_larger_batch_or_more_context_takes_longer(name: str, batch: int, context: int, more: int) -> None:
    hardware = HARDWARE[name]
    ms = hardware.step_ms(batch, context)
    assert hardware.step_ms(batch + more, context) > ms
    assert hardware.step_ms(batch, context + more) > ms


@given(NAMES, st.integers(1, 300), st.integers(0, 1_000_000), st.integers(0, 300))
def test_steps_take_what_they_take_one_by_one(name: str, batch: int, context: int, k: int) -> None:
    hardware = HARDWARE[name]
    one_by_one = sum(hardware.step_ms(batch, context + i * batch) for i in range(k))
    assert hardware.steps_ms(batch, context, k) == pytest.approx(one_by_one)


@given(NAMES, ROWS)
def test_rows_in_one_pass_take_less_than_each_in_its_own(name: str, rows: list[tuple[int, int]]) -> None:
    hardware = HARDWARE[name]
    assert hardware.pass_ms(rows) < sum(hardware.pass_ms([row]) for row in rows)


@given(NAMES, st.integers(1, 100_000))
def test_a_pass_of_one_token_is_a_step_of_one_sequence(name: str, context: int) -> None:
    hardware = HARDWARE[name]
    assert hardware.pass_ms([(1, context - 1)]) == pytest.approx(hardware.step_ms(1, context), rel=1e-9)


def test_no_tokens_take_no_time(hardware: Hardware) -> None:
    assert hardware.pass_ms([]) == 0.0
    assert hardware.step_ms(0, 0) == 0.0


def test_times_go_on_beyond_the_tables_as_they_end(hardware: Hardware) -> None:
    last = len(hardware.passes.by_tokens_ms) - 1
    table = hardware.passes.by_tokens_ms
    for beyond in (1, 10, 100_000):
        flat = hardware.pass_ms([(last + beyond, 0)]) - hardware.passes.per_pair_ms * (last + beyond) ** 2 / 2
        assert flat == pytest.approx(table[last] + beyond * (table[last] - table[last - 1]))


def test_what_nodes_predict_with_is_as_close_as_the_hardware_says(hardware: Hardware) -> None:
    assert hardware.prefill_error < 0.1
    assert hardware.decode_error < 0.1
    for new, cached in [(512, 0), (512, 100_000), (4096, 1024)]:
        predicted_ms = hardware.prefill_cost.predict_ms(new, cached)
        assert predicted_ms == pytest.approx(hardware.pass_ms([(new, cached)]), rel=hardware.prefill_error)
    for batch, context in [(32, 1000), (64, 4000)]:
        predicted_ms = hardware.decode_cost.predict_ms(batch, batch * context)
        assert predicted_ms == pytest.approx(hardware.step_ms(batch, batch * context), rel=hardware.decode_error)


def test_the_newer_accelerator_is_faster() -> None:
    old, new = HARDWARE["a100-llama2-70b"], HARDWARE["h100-llama2-70b"]
    assert new.pass_ms([(4096, 0)]) < 0.5 * old.pass_ms([(4096, 0)])
    assert new.step_ms(32, 100_000) < old.step_ms(32, 100_000)


def test_unknown_hardware_is_refused_and_the_known_is_named() -> None:
    with pytest.raises(ValueError, match=r"'tpu-v5'.*a100-llama2-70b, h100-llama2-70b, a100-llama3-8b"):
        load("tpu-v5")


# The fit


def test_constants_are_found_again_in_measurements_made_of_them() -> None:
    tokens, degree = np.tile(TOKENS, 2), np.repeat([1.0, 8.0], len(TOKENS))
    products = fit_products(tokens, degree, PRODUCTS.ms(LLAMA2_70B.layer_weights, PRODUCTS_PER_LAYER, tokens, degree), LLAMA2_70B)
    assert asdict(products) == pytest.approx(asdict(PRODUCTS), rel=1e-3)
    assert asdict(fit_elementwise(tokens, degree, ELEMENTS.ms(tokens, degree))) == pytest.approx(asdict(ELEMENTS), rel=1e-3)
    line = Line(0.02, 3e-5)
    assert asdict(fit_line(TOKENS, line.ms(TOKENS))) == pytest.approx(asdict(line), rel=1e-3)


def test_both_protocols_of_an_all_reduce_are_found_again() -> None:
    num_bytes = np.arange(2048, 64 << 20, 1 << 16, dtype=np.float64)
    found = fit_all_reduce(num_bytes, ALL_REDUCE.ms(num_bytes))
    assert asdict(found.prompt) == pytest.approx(asdict(ALL_REDUCE.prompt), rel=1e-3)
    assert asdict(found.bulk) == pytest.approx(asdict(ALL_REDUCE.bulk), rel=1e-3)


def test_noise_moves_the_constants_little() -> None:
    random = np.random.default_rng(7)
    ones = np.ones(len(TOKENS))
    noisy = PRODUCTS.ms(LLAMA2_70B.layer_weights, PRODUCTS_PER_LAYER, TOKENS, ones) * random.lognormal(0.0, 0.05, len(TOKENS))
    found = fit_products(TOKENS, ones, noisy, LLAMA2_70B)
    assert found.bytes_per_s == pytest.approx(PRODUCTS.bytes_per_s, rel=0.1)
    assert found.flops_per_s == pytest.approx(PRODUCTS.flops_per_s, rel=0.05)


@pytest.mark.parametrize("measured", [[1.0], [1.0, 0.0, 2.0]])
def test_a_fit_wants_enough_measurements_and_positive_ones(measured: list[float]) -> None:
    with pytest.raises(ValueError, match="2 constants need as many positive measurements"):
        fit(lambda constants: constants[0] + constants[1] * np.arange(len(measured)), (1.0, 1.0), np.array(measured))


def test_the_script_writes_constants_and_errors_from_a_directory_of_profiles(tmp_path: Path) -> None:
    for name, shape in PROFILES.items():
        _write(tmp_path / f"{name}-mlp.csv", [_operators(shape.layer_weights, tokens, degree) for degree in (1, 8) for tokens in TOKENS])
    for accelerator in ("a100", "h100"):
        _write(tmp_path / f"{accelerator}-dgx-all_reduce.csv", _messages("all_reduce", ALL_REDUCE, 8, 8))
        _write(tmp_path / f"{accelerator}-dgx-send_recv.csv", _messages("send_recv", AllReduce(Line(0.03, 1e-7), Line(0.03, 1e-7)), 2, 1))
    output = tmp_path / "fitted.json"
    assert main([str(tmp_path)], output) == 0
    document = json.loads(output.read_text())
    operators, links = document["operators"]["h100-llama2-70b"], document["links"]["a100"]
    assert operators["products"] == pytest.approx(asdict(PRODUCTS), rel=1e-2)
    assert operators["elementwise"] == pytest.approx(asdict(ELEMENTS), rel=1e-2)
    assert links["all_reduce"]["bulk"] == pytest.approx(asdict(ALL_REDUCE.bulk), rel=1e-2)
    assert links["between_nodes"] == pytest.approx(asdict(Line(0.03, 1e-7)), rel=1e-2)
    assert operators["errors"]["products"]["p90"] < 0.01
    assert "Vidur" in document["source"]


def test_the_script_wants_one_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "DIRECTORY" in capsys.readouterr().err


def _operators(weights: int, tokens: float, degree: int) -> dict[str, float]:
    products = float(PRODUCTS.ms(weights, PRODUCTS_PER_LAYER, np.array([tokens]), np.array([float(degree)]))[0])
    elements = float(ELEMENTS.ms(np.array([tokens]), np.array([float(degree)]))[0])
    ms = dict.fromkeys(("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj"), products / 4)
    ms |= dict.fromkeys(ELEMENTWISE, elements / len(ELEMENTWISE)) | {"emb": 0.003 + 1e-4 * tokens}
    columns = {f"time_stats.{operator}.median": value for operator, value in ms.items()}
    return columns | {"num_tokens": tokens, "num_tensor_parallel_workers": degree}


def _messages(operator: str, line: AllReduce, workers: int, per_node: int) -> Iterable[dict[str, float]]:
    sizes = np.arange(2048, 64 << 20, 1 << 17, dtype=np.float64)
    for size, ms in zip(sizes, line.ms(sizes), strict=True):
        yield {f"time_stats.{operator}.median": ms, "size": size, "num_workers": workers, "devices_per_node": per_node}


def _write(path: Path, rows: Iterable[dict[str, float]]) -> None:
    rows = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


# The machine of `springtide profile`

PREFILL = PrefillCost(fixed_ms=20.0, per_token_ms=0.5, per_pair_ms=1e-4)
DECODE = DecodeCost(fixed_ms=15.0, per_sequence_ms=2.0, per_context_token_ms=1e-3)


def _profile(**changed: Any) -> dict[str, Any]:
    prefill = [
        {"tokens": new, "context": cached, "median_ms": PREFILL.predict_ms(new, cached)}
        for new in (16, 64, 128, 256, 512)
        for cached in (0, 256, 1024, 4096)
    ]
    decode = [
        {"tokens": batch, "context": batch * context, "median_ms": DECODE.predict_ms(batch, batch * context)}
        for batch in (1, 2, 4, 8, 16)
        for context in (64, 512, 2048)
    ]
    return {"model": "smol", "samples": {"prefill": prefill, "decode": decode}} | changed


def _measured(path: Path, document: dict[str, Any]) -> Hardware:
    path.write_text(json.dumps(document))
    spec = KVSpec(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16")
    return from_profile(path, spec=spec, link_bytes_per_s=1e9, arena_tokens=40_000, max_batch=64)


def test_a_profiled_machine_takes_what_was_measured_on_it(tmp_path: Path) -> None:
    hardware = _measured(tmp_path / "profile.json", _profile())
    assert hardware.pass_ms([(100, 700)]) == pytest.approx(PREFILL.predict_ms(100, 700), rel=1e-3)
    assert hardware.pass_ms([(1000, 0)]) == pytest.approx(PREFILL.predict_ms(1000, 0), rel=1e-3)
    assert hardware.step_ms(6, 3000) == pytest.approx(DECODE.predict_ms(6, 3000), rel=1e-3)
    assert hardware.step_ms(40, 3000) == pytest.approx(DECODE.predict_ms(40, 3000), rel=1e-3)
    assert asdict(hardware.prefill_cost) == pytest.approx(asdict(PREFILL), rel=1e-3)
    assert asdict(hardware.decode_cost) == pytest.approx(asdict(DECODE), rel=1e-3)
    assert hardware.prefill_error < 1e-3
    assert (hardware.name, hardware.num_layers, hardware.kv_bytes_per_token) == ("smol", 30, 23_040)
    assert hardware.device_tokens == hardware.arena_tokens == 40_000


def test_a_sample_that_something_disturbed_changes_nothing(tmp_path: Path) -> None:
    document = _profile()
    document["samples"]["prefill"][9]["median_ms"] *= 10
    document["samples"]["decode"][7]["median_ms"] *= 10
    hardware = _measured(tmp_path / "profile.json", document)
    assert hardware.pass_ms([(128, 256)]) == pytest.approx(PREFILL.predict_ms(128, 256), rel=1e-2)
    assert hardware.step_ms(4, 2048) == pytest.approx(DECODE.predict_ms(4, 2048), rel=1e-2)


def test_larger_chunks_never_take_less_whatever_was_measured(tmp_path: Path) -> None:
    document = _profile()
    for sample in document["samples"]["prefill"]:
        if sample["tokens"] == 128:
            sample["median_ms"] = 5.0
    hardware = _measured(tmp_path / "profile.json", document)
    times = [hardware.pass_ms([(new, 0)]) for new in range(1, 600)]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"model": "smol"}, "not what `springtide profile` writes"),
        (_profile(samples={"prefill": [], "decode": []}), "'prefill'.* needs at least 3 samples"),
        (_profile(samples={"prefill": [{"tokens": 0, "context": 0, "median_ms": 1.0}], "decode": []}), "not what"),
        (_profile(samples={"prefill": [{"tokens": 1, "context": 0, "median_ms": 0.0}], "decode": []}), "not what"),
        ([], "not what"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _measured(tmp_path / "profile.json", document)


def test_a_profile_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    spec = KVSpec(layers=1, kv_heads=1, head_dim=8, dtype="bfloat16")
    with pytest.raises(ConfigError, match="cannot read"):
        from_profile(tmp_path / "none.json", spec=spec, link_bytes_per_s=1e9, arena_tokens=1, max_batch=1)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        from_profile(tmp_path / "broken.json", spec=spec, link_bytes_per_s=1e9, arena_tokens=1, max_batch=1)
