"""The machines that the simulator knows by name: model shapes and nodes of today, with the rooflines fitted to profiles of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from simulator.hardware.hardware import Hardware, p90_error
from simulator.hardware.roofline import AllReduce, Elementwise, Floats, Line, Products
from simulator.hardware.shapes import BF16_BYTES, LLAMA2_70B, LLAMA3_8B, PRODUCTS_PER_LAYER, ModelShape
from simulator.hardware.times import PassTimes, StepTimes
from springtide.cost import DecodeCost, PrefillCost

MAX_BATCH = 256
TABLE_TOKENS = 16384
"""Passes of more tokens are in the compute-bound regime, where times grow by the same amount with every token."""
DEVICE_BYTES = 80e9
USED_OF_DEVICE = 0.9
"""The rest of a device's memory is for activations and buffers."""
ARENA_BYTES_PER_DEVICE = 125e9
"""1 TB for KV in a node of eight devices: an assumption; nodes of this kind are sold with 1 to 2 TB of DRAM."""

# What the cost models of nodes and Conductor are fitted to.
NEW_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
CACHED_TOKENS = (0, 1024, 4096, 16384, 65536, 131072)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, MAX_BATCH)
CONTEXTS = (64, 512, 2048, 8192, 32768)


@dataclass(frozen=True, slots=True)
class Machine:
    """An instance: `degree` devices of one accelerator, the model divided among them by tensor parallelism."""

    accelerator: str
    shape: ModelShape
    degree: int


MACHINES: Mapping[str, Machine] = {
    "a100-llama2-70b": Machine("a100", LLAMA2_70B, degree=8),
    "h100-llama2-70b": Machine("h100", LLAMA2_70B, degree=8),
    "a100-llama3-8b": Machine("a100", LLAMA3_8B, degree=1),
}
KNOWN = tuple(MACHINES)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The fitted parts of one machine."""

    products: Products
    elementwise: Elementwise
    embedding: Line
    all_reduce: AllReduce
    """Among the eight devices of a node."""
    between_nodes: Line
    """From one device to one of another node, each by its own interface."""

    @classmethod
    def read(cls, name: str, accelerator: str) -> Roofline:
        document: dict[str, Any] = json.loads(files(__package__).joinpath("fitted.json").read_text())
        operators, links = document["operators"][name], document["links"][accelerator]
        return cls(
            products=Products(**operators["products"]),
            elementwise=Elementwise(**operators["elementwise"]),
            embedding=Line(**operators["embedding"]),
            all_reduce=AllReduce(*(Line(**links["all_reduce"][protocol]) for protocol in ("prompt", "bulk"))),
            between_nodes=Line(**links["between_nodes"]),
        )

    def without_attention_ms(self, shape: ModelShape, degree: int, tokens: Floats, sampled: Floats) -> Floats:
        """The time of all of one forward pass over so many tokens, of which so many are sampled from, but what attention computes and
        reads."""
        degrees = np.array(float(degree))
        layer_ms = self.products.ms(shape.layer_weights, PRODUCTS_PER_LAYER, tokens, degrees) + self.elementwise.ms(tokens, degrees)
        layer_ms = layer_ms + self.products.launch_ms  # that of attention
        if degree > 1:
            layer_ms = layer_ms + 2 * self.all_reduce.ms(tokens * (shape.hidden * BF16_BYTES))
        head_ms = self.products.ms(shape.head_weights, 1, sampled, degrees)
        return np.asarray(self.embedding.ms(tokens) + shape.layers * layer_ms + head_ms)


def load(name: str) -> Hardware:
    """Raises ValueError for a name that is not in KNOWN."""
    if name not in MACHINES:
        raise ValueError(f"hardware {name!r} is not known; known are {', '.join(KNOWN)}")
    machine = MACHINES[name]
    shape, degree = machine.shape, machine.degree
    roofline = Roofline.read(name, machine.accelerator)
    passes, steps = times(roofline, shape, degree)
    device_tokens = int((degree * DEVICE_BYTES * USED_OF_DEVICE - shape.weight_bytes) // shape.kv_bytes_per_token)
    prefill = [(new, cached, passes.pass_ms([(new, cached)])) for new in NEW_TOKENS for cached in CACHED_TOKENS]
    decode = [
        (batch, batch * context, steps.step_ms(batch, batch * context))
        for batch in BATCHES
        for context in CONTEXTS
        if batch * context <= device_tokens
    ]
    prefill_cost, decode_cost = PrefillCost.fit(prefill), DecodeCost.fit(decode)
    return Hardware(
        name=name,
        num_layers=shape.layers,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        link_bytes_per_s=degree * 1e3 / roofline.between_nodes.per_unit_ms,
        arena_tokens=int(degree * ARENA_BYTES_PER_DEVICE // shape.kv_bytes_per_token),
        device_tokens=device_tokens,
        max_batch=MAX_BATCH,
        prefill_cost=prefill_cost,
        decode_cost=decode_cost,
        prefill_error=p90_error(prefill, prefill_cost),
        decode_error=p90_error(decode, decode_cost),
        passes=passes,
        steps=steps,
    )


def times(roofline: Roofline, shape: ModelShape, degree: int) -> tuple[PassTimes, StepTimes]:
    """Attention computes at the rate of the matrix products and reads KV at the rate at which they read weights."""
    read_ms = shape.kv_bytes_per_token / degree / roofline.products.bytes_per_s * 1e3
    pair_ms = shape.flops_per_pair / degree / roofline.products.flops_per_s * 1e3
    tokens = np.arange(1, TABLE_TOKENS + 1, dtype=np.float64)
    batches = np.arange(1, MAX_BATCH + 1, dtype=np.float64)
    # A pass samples from the last token of each of its few rows: within the floor of the LM head, whatever their number.
    by_tokens = roofline.without_attention_ms(shape, degree, tokens, np.ones(1))
    by_batch = roofline.without_attention_ms(shape, degree, batches, batches)
    return PassTimes((0.0, *by_tokens.tolist()), pair_ms, read_ms), StepTimes((0.0, *by_batch.tolist()), read_ms)
