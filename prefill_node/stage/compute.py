"""A stage's part of a pass over the model, on the thread that runs it."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from engine.batch import SamplingRow, SequenceChunk
from engine.device.memory import put
from engine.runner import ModelRunner
from engine.sampling.sampler import sample
from messenger.base import TransferTimeout
from springtide.errors import PeerLost
from springtide.ids import AttemptId
from springtide.protocol.outputs import SampledToken

logger = logging.getLogger(__name__)

WaitLayer = Callable[[AttemptId, int, float], int | None]
"""As `StoreLink.wait_layer`."""


class Outcome(enum.Enum):
    DONE = enum.auto()
    VOID = enum.auto()
    """A stage before has not done it."""
    PREFIX_MISSING = enum.auto()
    """It was truncated."""
    PREFIX_OVERDUE = enum.auto()
    FAILED = enum.auto()


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a pass in one stage. `tokens`: at the last stage, one for each row that ends its prompt."""

    outcome: Outcome
    message: str = ""
    tokens: Sequence[SampledToken] = ()
    busy_ms: float = 0.0
    """That the layers took: of the thread that ran them, or of its device. Without waiting for the prefix."""
    waited_ms: float = 0.0
    """For the prefix."""


@dataclass(frozen=True, slots=True)
class Part:
    """`sampling` is set at the last stage, of which each row belongs to a chunk that wants logits."""

    pass_id: int
    chunks: Sequence[SequenceChunk]
    awaits: AttemptId | None
    """Whose prefix still arrives: its slabs of a layer are waited for before the layer runs."""
    report_layers: Collection[int]
    """Counted from the model's first: after these, and at most these, `computed` is called."""
    sampling: Sequence[SamplingRow] | None

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


class PrefixMissing(Exception):
    """The prefix that the pass waits for was truncated."""


@dataclass(slots=True)
class Hooks:
    """`first_layer`: that of the stage, counted from the model's first."""

    part: Part
    first_layer: int
    wait_layer: WaitLayer
    prefix_timeout_s: float
    computed: Callable[[int], None]
    """Called with the end of the layers that are computed, on the model's thread."""
    waited_s: float = field(default=0.0, init=False)

    def before(self, layer: int) -> None:
        """Raises PrefixMissing, TransferTimeout, PeerLost."""
        if self.part.awaits is None:
            return
        began = time.perf_counter()
        valid_blocks = self.wait_layer(self.part.awaits, self.first_layer + layer, self.prefix_timeout_s)
        self.waited_s += time.perf_counter() - began
        if valid_blocks is not None:
            raise PrefixMissing

    def after(self, layer: int) -> None:
        end = self.first_layer + layer + 1
        if end in self.part.report_layers:
            self.computed(end)


def compute(runner: ModelRunner, part: Part, incoming: torch.Tensor | None, outgoing: torch.Tensor | None, hooks: Hooks) -> Result:
    """The runner's layers of the pass. `incoming` [tokens, hidden] is None at the first stage, `outgoing`, where the result is left for
    the next one, at the last."""
    began = runner.work_clock()

    def result(outcome: Outcome, message: str = "", tokens: Sequence[SampledToken] = ()) -> Result:
        busy_s = runner.work_clock() - began - (hooks.waited_s if runner.waiting_counts else 0.0)
        return Result(outcome, message, tokens, max(0.0, busy_s) * 1000, hooks.waited_s * 1000 + runner.copy_times().load_waited_ms)

    try:
        hidden = runner.forward_layers(part.chunks, incoming, hooks)
        if outgoing is not None:
            put(hidden, outgoing)
        tokens = sample(runner.logits(part.chunks, hidden), part.sampling) if part.sampling else []
    except PrefixMissing:
        return result(Outcome.PREFIX_MISSING)
    except TransferTimeout:
        return result(Outcome.PREFIX_OVERDUE)
    except PeerLost as error:
        return result(Outcome.FAILED, error.message)
    except Exception as error:
        logger.exception("pass %d failed", part.pass_id)
        return result(Outcome.FAILED, f"the pass failed: {error!r}")
    return result(Outcome.DONE, tokens=tokens)
