"""How much of each attempt's transfers was hidden behind computing: one line for each prompt that was computed, and the metrics."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from prefill_node import metrics
from springtide.ids import AttemptId
from springtide.protocol.outputs import HandedOver, PrefillDone
from springtide.protocol.starts import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """How long a transfer took, and was waited for. `took_ms`: while bytes were on their way. `waited_ms`: how long the attempt waited for
    that, and for what goes with it: the store's word, the seal, slots at the other end. All times are measured."""

    took_ms: float
    waited_ms: float

    @property
    def hidden(self) -> float:
        """The share, at least, of `took_ms` that was in nobody's way."""
        return max(0.0, 1.0 - self.waited_ms / self.took_ms) if self.took_ms > 0 else 0.0


def fetch_of(done: PrefillDone) -> TransferTimes:
    """The fetch of the prefix from elsewhere: from the order until its last layer was here. Waited for by passes before layers that it had
    not reached, in all stages one after another, and by the group where it had nothing else to do."""
    return TransferTimes(done.fetch_ms, done.fetch_wait_ms)


def hand_over_of(handed_over: HandedOver, tail_ms: float) -> TransferTimes:
    """The hand-over: what the store wrote to the decode node's, while it wrote. Waited for after the first token, `tail_ms`, until the last
    write was acknowledged."""
    return TransferTimes(handed_over.write_ms, tail_ms)


@dataclass(slots=True)
class _Prompt:
    """A prompt from its start until its hand-over has ended."""

    request: Request
    done: PrefillDone | None = None
    computed_at: float = 0.0
    """When the last layer of the last chunk was, or hardly later: the first token was out."""


class PromptTransfers:
    """The transfers of all prompts that are under way here. Times in seconds, of any one clock."""

    def __init__(self) -> None:
        self._prompts: dict[AttemptId, _Prompt] = {}

    def started(self, request: Request) -> None:
        self._prompts.setdefault(request.attempt_id, _Prompt(request))

    def computed(self, done: PrefillDone, now: float) -> None:
        prompt = self._prompts.get(done.output.attempt_id)
        if prompt is None:
            return
        prompt.done, prompt.computed_at = done, now
        _count("fetch", fetch_of(done))
        if done.output.finish is not None:
            self._end(done.output.attempt_id, "no hand-over, for the first token was the last")

    def handed_over(self, handed_over: HandedOver, now: float) -> None:
        prompt = self._prompts.get(handed_over.attempt_id)
        if prompt is None or prompt.done is None:
            return
        tail_s = now - prompt.computed_at
        metrics.HAND_OVER_TAIL_SECONDS.observe(tail_s)
        transfer = hand_over_of(handed_over, 1000 * tail_s)
        _count("hand_over", transfer)
        self._end(handed_over.attempt_id, _hand_over_in_words(handed_over, transfer))

    def keep(self, attempt_ids: Collection[AttemptId]) -> None:
        """The others have ended: were never computed, or not handed over."""
        for attempt_id in self._prompts.keys() - attempt_ids:
            self._end(attempt_id, "the hand-over broke off")

    def _end(self, attempt_id: AttemptId, hand_over: str) -> None:
        prompt = self._prompts.pop(attempt_id)
        if prompt.done is None:
            return
        done, num_tokens = prompt.done, prompt.request.num_tokens
        logger.info(
            "prefill: %d tokens computed, %d cached, %d of them from elsewhere; %.1f ms queued, %.1f ms computing; %s; %s",
            num_tokens - done.cached_tokens,
            done.cached_tokens,
            done.remote_tokens,
            done.queue_ms,
            done.compute_ms,
            _fetch_in_words(fetch_of(done)),
            hand_over,
            extra={"request_id": prompt.request.request_id, "attempt_id": attempt_id},
        )


def _fetch_in_words(fetch: TransferTimes) -> str:
    if fetch.took_ms > 0:
        return f"fetch {fetch.took_ms:.1f} ms, {fetch.waited_ms:.1f} ms waited for, {fetch.hidden:.0%} hidden"
    return f"a fetch of which nothing came, {fetch.waited_ms:.1f} ms waited for" if fetch.waited_ms > 0 else "no fetch"


def _hand_over_in_words(handed_over: HandedOver, transfer: TransferTimes) -> str:
    if not handed_over.num_bytes:
        return "nothing to hand over, for the decode node had it"
    return (
        f"hand-over {handed_over.span_ms:.1f} ms from the first write to the last acknowledged, {transfer.took_ms:.1f} ms writing "
        f"{handed_over.num_bytes / 1e6:.1f} MB, {transfer.waited_ms:.1f} ms waited for after the first token, {transfer.hidden:.0%} hidden"
    )


def _count(name: str, transfer: TransferTimes) -> None:
    metrics.TRANSFER_SECONDS.labels(name, "waited").inc(transfer.waited_ms / 1000)
    metrics.TRANSFER_SECONDS.labels(name, "hidden").inc(max(0.0, transfer.took_ms - transfer.waited_ms) / 1000)
