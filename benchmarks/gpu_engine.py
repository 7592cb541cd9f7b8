"""The engine on a device with a model of random weights, as benchmarks/gpu.py measures it: what is computed does not depend on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import torch

from engine.backends import choice as backends
from engine.batch import SequenceChunk
from engine.device.base import Device
from engine.device.streams import CopyTimes
from engine.formats.weights import Weights
from engine.loader import DTYPES
from engine.model.decoder import DecoderModel
from engine.model_config import ModelConfig
from engine.runner import ModelRunner
from engine.shard import OneRank
from springtide.blocks import blocks_for
from springtide.modelinfo import KVDtype, KVSpec

DEVIATION = 0.02


class RandomWeights(Weights):
    """Of any name and shape, made on the device."""

    def __init__(self, device: torch.device) -> None:
        self.path = Path("random weights")
        self._random = torch.Generator(device).manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return name.endswith((".weight", ".bias")) and "rope" not in name

    def read(self, name: str) -> torch.Tensor:
        raise NotImplementedError("they have no shape of their own")

    def shape(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError("they have no shape of their own")

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made = torch.randn(*shape, generator=self._random, device=self._random.device, dtype=dtype)
        return made.mul_(DEVIATION) if len(shape) > 1 else made.mul_(DEVIATION).add_(1)


def random_model(config: ModelConfig, dtype: KVDtype, device: Device) -> DecoderModel:
    if device.is_cuda:
        torch.cuda.set_device(device.torch_device)
    with torch.inference_mode():
        backend = backends.choose(config, DTYPES[dtype], "auto", device)
        return DecoderModel(config, RandomWeights(device.torch_device), DTYPES[dtype], backend, OneRank(), 0, config.layers)


def matrix_flops(config: ModelConfig, tokens: int, context: int) -> float:
    """Of prefilling `tokens` after `context` others: the products with the layers' weights, and attention, of which half a square is
    masked. The output head has one row."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    weights = config.layers * config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    attended = tokens * context + tokens * (tokens + 1) / 2
    return 2.0 * (weights * tokens + config.hidden_size * config.vocab_size) + 4.0 * attended * queries * config.layers


def step_bytes(config: ModelConfig, bytes_per_token: int, batch: int, context: int, item_bytes: int) -> float:
    """That a decode step must read: all weights but the embedding, of which it takes a row a sequence, and every sequence's keys and
    values."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    weights = config.layers * config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    return (weights + config.hidden_size * config.vocab_size) * item_bytes + float(batch * context * bytes_per_token)


@dataclass
class Rates:
    """Of the card, measured: operations and bytes a second, a byte that is copied counting twice."""

    flops: float
    bytes_per_s: float


def rates(device: torch.device, dtype: torch.dtype, size: int, num_bytes: int, repeats: int) -> Rates:
    """Of a product of square matrices, and of a copy within the device's memory."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product_s = best_s(device, lambda: a @ b, repeats)
    copy_s = best_s(device, lambda: target.copy_(source), repeats)
    return Rates(2.0 * size**3 / product_s, 2.0 * num_bytes / copy_s)


def best_s(device: torch.device, run: Callable[[], object], repeats: int) -> float:
    return min(all_s(device, run, repeats))


