"""One request and a sequence of them, as the simulator plays them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from springtide.protocol.scheduling import MAX_DEADLINE_MS

ID_TYPE = "I"
"""Of arrays of block ids: four bytes each, which is what the format of traces has room for."""


def block_count(tokens: int, block_tokens: int) -> int:
    """How many blocks hold so many tokens, the last of them possibly partial."""
    return -(-tokens // block_tokens)


def filled_by_output(input_tokens: int, output_tokens: int, block_tokens: int) -> int:
    """How many blocks become full while the output is generated. The last token is never fed back, so it has no KV."""
    return (input_tokens + max(output_tokens - 1, 0)) // block_tokens - input_tokens // block_tokens


@dataclass(frozen=True, slots=True)
class SimRequest:
    """Block ids are held in arrays and ranges: of a million requests with 512 tokens a block, one took 390 (`poisson`) to 570 bytes
    (`documents`) in all."""

    request_id: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    """The first of them comes from prefill."""
    blocks: Sequence[int]
    """One id for each block of the prompt, the last block possibly partial. Equal ids mean equal KV, and an id always follows the same
    id."""
    output_blocks: Sequence[int] = ()
    """One id for each block that becomes full while the output is generated, in order after the prompt's full blocks: what the next
    turn of a conversation finds. Empty where this is not known, as in published traces."""
    tenant: str = ""
    priority: int = 0
    deadline_ms: float = 0.0
    """From the arrival to the last token; 0 for none."""
    idle: bool = False
    """Only in capacity that nobody else wants."""

    def __hash__(self) -> int:
        return hash(self.request_id)

    def __post_init__(self) -> None:
        if self.input_tokens < 1 or self.output_tokens < 1:
            raise ValueError(
                f"request {self.request_id}: {self.input_tokens} input and {self.output_tokens} output tokens, 1 or more of each"
            )
        if not self.arrival_s >= 0.0:
            raise ValueError(f"request {self.request_id}: arrival {self.arrival_s} s, not below 0")
        if not 0.0 <= self.deadline_ms <= MAX_DEADLINE_MS:
            raise ValueError(f"request {self.request_id}: deadline {self.deadline_ms} ms, 0 to {MAX_DEADLINE_MS:.0f}")


@dataclass(frozen=True, slots=True)
class Workload:
    """Raises ValueError for requests out of order, or with a number of blocks that their lengths do not have."""

    name: str
    block_tokens: int
    requests: Sequence[SimRequest]
    """In order of arrival."""

    def __post_init__(self) -> None:
        size = self.block_tokens
        if size < 1:
            raise ValueError(f"block_tokens is {size}: 1 or more")
        if any(later.arrival_s < earlier.arrival_s for earlier, later in pairwise(self.requests)):
            raise ValueError(f"the requests of {self.name} are not in order of arrival")
        for request in self.requests:
            if len(request.blocks) != -(-request.input_tokens // size):
                raise ValueError(f"request {request.request_id}: {len(request.blocks)} blocks of {size} for {request.input_tokens} tokens")
            if request.output_blocks:
                filled = filled_by_output(request.input_tokens, request.output_tokens, size)
                if len(request.output_blocks) != filled:
                    raise ValueError(f"request {request.request_id}: its output fills {filled} blocks, not {len(request.output_blocks)}")

    @property
    def duration_s(self) -> float:
        """The time from the first arrival to the last; 0 for fewer than two requests."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0

    def sped_up(self, factor: float) -> Workload:
        """The same requests, arriving `factor` times as fast. Raises ValueError for a factor that is not above 0."""
        if not factor > 0.0:
            raise ValueError(f"a workload cannot be sped up by {factor}: more than 0")
        return replace(self, requests=[replace(request, arrival_s=request.arrival_s / factor) for request in self.requests])

    def first(self, n: int) -> Workload:
        """The workload of its first `n` requests, or all where it has fewer. Raises ValueError for a negative number."""
        if n < 0:
            raise ValueError(f"a workload has no first {n} requests")
        return replace(self, requests=self.requests[:n])

    def reuse_bound(self) -> float:
        """The share of the tokens in full blocks of prompts that a cache without limit would serve, were each request done before the next
        one comes. Partial blocks are never cached. 0 where no prompt has a full block."""
        seen: set[int] = set()
        full_blocks = 0
        reused = 0
        for request in self.requests:
            full = request.input_tokens // self.block_tokens
            before = len(seen)
            seen.update(request.blocks[:full])
            full_blocks += full
            reused += full - (len(seen) - before)
            seen.update(request.output_blocks)
        return reused / full_blocks if full_blocks else 0.0
