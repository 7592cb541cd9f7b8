"""Random times and lengths, from a numpy Generator; and requests while a workload is put together: in any order, each with ids that nobody
else has."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from simulator.workload.request import ID_TYPE, SimRequest, Workload, block_count, filled_by_output

Labels = Callable[[int], tuple[str, int, float]]
"""Tenant, priority and deadline (ms) of the request with this number in order of addition."""


def arrival_times(rng: np.random.Generator, edges_s: Sequence[float], rates_per_s: Sequence[float]) -> list[float]:
    """The arrivals of a Poisson process whose rate is `rates_per_s[i]` from `edges_s[i]` to `edges_s[i + 1]`, in order."""
    expected = np.concatenate(([0.0], np.cumsum(np.diff(edges_s) * rates_per_s)))
    number = rng.poisson(expected[-1])
    # Given their number, the arrivals are independent and spread as the rate is: uniform in the expected number so far.
    times: list[float] = np.interp(np.sort(rng.uniform(0.0, expected[-1], number)), expected, edges_s).tolist()
    return times


def positive(rng: np.random.Generator, mean: float, cv: float, number: int) -> NDArray[np.float64]:
    """Log-normal, with this mean and coefficient of variation; all equal to the mean for a `cv` of 0."""
    variance = np.log1p(cv * cv)
    return rng.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), number)


def lengths(rng: np.random.Generator, mean: float, cv: float, number: int, longest: int) -> NDArray[np.int64]:
    """Numbers of tokens from 1 to `longest`, before that limit with this mean and coefficient of variation."""
    return np.clip(np.rint(positive(rng, mean, cv, number)), 1, longest).astype(np.int64)


class Draft:
    """Columns rather than objects, since a million requests pass through it."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._next_id = 0
        self._arrivals_s = array("d")
        self._input_tokens = array("q")
        self._output_tokens = array("q")
        self._blocks: list[Sequence[int]] = []
        self._output_blocks: list[Sequence[int]] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def take_ids(self, number: int) -> range:
        """Takes so many ids that were not taken before."""
        first, self._next_id = self._next_id, self._next_id + number
        return range(first, self._next_id)

    def add(self, arrival_s: float, input_tokens: int, output_tokens: int, blocks: Sequence[int], output_blocks: Sequence[int]) -> None:
        self._arrivals_s.append(arrival_s)
        self._input_tokens.append(input_tokens)
        self._output_tokens.append(output_tokens)
        self._blocks.append(blocks)
        self._output_blocks.append(output_blocks)

    def add_alone(self, arrival_s: float, input_tokens: int, output_tokens: int) -> None:
        """A request that has no block in common with any other."""
        self.add_after((), arrival_s, input_tokens, output_tokens)

    def add_after(self, prefix: Sequence[int], arrival_s: float, input_tokens: int, output_tokens: int) -> None:
        """A request whose first blocks are `prefix` and whose others are its own."""
        own = self.take_ids(block_count(input_tokens, self.block_tokens) - len(prefix))
        blocks = array(ID_TYPE, [*prefix, *own]) if prefix else own
        filled = filled_by_output(input_tokens, output_tokens, self.block_tokens)
        self.add(arrival_s, input_tokens, output_tokens, blocks, self.take_ids(filled) if filled else ())

    def workload(self, name: str, labels: Labels | None = None) -> Workload:
        """The requests in order of arrival, numbered so; those that arrive together in order of addition."""
        requests = []
        for number, at in enumerate(np.argsort(np.frombuffer(self._arrivals_s), kind="stable").tolist() if len(self) else []):
            tenant, priority, deadline_ms = labels(at) if labels else ("", 0, 0.0)
            requests.append(
                SimRequest(
                    number,
                    self._arrivals_s[at],
                    self._input_tokens[at],
                    self._output_tokens[at],
                    self._blocks[at],
                    self._output_blocks[at],
                    tenant,
                    priority,
                    deadline_ms,
                )
            )
        return Workload(name, self.block_tokens, requests)
