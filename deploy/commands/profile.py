"""`springtide profile`: measures what prefill chunks and decode steps cost on this machine, and fits the cost models to it."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from deploy.machine import describe_machine
from engine.batch import SequenceChunk
from engine.formats.files import describe
from engine.loader import DTYPES, load_model
from engine.runner import ModelRunner
from engine.tensor_parallel.runner import Parallel, TensorParallelRunner
from springtide.blocks import blocks_for
from springtide.cost import DecodeCost, PrefillCost
from springtide.errors import ConfigError
from springtide.process import end_process

REPEATS = 3
RANK_TIMEOUT_S = 120.0
"""Longer than any pass that is measured."""
ARENA_BYTES = 1 << 30
CHUNKS = (16, 64, 128, 256, 512)
CACHED = (0, 256, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16)
CONTEXTS = (64, 512, 2048, 4096)


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    model: str
    dtype: str
    threads: int | None
    """Of each rank. None: as `springtide up` gives each of two engines."""
    tensor_parallel: int
    block_tokens: int
    max_context: int
    output: Path


@dataclass(frozen=True, slots=True)
class Sample:
    """A prefill chunk of `tokens` after `context` cached ones, or a decode step of `tokens` sequences with `context` tokens together."""

    tokens: int
    context: int
    median_ms: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The file. `prefill` and `decode` are the coefficients of springtide.cost; `error`: median of the fits' relative errors."""

    model: str
    dtype: str
    threads: int
    tensor_parallel: int
    machine: str
    date: str
    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    kv: dict[str, int]
    """Layers, KV heads and their size: what a token's KV takes, for the simulator."""
    samples: dict[str, list[Sample]]
    error: dict[str, float]


def profile(options: ProfileOptions) -> None:
    """Measures and writes the file. Raises ConfigError and UnsupportedModel as `engine.formats.files.describe` does, ConfigError also,
    before anything is measured, when the file cannot be written."""
    console = Console()
    if not os.access(options.output if options.output.exists() else options.output.parent, os.W_OK) or options.output.is_dir():
        raise ConfigError(f"--output: cannot write a file {options.output}")
    if options.dtype not in DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, not {options.dtype!r}")
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) // (2 * options.tensor_parallel))
    torch.set_num_threads(threads)
    info = describe(options.model)
    ranks = f", {options.tensor_parallel} ranks" if options.tensor_parallel > 1 else ""
    console.print(f"loading {info.name} ({options.dtype}{ranks}, {threads} threads)", highlight=False)
    with _Bench(options, threads, min(options.max_context, info.context_length)) as bench:
        prefill = [bench.prefill(new, cached) for new, cached in track(list(bench.prefill_grid()), "prefill chunks", console=console)]
        decode = [bench.decode(batch, context) for batch, context in track(list(bench.decode_grid()), "decode steps  ", console=console)]
    fitted = fit(prefill, decode)
    result = Profile(
        model=info.name,
        dtype=options.dtype,
        threads=threads,
        tensor_parallel=options.tensor_parallel,
        machine=describe_machine(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        prefill=astuple(fitted[0])[:3],
        decode=astuple(fitted[1]),
        kv={"layers": info.layers, "kv_heads": info.kv_heads, "head_dim": info.head_dim},
        samples={"prefill": prefill, "decode": decode},
        error={
            "prefill": _error(prefill, fitted[0].predict_ms),
            "decode": _error(decode, fitted[1].predict_ms),
        },
    )
    options.output.write_text(json.dumps(asdict(result), indent=2) + "\n")
    console.print(
        f"{options.output}: a prefill of 512 tokens takes {fitted[0].predict_ms(512):.0f} ms (median error of the fit "
        f"{result.error['prefill']:.1%}), a decode step of 8 sequences of 512 tokens {fitted[1].predict_ms(8, 8 * 512):.1f} ms "
        f"({result.error['decode']:.1%})",
        highlight=False,
        soft_wrap=True,
    )


def fit(prefill: Sequence[Sample], decode: Sequence[Sample]) -> tuple[PrefillCost, DecodeCost]:
    return (
        PrefillCost.fit([(sample.tokens, sample.context, sample.median_ms) for sample in prefill]),
        DecodeCost.fit([(sample.tokens, sample.context, sample.median_ms) for sample in decode]),
    )


class _Bench:
    """The model over memory of its own. What is computed is the same whatever the token ids, so they are arbitrary."""

    def __init__(self, options: ProfileOptions, threads: int, max_context: int) -> None:
        info = describe(options.model)
        spec = info.kv_spec(options.dtype, options.block_tokens)  # type: ignore[arg-type]  # `profile` refuses what is no dtype
        self._block_tokens = options.block_tokens
        self._max_context = max_context
        self._num_slots = ARENA_BYTES // spec.bytes_per_slot
        if self._num_slots < blocks_for(max_context, options.block_tokens):
            raise ConfigError(f"max_context: {max_context} tokens need more than the {ARENA_BYTES >> 30} GiB that are measured in")
        arena = np.zeros(self._num_slots * spec.bytes_per_slot, np.uint8)
        with ExitStack() as own:
            if options.tensor_parallel == 1:
                self._runner = ModelRunner(load_model(info, options.dtype), spec, arena, self._num_slots)
            else:
                meeting = Path(own.enter_context(TemporaryDirectory())) / "ranks"
                parallel = Parallel([None] * options.tensor_parallel, threads, RANK_TIMEOUT_S, meeting, on_lost=end_process)
                self._runner = TensorParallelRunner.start(info, options.dtype, spec, arena, self._num_slots, parallel)
            own.callback(self._runner.close)
            self._own = own.pop_all()

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self._own.close()

    def prefill_grid(self) -> Iterator[tuple[int, int]]:
        """(new tokens, cached tokens) that fit."""
        yield from ((new, cached) for new in CHUNKS for cached in CACHED if new + cached <= self._max_context)

    def decode_grid(self) -> Iterator[tuple[int, int]]:
        """(batch, context of each sequence) that fit, no two sequences sharing memory: shared blocks would be in the CPU's caches."""
        for batch in BATCHES:
            for context in CONTEXTS:
                if context <= self._max_context and batch * blocks_for(context, self._block_tokens) <= self._num_slots:
                    yield batch, context

    def prefill(self, new: int, cached: int) -> Sample:
        slots = range(blocks_for(new + cached, self._block_tokens))
        return Sample(new, cached, self._median_ms([SequenceChunk([1] * new, cached, slots)]))

    def decode(self, batch: int, context: int) -> Sample:
        """A step of `batch` sequences, each with `context` tokens, its new one included."""
        stride = blocks_for(context, self._block_tokens)
        chunks = [SequenceChunk([1], context - 1, range(index * stride, (index + 1) * stride)) for index in range(batch)]
        return Sample(batch, batch * context, self._median_ms(chunks))

    def _median_ms(self, batch: list[SequenceChunk]) -> float:
        self._runner.forward(batch)  # memory and kernels of this shape are warm from here on
        times = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            self._runner.forward(batch)
            times.append((time.perf_counter() - started) * 1e3)
        return statistics.median(times)


def _error(samples: Sequence[Sample], predict_ms: Callable[[int, int], float]) -> float:
    return statistics.median(abs(predict_ms(sample.tokens, sample.context) / sample.median_ms - 1) for sample in samples)