def all_s(device: torch.device, run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of the runs but the first, which warms up."""
    run()
    taken = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        taken.append(time.perf_counter() - began)
    return taken


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class LayerWise:
    """Hooks of a prefill that hands its layers over: a layer's slabs are copied to another arena by another thread, as a store does it."""

    source: np.ndarray
    target: np.ndarray
    slots: Sequence[int]
    helper: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    copies: list[Future[None]] = field(default_factory=list)

    def before(self, layer: int) -> None: ...

    def after(self, layer: int) -> None:
        self.copies.append(self.helper.submit(self._copy, layer))

    def _copy(self, layer: int) -> None:
        self.target[self.slots, layer] = self.source[self.slots, layer]

    def wait(self) -> None:
        for copy in self.copies:
            copy.result()
        self.copies.clear()


class NoHooks:
    """Tells the runner that every layer's slabs are wanted at once, and does nothing with them."""

    def before(self, layer: int) -> None: ...

    def after(self, layer: int) -> None: ...


class Engine:
    def __init__(self, config: ModelConfig, dtype: KVDtype, device: Device, num_tokens: int, block_tokens: int) -> None:
        """With an arena for so many tokens."""
        self.config = config
        self.spec = KVSpec(config.layers, config.kv_heads, config.head_dim, dtype, block_tokens)
        self.device = device.torch_device
        self._model = random_model(config, dtype, device)
        self._num_slots = blocks_for(num_tokens, block_tokens) + 1
        self.runner, self._arena = self._new_runner(self._num_slots)

    @property
    def backend(self) -> str:
        return self._model.backend.name

    def _new_runner(self, num_slots: int) -> tuple[ModelRunner, np.ndarray]:
        arena = np.zeros(num_slots * self.spec.bytes_per_slot, np.uint8)
        return ModelRunner(self._model, self.spec, arena, num_slots), arena.reshape(num_slots, self.spec.layers, -1)

    def prefill_s(self, tokens: int, chunk: int, repeats: int) -> list[float]:
        """Seconds until the first token's logits, of a prompt of which nothing is cached."""
        return all_s(self.device, lambda: self._prefill(tokens, chunk, None), repeats)

    def stored(self, tokens: int, chunk: int, repeats: int) -> list[CopyTimes]:
        """Of the copies to the arena in such prefills, layer by layer: summed over a prompt's chunks."""
        self._prefill(tokens, chunk, NoHooks())
        return [self._prefill(tokens, chunk, NoHooks()) for _ in range(repeats)]

    def loaded(self, tokens: int, cached: int, repeats: int) -> list[CopyTimes]:
        """Of a pass of `tokens` after so many that are in the arena and not on the device."""
        slots = range(blocks_for(tokens + cached, self.spec.block_tokens))
        times = []
        for _ in range(repeats + 1):
            self.runner.forget(slots)
            self.runner.forward([SequenceChunk([1] * tokens, cached, slots)], NoHooks())
            times.append(self.runner.copy_times())
        return times[1:]

    def decode_s(self, batch: int, context: int, steps: int) -> list[float]:
        """Seconds of steps of so many sequences, the greedy token of each being read."""
        stride = blocks_for(context, self.spec.block_tokens)
        chunks = [SequenceChunk([1], context - 1, np.arange(i * stride, (i + 1) * stride, dtype=np.int32)) for i in range(batch)]
        return all_s(self.device, lambda: self.runner.forward(chunks).argmax(-1).tolist(), steps)

    def hand_over_s(self, tokens: int, chunk: int, repeats: int) -> list[float]:
        """Seconds from the first token on the prefill side until the second on the decode side, whose arena and pages are others."""
        block_tokens = self.spec.block_tokens
        slots = list(range(blocks_for(tokens + 1, block_tokens)))
        decode, arena = self._new_runner(len(slots))
        hooks = LayerWise(self._arena, arena, slots)
        taken = []
        for _ in range(repeats + 1):
            decode.forget(slots)
            self.runner.forget(slots)
            self._prefill(tokens, chunk, hooks)
            began = time.perf_counter()
            hooks.wait()
            decode.forward([SequenceChunk([1], tokens, slots)]).argmax(-1).tolist()
            taken.append(time.perf_counter() - began)
        hooks.helper.shutdown()
        decode.close()
        return taken[1:]

    def close(self) -> None:
        self.runner.close()

    def _prefill(self, tokens: int, chunk: int, hooks: NoHooks | LayerWise | None) -> CopyTimes:
        slots = range(blocks_for(tokens, self.spec.block_tokens))
        parts = []
        for begin in range(0, tokens, chunk):
            end = min(begin + chunk, tokens)
            logits = self.runner.forward([SequenceChunk([1] * (end - begin), begin, slots, wants_logits=end == tokens)], hooks)
            if hooks is not None:
                parts.append(self.runner.copy_times())
        logits.argmax(-1).tolist()
        return CopyTimes(
            store_ms=sum(part.store_ms for part in parts),
            # A chunk's pass returns when its copies are through, so that what each waits for is not hidden behind the next one.
            store_waited_ms=sum(part.store_waited_ms for part in parts),
        )


def hidden_percent(whole_ms: Sequence[float], waited_ms: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Median, least and greatest."""
    shares = [100.0 * (1.0 - waited / max(whole, 1e-9)) for whole, waited in zip(whole_ms, waited_ms, strict=True)]
    return median(shares), (min(shares), max(shares))
