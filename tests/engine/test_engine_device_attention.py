"""What FlashInfer is told of a batch, and steps of a fixed size."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends import choice as backends
from engine.backends.flashinfer.attention import FlashInferAttention, try_out, workspace_bytes
from engine.backends.flashinfer.paged_batch import paged_batch
from engine.backends.plain import TorchAttention
from engine.batch import SequenceChunk
from engine.device.base import Device
from engine.formats.files import read_config
from engine.layers.rope import Rotary
from engine.model.cuda_graphs import SIZES, StepGraphs, as_it_is, size_for, sizes_up_to
from engine.model_config import RopeConfig
from springtide.modelinfo import ModelInfo
from tests.support import flashinfer_twin

PAGES, SIZE, HEADS, KV_HEADS, DIM = 20, 16, 4, 2, 32
CPU = torch.device("cpu")


def chunk(start: int, tokens: int, *pages: int) -> SequenceChunk:
    return SequenceChunk([1] * tokens, start, pages)


def test_a_page_table_says_where_keys_are_and_where_new_ones_go() -> None:
    table = paged_batch([chunk(30, 5, 7, 3, 9, 11), chunk(15, 1, 4), chunk(32, 1, 2, 0, 6)], SIZE, PAGES)
    assert table.row_begins.tolist() == [0, 5, 6, 7]
    assert table.page_begins.tolist() == [0, 3, 4, 7]
    assert table.pages.tolist() == [7, 3, 9, 4, 2, 0, 6]
    assert table.last_page_tokens.tolist() == [3, 16, 1]
    assert table.positions.tolist() == [30, 31, 32, 33, 34, 15, 32]
    rows = [(3, 14), (3, 15), (9, 0), (9, 1), (9, 2), (4, 15), (6, 0)]
    assert table.key_rows.tolist() == [page * 2 * SIZE + offset for page, offset in rows]
    assert table.begun_pages.tolist() == [9, 6]
    assert {array.dtype for array in (table.row_begins, table.page_begins, table.pages, table.last_page_tokens)} == {np.dtype(np.int32)}


def test_pages_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="pages 3 to 20 are not all among the 20"):
        paged_batch([chunk(0, 20, 3, 20)], SIZE, PAGES)


def fresh_pages(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(2, PAGES, 2, SIZE, KV_HEADS, DIM).transpose(0, 1)


BATCHES = {
    "one prompt": [chunk(0, 40, 3, 1, 2)],
    "a prompt that goes on": [chunk(21, 30, 3, 1, 2, 5)],
    "one token each": [chunk(21, 1, 3, 1), chunk(15, 1, 4), chunk(64, 1, 6, 7, 8, 9, 10), chunk(0, 1, 11)],
    "both": [chunk(21, 1, 3, 1), chunk(3, 50, 4, 6, 7, 8), chunk(32, 1, 9, 10, 11), chunk(0, 2, 12)],
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("windows", [(None, None), (24, None), (5, 5)])
def test_attention_is_that_of_plain_torch_and_so_are_the_pages(kind: str, windows: Sequence[int | None]) -> None:
    batch = BATCHES[kind]
    rows = sum(len(one.token_ids) for one in batch)
    results = []
    for make in (
        lambda pages: TorchAttention(pages, HEADS, windows),
        lambda pages: FlashInferAttention(flashinfer_twin, SIZES[-1], pages, HEADS, windows),
    ):
        pages = fresh_pages(0)
        planned = make(pages).plan(batch)
        rotation = Rotary(RopeConfig(), DIM)(planned.positions)
        torch.manual_seed(1)
        outputs = [planned.run(layer, torch.randn(rows, HEADS + 2 * KV_HEADS, DIM), rotation, None) for layer in range(2)]
        results.append((outputs, pages))
    for ours, theirs in zip(*(outputs for outputs, _ in results), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")
@pytest.mark.parametrize("name", ["BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"])
def test_the_twin_takes_only_what_flashinfer_takes(name: str) -> None:
    import flashinfer

    for method in ("__init__", "plan", "run"):
        real = inspect.signature(getattr(getattr(flashinfer, name), method)).parameters
        twin = inspect.signature(getattr(getattr(flashinfer_twin, name), method)).parameters
        positional = [parameter.name for parameter in twin.values() if parameter.default is parameter.empty]
        assert list(real)[: len(positional)] == positional
        # The decode wrapper's plan takes its options as they come.
        assert "kwargs" in real or set(twin) <= set(real)


class Doubling:
    """Records nothing, and tells how often it was asked to."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, compute: Any) -> Any:
        self.recorded += 1
        return as_it_is(compute)


def test_the_size_of_a_step_is_the_least_that_holds_the_batch() -> None:
    assert [size_for(count) for count in (1, 2, 3, 5, 64, 65)] == [1, 2, 4, 8, 64, 128]
    assert size_for(SIZES[-1] + 1) is None
    assert [sizes_up_to(count)[-1] for count in (1, 2, 3, 64, 65, 5000)] == [1, 2, 4, 64, 128, 256]


class TinyModel:
    """One layer of attention and nothing else: logits are its first dimensions."""

    class config:
        experts = None
        layers = 2

    begin, end = 0, 2

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.arange(1, (HEADS + 2 * KV_HEADS) * DIM + 1) * (tokens[:, None] + 1.0))

    def run_layers(self, hidden: torch.Tensor, attention: Any, hooks: None) -> torch.Tensor:
        rotation = Rotary(RopeConfig(), DIM)(attention.positions)
        qkv = hidden.view(len(hidden), -1, DIM)
        return torch.stack([attention.run(layer, qkv.clone(), rotation, None) for layer in range(2)]).sum(0)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, 0]


