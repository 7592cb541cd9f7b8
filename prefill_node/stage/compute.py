"""A stage's part of a pass over the model, on the thread that runs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch

from engine.batch import SamplingRow, Scoring, SequenceChunk
from engine.device.memory import put
from engine.runner import ModelRunner
from engine.sampling.sampler import Draw, sample
from engine.sampling.scoring import score
from messenger.base import TransferTimeout
from prefill_node.core.actions import PassRow, RunPass
from springtide.blocks import blocks_for
from springtide.errors import PeerLost
from springtide.ids import AttemptId
from springtide.protocol.outputs import Failure, PromptLogprobs, SampledToken
from springtide.protocol.stages import RefusedToken, StageOutcome, StagePass, StagePassEnded, StageRow, StageSampling, StageScoring

logger = logging.getLogger(__name__)

WaitLayer = Callable[[AttemptId, int, float], int | None]
"""What waits for a layer of a prefix, as `StoreLink.wait_layer` does."""
_NO_TOKEN = SampledToken(0)


@dataclass(frozen=True, slots=True)
class PassPart:
    """A stage's part of a pass. `sampling` and `scoring` are set at the last stage. Each row of `sampling` belongs to a chunk that wants
    logits."""

    pass_id: int
    chunks: Sequence[SequenceChunk]
    awaits: AttemptId | None
    """The attempt whose prefix still arrives: its slabs of a layer are waited for before the layer runs."""
    report_layers: Collection[int]
    """Ends of layers, counted from the model's first: after these, and at most these, `computed` is called."""
    sampling: Sequence[SamplingRow] | None
    scoring: Sequence[Scoring | None] = ()
    """Of each chunk; empty where none wants all of its logits."""

    @classmethod
    def of_run(cls, run: RunPass, report_layers: Collection[int], last: bool) -> PassPart:
        """The part of the first stage, in the process whose core has decided the pass. `last`: there is no further one."""
        return cls(
            pass_id=run.pass_id,
            chunks=[row.chunk for row in run.rows],
            awaits=run.awaits,
            report_layers=frozenset(report_layers),
            sampling=[row.sampling for row in run.rows if row.sampling is not None] if last else None,
            scoring=[row.scoring for row in run.rows] if last and run.scores else (),
        )

    @classmethod
    def of_order(cls, order: StagePass, last: bool) -> PassPart:
        """The part of a further stage. Only the first one embeds: chunks have as many tokens here, all of them 0."""
        sampling = [row.sampling for row in order.rows if row.sampling is not None]
        scoring = [None if row.scoring is None else Scoring(row.scoring.next_ids, row.scoring.num_top) for row in order.rows]
        return cls(
            pass_id=order.pass_id,
            chunks=[
                SequenceChunk((0,) * row.num_tokens, row.start, row.slots, row.sampling is not None, row.scoring is not None)
                for row in order.rows
            ],
            awaits=order.awaits,
            report_layers=order.report_layers,
            sampling=[SamplingRow(one.params, one.prompt_ids, one.output_ids) for one in sampling] if last else None,
            scoring=scoring if any(scoring) else (),
        )

    @property
    def num_tokens(self) -> int:
        """How many are computed."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)


def stage_order(run: RunPass, report_layers: Collection[int], last: bool, block_tokens: int) -> StagePass:
    """The order of a pass to a further stage."""
    rows = tuple(_stage_row(row, last, block_tokens) for row in run.rows)
    return StagePass(run.pass_id, rows, frozenset(report_layers), run.awaits)


def _stage_row(row: PassRow, last: bool, block_tokens: int) -> StageRow:
    chunk, own = row.chunk, row.sampling
    sampling = StageSampling(own.params, own.prompt_ids, own.output_ids) if last and own is not None else None
    scoring = StageScoring(row.scoring.next_ids, row.scoring.num_top) if last and row.scoring is not None else None
    slots = tuple(chunk.slots[: blocks_for(chunk.start + len(chunk.token_ids), block_tokens)])
    return StageRow(len(chunk.token_ids), chunk.start, slots, sampling, scoring)


class PrefixMissing(Exception):
    """The prefix that the pass waits for was truncated."""


class GaveWay(Exception):
    """The pass was broken off, for others."""


@dataclass(slots=True)
class Hooks:
    """What is done before and after each layer of a part. `first_layer`: the stage's first, counted from the model's."""

    part: PassPart
    first_layer: int
    wait_layer: WaitLayer
    prefix_timeout_s: float
    computed: Callable[[int], None]
    """Is called with the end of the layers that are computed, on the model's thread."""
    gives_way: Callable[[], bool] = lambda: False
    """Whether the pass is to be broken off. Is asked before each layer."""
    waited_s: float = field(default=0.0, init=False)

    def before(self, layer: int) -> None:
        """Waits for the prefix's slabs of the layer. Raises GaveWay, PrefixMissing, TransferTimeout, PeerLost."""
        if self.gives_way():
            raise GaveWay
        if self.part.awaits is None:
            return
        began = time.perf_counter()
        valid_blocks = self.wait_layer(self.part.awaits, self.first_layer + layer, self.prefix_timeout_s)
        self.waited_s += time.perf_counter() - began
        if valid_blocks is not None:
            raise PrefixMissing

    def after(self, layer: int) -> None:
        """Says where there is something to report."""
        end = self.first_layer + layer + 1
        if end in self.part.report_layers:
            self.computed(end)


