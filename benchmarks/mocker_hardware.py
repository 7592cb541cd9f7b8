"""The timing of Dynamo's mocker as a hardware model: what its engines are given, ours are given too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.hardware import Hardware, p90_error
from springtide.cost import DecodeCost, PrefillCost

NUM_BLOCKS, BLOCK_TOKENS = 16384, 64
"""Its defaults."""
TOTAL_TOKENS = NUM_BLOCKS * BLOCK_TOKENS
MAX_BATCH = 256
LINK_BYTES_PER_S = 64e9
KV_BYTES_PER_TOKEN = 131_072
"""Of Llama-3-8B in bfloat16; the mocker's engines of the mode compared with move no KV at all."""


@dataclass(frozen=True, slots=True)
class MockerPasses:
    """Milliseconds by the new tokens of all rows, whatever is cached before them."""

    def pass_ms(self, rows: Sequence[tuple[int, int]]) -> float:
        tokens = sum(new for new, _ in rows)
        return 4.209989e-7 * tokens * tokens + 1.518344e-2 * tokens + 16.50142


@dataclass(frozen=True, slots=True)
class MockerSteps:
    """Milliseconds by the share of the KV memory that the batch's context takes."""

    def step_ms(self, batch: int, context_tokens: int) -> float:
        share = min(context_tokens / TOTAL_TOKENS, 1.0)
        return -25.74 * share * share + 54.01 * share + 5.74

    def steps_ms(self, batch: int, context_tokens: int, k: int) -> float:
        first, more = context_tokens / TOTAL_TOKENS, batch / TOTAL_TOKENS
        sum_i, sum_ii = k * (k - 1) / 2, (k - 1) * k * (2 * k - 1) / 6
        squares = k * first * first + 2 * first * more * sum_i + more * more * sum_ii
        return -25.74 * squares + 54.01 * (k * first + more * sum_i) + 5.74 * k


def mocker_hardware() -> Hardware:
    passes, steps = MockerPasses(), MockerSteps()
    prefill = [(new, cached, passes.pass_ms([(new, cached)])) for new in (64, 256, 512, 1024, 2048, 4096, 8192) for cached in (0, 8192)]
    decode = [
        (n, c, steps.step_ms(n, c)) for n, c in ((1, 1000), (8, 50_000), (16, 200_000), (32, 400_000), (64, 700_000), (96, 1_000_000))
    ]
    prefill_cost, decode_cost = PrefillCost.fit(prefill), DecodeCost.fit(decode)
    return Hardware(
        name="the mocker's polynomials",
        num_layers=32,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        link_bytes_per_s=LINK_BYTES_PER_S,
        arena_tokens=TOTAL_TOKENS,
        device_tokens=TOTAL_TOKENS,
        max_batch=MAX_BATCH,
        prefill_cost=prefill_cost,
        decode_cost=decode_cost,
        prefill_error=p90_error(prefill, prefill_cost),
        decode_error=p90_error(decode, decode_cost),
        passes=passes,
        steps=steps,
    )
