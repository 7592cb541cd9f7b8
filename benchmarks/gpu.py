"""The engine on a GPU (`make bench-gpu`): a model of Llama 3 8B's shape with random weights, against what the card does at best, and beside
transformers where that is installed.

`make bench-gpu ARGS="--tiny --device cpu"` runs the same code with a tiny model on a CPU, to see that it runs; nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console

from benchmarks.gpu_engine import Engine, Rates, hidden_percent, matrix_flops, rates, step_bytes
from benchmarks.results import Row, show, write
from engine.device.base import Device, find
from engine.loader import DTYPES
from engine.model_config import ModelConfig, RopeConfig
from springtide.blocks import blocks_for
from springtide.errors import ConfigError
from springtide.modelinfo import KVDtype

console = Console()
TRANSFORMERS = "transformers"
WANTED_MFU, WANTED_MFU_FROM, WANTED_MBU, WANTED_HIDDEN = 60.0, 8192, 85.0, 95.0


@dataclass(frozen=True, slots=True)
class Work:
    config: ModelConfig
    dtype: KVDtype
    block_tokens: int
    prompts: Sequence[int]
    chunk_tokens: int
    batches: Sequence[int]
    context: int
    """Of each sequence of a decode step."""
    cached: int
    """Tokens of a prefix that is loaded from the arena."""
    hand_over: int
    most_peer_tokens: int
    """Of the longest prompt that transformers gets, which keeps whole layers' activations."""
    matrix_size: int
    copy_bytes: int
    repeats: int

    @property
    def arena_tokens(self) -> int:
        stride = blocks_for(self.context, self.block_tokens) * self.block_tokens
        return max(*self.prompts, max(self.batches) * stride, self.cached + self.chunk_tokens, self.hand_over)


LLAMA_3_8B = Work(
    config=ModelConfig(
        architecture="LlamaForCausalLM",
        layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab_size=128_256,
        context_length=131_073,
        norm_eps=1e-5,
        rope=RopeConfig(theta=500_000.0),
    ),
    dtype="bfloat16",
    block_tokens=64,
    prompts=(2048, 8192, 32_768, 131_072),
    chunk_tokens=8192,
    batches=(1, 2, 4, 8, 16, 32, 64, 128),
    context=1024,
    cached=32_768,
    hand_over=8192,
    most_peer_tokens=32_768,
    matrix_size=8192,
    copy_bytes=2 << 30,
    repeats=5,
)
TINY = Work(
    config=ModelConfig(
        architecture="LlamaForCausalLM",
        layers=2,
        hidden_size=64,
        intermediate_size=160,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab_size=300,
        context_length=512,
        norm_eps=1e-5,
        rope=RopeConfig(),
    ),
    dtype="float32",
    block_tokens=16,
    prompts=(40, 100),
    chunk_tokens=64,
    batches=(1, 3),
    context=50,
    cached=64,
    hand_over=70,
    most_peer_tokens=100,
    matrix_size=64,
    copy_bytes=1 << 20,
    repeats=2,
)


def measured(work: Work, device: Device, peer: bool) -> tuple[list[Row], str]:
    """And what computed them."""
    dtype = DTYPES[work.dtype]
    card = rates(device.torch_device, dtype, work.matrix_size, work.copy_bytes, work.repeats)
    rows = [
        Row("matrix products, at best", "TFLOP/s", card.flops / 1e12),
        Row("copies within its memory, at best", "GB/s", card.bytes_per_s / 1e9),
    ]
    engine = Engine(work.config, work.dtype, device, work.arena_tokens, work.block_tokens)
    backend = engine.backend
    ours = {**_prefills(engine, work), **_decodes(engine, work)}
    rest = _transfers(engine, work)
    engine.close()
    del engine
    theirs = _transformers(work, device) if peer else {}
    for (kind, number), seconds in ours.items():
        rows += _compared(kind, number, seconds, theirs.get((kind, number)), work, card)
    return rows + rest, backend


def _prefills(engine: Engine, work: Work) -> dict[tuple[str, int], list[float]]:
    return {("prefill", tokens): engine.prefill_s(tokens, work.chunk_tokens, work.repeats) for tokens in _said("prefill", work.prompts)}


def _decodes(engine: Engine, work: Work) -> dict[tuple[str, int], list[float]]:
    steps = 4 * work.repeats
    return {("decode", batch): engine.decode_s(batch, work.context, steps) for batch in _said("decode", work.batches)}


def _transfers(engine: Engine, work: Work) -> list[Row]:
    rows = []
    for tokens in _said("store", work.prompts):
        times = engine.stored(tokens, work.chunk_tokens, work.repeats)
        percent, spread = hidden_percent([t.store_ms for t in times], [t.store_waited_ms for t in times])
        rows.append(
            Row(
                "layer-wise store to the arena: hidden",
                "%",
                percent,
                spread,
                case=f"{tokens} tokens",
                rounds=work.repeats,
                **_wanted(percent, WANTED_HIDDEN),
            )
        )
    console.print(f"load: {work.cached} tokens")
    times = engine.loaded(work.chunk_tokens, work.cached, work.repeats)
    percent, spread = hidden_percent([t.load_ms for t in times], [t.load_waited_ms for t in times])
    rows.append(
        Row(f"layer-wise load of {work.cached} tokens before {work.chunk_tokens}: hidden", "%", percent, spread, rounds=work.repeats)
    )
    console.print(f"hand-over: {work.hand_over} tokens")
    taken_ms = [1e3 * seconds for seconds in engine.hand_over_s(work.hand_over, work.chunk_tokens, work.repeats)]
    name = f"hand-over of {work.hand_over} tokens: from the first token to the decode side's first step's"
    rows.append(Row(name, "ms", median(taken_ms), (min(taken_ms), max(taken_ms)), rounds=len(taken_ms)))
    return rows