def compute(
    runner: ModelRunner,
    part: PassPart,
    incoming: torch.Tensor | None,
    outgoing: torch.Tensor | None,
    hooks: Hooks,
    draw: Draw = sample,
) -> StagePassEnded:
    """Computes the runner's layers of the pass, on the thread that calls it. `incoming` [tokens, hidden] is None at the first stage,
    `outgoing`, where the result is left for the next one, at the last. `draw`: a Sampler's, where outputs may be held to grammars."""
    began = runner.work_clock()

    def ended(
        outcome: StageOutcome, message: str = "", drawn: Sequence[SampledToken | Failure] = (), scores: Sequence[PromptLogprobs] = ()
    ) -> StagePassEnded:
        busy_s = runner.work_clock() - began - (hooks.waited_s if runner.waiting_counts else 0.0)
        waited_ms = hooks.waited_s * 1000 + runner.copy_times().load_waited_ms
        return part_ended(part, outcome, message, drawn, scores, max(0.0, busy_s) * 1000, waited_ms)

    try:
        hidden = runner.forward_layers(part.chunks, incoming, hooks)
        if outgoing is not None:
            put(hidden, outgoing)
        scores = scores_of(runner, part, hidden) if part.scoring else []
        drawn = draw(runner.logits(part.chunks, hidden), part.sampling) if part.sampling else []
    except GaveWay:
        return ended(StageOutcome.VOID)
    except PrefixMissing:
        return ended(StageOutcome.PREFIX_MISSING)
    except TransferTimeout:
        return ended(StageOutcome.PREFIX_OVERDUE)
    except PeerLost as error:
        return ended(StageOutcome.FAILED, error.message)
    except Exception as error:
        logger.exception("pass %d failed", part.pass_id)
        return ended(StageOutcome.FAILED, f"the pass failed: {error!r}")
    return ended(StageOutcome.DONE, drawn=drawn, scores=scores)


def part_ended(
    part: PassPart,
    outcome: StageOutcome,
    message: str = "",
    drawn: Sequence[SampledToken | Failure] = (),
    scores: Sequence[PromptLogprobs] = (),
    busy_ms: float = 0.0,
    waited_ms: float = 0.0,
) -> StagePassEnded:
    """What is said of the part at its end. `drawn`: for each chunk that ends its prompt."""
    tokens = tuple(one if isinstance(one, SampledToken) else _NO_TOKEN for one in drawn)
    refused = tuple(RefusedToken(place, one) for place, one in enumerate(drawn) if isinstance(one, Failure))
    return StagePassEnded(part.pass_id, outcome, message, tokens, busy_ms, waited_ms, tuple(scores), refused)


def scores_of(runner: ModelRunner, part: PassPart, hidden: torch.Tensor, rows_before: int = 0) -> list[PromptLogprobs]:
    """Of the chunks that want all logits, from what came of the last layer. `rows_before`: of `hidden`, those that are not the part's."""
    between, vocab_size = partial(runner.logits_between, hidden), runner.model.config.vocab_size
    begins = accumulate((len(chunk.token_ids) for chunk in part.chunks), initial=rows_before)
    return [score(between, begin, wanted, vocab_size) for begin, wanted in zip(begins, part.scoring, strict=False) if wanted is not None]
