"""Would it pay to compress what goes to the SSD? Codecs and quantisation on KV blocks that the demo model has really computed
(`make bench-kv-compression`; needs `pip install blosc2`)."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.driven import CHECKOUT, console, plain
from benchmarks.results import Row, show, write
from engine.batch import SequenceChunk
from engine.formats.files import demo_model, describe
from engine.loader import load_model
from engine.model.base import Model
from engine.runner import ModelRunner, arena_tensor
from engine.tokenizer.tokenizer import load_tokenizer
from springtide.modelinfo import KVSpec

TEXTS = ("docs/architecture.md", "README.md")
NUM_BLOCKS, TAIL_BLOCKS = 32, 4
"""Of a prompt; of these the last are computed again, on a prefix that has been quantised."""
ROUNDS = 5
SUBJECT = f"{NUM_BLOCKS} blocks of SmolLM2-135M-Instruct in bfloat16, the prompt being this project's architecture page and README."
CODEC_NOTES = f"{SUBJECT} c-blosc2 at level 1, each block on its own, one thread; rates of uncompressed bytes."
QUANTISATION_NOTES = (
    f"{SUBJECT} Next-token distributions of its last {TAIL_BLOCKS} blocks on a prefix that was quantised, against those on the exact one. "
    "One scale for each token and head, none for the bare cast."
)


class Prompt:
    """A prompt with its KV blocks."""

    def __init__(self, model: Model, spec: KVSpec, tokens: list[int]) -> None:
        self.model, self.spec, self.tokens = model, spec, tokens
        self.arena = np.zeros(NUM_BLOCKS * spec.bytes_per_slot, np.uint8)
        self._runner = ModelRunner(model, spec, self.arena, NUM_BLOCKS)
        self._runner.forward([SequenceChunk(tokens, 0, range(NUM_BLOCKS))])
        self._exact = self.arena.copy()

    def log_probabilities(self, quantise: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Those of every next token of the tail, float32 [tokens, vocabulary], the prefix having gone through `quantise` and back."""
        self.arena[:] = self._exact
        slots = arena_tensor(self.arena, self.spec, NUM_BLOCKS)[:-TAIL_BLOCKS]
        slots.copy_(quantise(slots.float()))
        start = len(self.tokens) - TAIL_BLOCKS * self.spec.block_tokens
        hidden = self._runner.forward_layers([SequenceChunk(self.tokens[start:], start, range(NUM_BLOCKS))], None)
        with torch.inference_mode():
            return self.model.logits(hidden).float().log_softmax(-1)


def int8(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
    return (x / scale).round() * scale


def fp8(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def fp8_bare(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def codecs(prompt: Prompt) -> list[Row]:
    import blosc2

    blocks = list(prompt.arena.view(np.uint16).reshape(NUM_BLOCKS, -1))
    rows = []
    for codec in (blosc2.Codec.LZ4, blosc2.Codec.ZSTD):
        for filter_ in (blosc2.Filter.NOFILTER, blosc2.Filter.SHUFFLE, blosc2.Filter.BITSHUFFLE):
            options = {"codec": codec, "filters": [filter_], "filters_meta": [0], "clevel": 1, "nthreads": 1}
            packed, compress = timed(partial(blosc2.compress2, **options), blocks)
            unpacked, decompress = timed(partial(blosc2.decompress2, nthreads=1), packed)
            assert b"".join(unpacked) == prompt.arena.tobytes()
            case = f"{codec.name}, {filter_.name}".lower()
            rows.append(Row("uncompressed / compressed", "", prompt.arena.nbytes / sum(map(len, packed)), case=case))
            for name, seconds in (("compress", compress), ("decompress", decompress)):
                rates = [prompt.arena.nbytes / duration / 1e9 for duration in seconds]
                rows.append(plain(name, "GB/s", rates, case))
    return rows


def timed(work: Callable[[Any], bytes], blocks: Sequence[Any]) -> tuple[list[bytes], list[float]]:
    """What it makes of each of `blocks`, and how long all of them took, each time."""
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        result = [work(block) for block in blocks]
        seconds.append(time.perf_counter() - started)
    return result, seconds


def quantisations(prompt: Prompt) -> list[Row]:
    exact = prompt.log_probabilities(lambda x: x)
    rows = []
    for name, quantise in (("int8", int8), ("fp8 e4m3", fp8), ("fp8 e4m3, bare", fp8_bare)):
        changed = prompt.log_probabilities(quantise)
        divergence = (exact.exp() * (exact - changed)).sum(-1)
        same = (exact.argmax(-1) == changed.argmax(-1)).float().mean()
        rows.append(Row("KL divergence of the next token, mean", "nat", divergence.mean().item(), case=name))
        rows.append(Row("KL divergence of the next token, greatest", "nat", divergence.max().item(), case=name))
        rows.append(Row("same most likely token", "%", 100 * same.item(), case=name))
    return rows


def main() -> None:
    if importlib.util.find_spec("blosc2") is None:
        sys.exit("blosc2 is not there: pip install blosc2")
    info = describe(str(demo_model()))
    spec = info.kv_spec("bfloat16", 64)
    text = "\n".join((CHECKOUT / name).read_text() for name in TEXTS)
    tokens = load_tokenizer(info).encode(text)[: NUM_BLOCKS * spec.block_tokens]
    assert len(tokens) == NUM_BLOCKS * spec.block_tokens, "the text is too short"
    prompt = Prompt(load_model(info, "bfloat16"), spec, tokens)
    for name, notes, measure, headline in (
        ("kv_codecs", CODEC_NOTES, codecs, "uncompressed / compressed: zstd, shuffle"),
        ("kv_quantisation", QUANTISATION_NOTES, quantisations, "KL divergence of the next token, mean: fp8 e4m3"),
    ):
        rows = measure(prompt)
        show(name, rows)
        console.print(write(name, "make bench-kv-compression", rows, notes, (headline,)))


if __name__ == "__main__":
    main()