def test_a_step_that_is_filled_up_gives_what_the_batch_alone_gives_and_touches_nobody_s_page() -> None:
    scratch = PAGES - 1
    batch = [SequenceChunk([5], 21, (3, 1)), SequenceChunk([6], 15, (4,)), SequenceChunk([7], 40, (6, 7, 8))]
    pages, untouched = fresh_pages(2), fresh_pages(2)
    record, model = Doubling(), TinyModel()
    steps = StepGraphs(FlashInferAttention(flashinfer_twin, SIZES[-1], pages, HEADS, (None, None)), scratch, CPU, record)
    assert steps.fits(model, batch)  # type: ignore[arg-type]
    ours = [steps.run(model, batch).clone() for _ in range(2)]  # type: ignore[arg-type, union-attr]
    planned = TorchAttention(untouched, HEADS, (None, None)).plan(batch)
    theirs = model.logits(model.run_layers(model.embed(torch.tensor([5, 6, 7])), planned, None))
    for logits in ours:
        torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-5)
    others = [page for page in range(PAGES) if page != scratch]
    assert torch.equal(pages[others], untouched[others])
    assert record.recorded == 1, "it is recorded once"


def test_sizes_are_recorded_before_they_are_needed_the_largest_first() -> None:
    model, record = TinyModel(), Doubling()
    steps = StepGraphs(FlashInferAttention(flashinfer_twin, 4, fresh_pages(5), HEADS, (None, None)), PAGES - 1, CPU, record, most=3)
    steps.record_all(model)  # type: ignore[arg-type]
    assert list(steps.recorded) == [4, 2, 1] and not steps.failed
    assert steps.run(model, [SequenceChunk([5], 21, (3, 1))]) is not None  # type: ignore[arg-type]
    assert record.recorded == 3
    assert not steps.fits(model, [SequenceChunk([5], 0, (page,)) for page in range(5)]), "more than were asked for"  # type: ignore[arg-type]


def test_a_size_that_cannot_be_recorded_is_said_once_and_left_to_others(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(compute: Any) -> Any:
        if compute().shape[0] == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return compute

    one, two = [SequenceChunk([5], 21, (3, 1))], [SequenceChunk([5], 21, (3, 1)), SequenceChunk([6], 15, (4,))]
    model = TinyModel()
    steps = StepGraphs(FlashInferAttention(flashinfer_twin, 2, fresh_pages(3), HEADS, (None, None)), PAGES - 1, CPU, refuse, most=2)
    assert steps.run(model, two) is None  # type: ignore[arg-type]
    assert not steps.fits(model, two) and steps.fits(model, one)  # type: ignore[arg-type]
    assert steps.run(model, one) is not None  # type: ignore[arg-type]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert (list(steps.recorded), list(steps.failed)) == ([1], [2])


def test_an_error_of_a_step_that_is_replayed_is_raised() -> None:
    def broken(compute: Any) -> Any:
        def replay() -> torch.Tensor:
            raise RuntimeError("an illegal memory access was encountered")

        return replay

    batch, model = [SequenceChunk([5], 21, (3, 1))], TinyModel()
    steps = StepGraphs(FlashInferAttention(flashinfer_twin, 1, fresh_pages(3), HEADS, (None, None)), PAGES - 1, CPU, broken)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            steps.run(model, batch)  # type: ignore[arg-type]
    assert not steps.failed


def test_the_workspace_has_room_for_the_parts_of_the_largest_step() -> None:
    """On an H100, of 132 multiprocessors."""
    assert workspace_bytes(132, 64, heads=32, kv_heads=8, head_dim=128) == 394 << 20
    assert workspace_bytes(132, 256, heads=32, kv_heads=8, head_dim=128) == 32 * 256 * 128 * 129 * 4
    assert workspace_bytes(132, 64, heads=32, kv_heads=1, head_dim=128) == 32 * 264 * 128 * 129 * 4


def test_what_is_tried_out_is_a_prompt_and_a_step_with_every_window() -> None:
    planned: list[tuple[str, int]] = []

    class Watched(flashinfer_twin.BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *given: Any, **how: Any) -> None:
            planned.append(("prompt", how["window_left"]))
            super().plan(*given, **how)

    class WatchedStep(flashinfer_twin.BatchDecodeWithPagedKVCacheWrapper):
        def plan(self, *given: Any, **how: Any) -> None:
            planned.append(("step", how["window_left"]))
            super().plan(*given, **how)

    library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Watched, BatchDecodeWithPagedKVCacheWrapper=WatchedStep)
    try_out(library, CPU, torch.float32, 4, DIM, (None, 24))
    assert set(planned) == {("prompt", -1), ("prompt", 23), ("step", -1), ("step", 23)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it may run")
def test_where_flashinfer_cannot_run_attention_is_plain_torch_and_the_log_says_why_once(
    demo_info: ModelInfo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_twin)
    config, device = read_config(Path(demo_info.path)), Device(torch.device("cuda", 0))
    assert backends.flashinfer_can_run(config, torch.bfloat16)
    chosen = [backends.choose(config, torch.bfloat16, "auto", device) for _ in range(2)]
    assert [(backend.name, backend.device) for backend in chosen] == [("plain", device)] * 2
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "FlashInfer cannot be used" in said and "nvcc" in said


def test_a_cuda_device_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="cuda:0, not cuda"):
        Device(torch.device("cuda"))


def test_backends_without_fixed_steps_are_left_as_they_are() -> None:
    batch, model = [SequenceChunk([5], 21, (3, 1))], TinyModel()
    steps = StepGraphs(TorchAttention(fresh_pages(4), HEADS, (None, None)), PAGES - 1, CPU, as_it_is)
    assert steps.run(model, batch) is None  # type: ignore[arg-type]
