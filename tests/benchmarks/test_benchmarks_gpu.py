"""The benchmark of GPUs runs from end to end, with a tiny model on a CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu, results
from benchmarks.gpu_engine import hidden_percent, matrix_flops, step_bytes


def test_it_measures_every_row_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path_factory.mktemp("results")
    monkeypatch.setattr(results, "RESULTS", directory)
    gpu.main(["--tiny", "--device", "cpu"])
    printed = capsys.readouterr().out
    for row in (
        "TFLOP/s",
        "prefill, MFU: 100 tokens",
        "decode, MBU: batch 3",
        "layer-wise store",
        "layer-wise load",
        "hand-over",
        "transformers",
    ):
        assert row in printed
    assert not list(directory.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main([])
    assert ended.value.code == 1 and "there is no GPU to measure" in capsys.readouterr().err


def test_operations_and_bytes_are_those_of_the_model() -> None:
    config = gpu.LLAMA_3_8B.config
    # 8.03e9 parameters with an embedding of 128256 x 4096; attention does 4 * 4096 * 32 operations for each of half a square.
    products = 2 * (8.03e9 - 2 * 128_256 * 4096) * 8192 + 2 * 128_256 * 4096
    assert matrix_flops(config, 8192, 0) == pytest.approx(products + 4 * 4096 * 32 * 8192**2 / 2, rel=2e-3)
    per_token = 2 * 32 * 8 * 128 * 2
    assert step_bytes(config, per_token, 4, 1000, 2) == pytest.approx(2 * (8.03e9 - 128_256 * 4096) + 4000 * per_token, rel=2e-3)


def test_what_is_hidden_is_what_was_not_waited_for() -> None:
    assert hidden_percent([10.0, 20.0, 40.0], [1.0, 0.0, 40.0]) == (90.0, (0.0, 100.0))