def _transformers(work: Work, device: Device) -> dict[tuple[str, int], list[float]]:
    try:
        from benchmarks.gpu_transformers import Transformers
    except ImportError:
        console.print("transformers is not installed: ours alone")
        return {}
    if device.is_cuda:
        torch.cuda.empty_cache()
    model = Transformers(work.config, DTYPES[work.dtype], device.torch_device)
    runs: dict[tuple[str, int], Callable[[], list[float]]] = {}
    for tokens in work.prompts:
        if tokens <= work.most_peer_tokens:
            runs["prefill", tokens] = lambda tokens=tokens: model.prefill_s(tokens, work.repeats)  # type: ignore[misc]
    for batch in work.batches:
        runs["decode", batch] = lambda batch=batch: model.decode_s(batch, work.context, 2 * work.repeats)  # type: ignore[misc]
    taken = {}
    for key, run in runs.items():
        console.print(f"{TRANSFORMERS}: {key[0]} {key[1]}")
        try:
            taken[key] = run()
        except torch.OutOfMemoryError:
            console.print("it has not the memory for that")
    return taken


def _compared(kind: str, number: int, seconds: list[float], theirs: list[float] | None, work: Work, card: Rates) -> list[Row]:
    """The time beside transformers', and as a share of what the card could do."""
    config, item_bytes = work.config, DTYPES[work.dtype].itemsize
    if kind == "prefill":
        name, share, case = f"prefill, {number} tokens", "prefill, MFU", f"{number} tokens"
        at_best_s = matrix_flops(config, number, 0) / card.flops
        wanted = WANTED_MFU if number >= WANTED_MFU_FROM else None
    else:
        name, share, case = f"decode step of {number} with {work.context} tokens each", "decode, MBU", f"batch {number}"
        kv = 2 * config.layers * config.kv_heads * config.head_dim * item_bytes
        at_best_s = step_bytes(config, kv, number, work.context, item_bytes) / card.bytes_per_s
        wanted = WANTED_MBU
    taken_ms = [1e3 * one for one in seconds]
    peer = {} if theirs is None else {"peer": 1e3 * median(theirs), "peer_name": TRANSFORMERS, "ratio": median(theirs) / median(seconds)}
    percent = 100 * at_best_s / median(seconds)
    spread = (100 * at_best_s / max(seconds), 100 * at_best_s / min(seconds))
    return [
        Row(name, "ms", median(taken_ms), (min(taken_ms), max(taken_ms)), rounds=len(seconds), **peer),  # type: ignore[arg-type]
        Row(share, "%", percent, spread, case=case, rounds=len(seconds), **_wanted(percent, wanted)),
    ]


def _wanted(figure: float, wanted: float | None) -> dict[str, Any]:
    return {} if wanted is None else {"wanted": wanted, "met": figure >= wanted}


def _said(kind: str, numbers: Sequence[int]) -> Sequence[int]:
    console.print(f"{kind}: {', '.join(map(str, numbers))}")
    return numbers


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU computes in no time; nothing is written")
    parser.add_argument("--no-peer", action="store_true", help="without transformers; nothing is written")
    parser.add_argument("--no-graphs", action="store_true", help="launch decode steps kernel by kernel; nothing is written")
    options = parser.parse_args(arguments)
    work = TINY if options.tiny else LLAMA_3_8B
    try:
        device = find(options.device, step_graphs=0 if options.no_graphs else max(work.batches)) or Device(torch.device("cpu"))
    except ConfigError as error:
        parser.exit(1, f"there is no GPU to measure ({error}); --tiny --device cpu shows that this runs\n")
    rows, backend = measured(work, device, peer=not options.no_peer)
    show("Engine on a GPU" if device.is_cuda else "Engine on a CPU, as on a GPU", rows)
    if options.tiny or options.no_peer or options.no_graphs or not device.is_cuda:
        console.print("not the whole benchmark: nothing is written")
        return
    card = torch.cuda.get_device_name(device.torch_device)
    notes = (
        f"{card}; {backend} kernels, torch {torch.__version__}. A model of Llama 3 8B's shape with random weights in bfloat16. MFU: the "
        f"operations of a prompt's matrix products and attention, in chunks of {work.chunk_tokens} tokens, over those that the card does "
        "in the time, as measured before. MBU: the weights, keys and values that a step must read, over what the card copies in the time. "
        "Hidden: of the time that copies took, what the layers did not wait for."
    )
    print(write("gpu", "make bench-gpu", rows, notes))


if __name__ == "__main__":
    main(sys.argv[1:])
