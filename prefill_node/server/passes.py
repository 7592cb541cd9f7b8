"""A pass on its way through the stages of a group: what it may take, what is sent of it, and what it comes to."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.link import StoreLink
from node_runtime.model_thread import longest_s
from prefill_node.core.actions import RunPass
from prefill_node.core.events import PassDone, PassEnded, PassFailed, PassGaveWay, PassInterrupted, PassLeft
from springtide.ids import AttemptId
from springtide.protocol import storage
from springtide.protocol.stages import StageOutcome, StagePassEnded
from springtide.protocol.timings import StageTimes

PassTeller = Callable[[RunPass, PassLeft | PassEnded], None]


@dataclass(frozen=True, slots=True)
class Launch:
    """A pass to be run. `link` is None where nothing is handed over. `tell` is called in the event loop; before it tells of the pass's end,
    `results` is called with what each stage says. `gives_way`: whether it is to be broken off; is asked on the model's thread, and where
    there are no further stages."""

    run: RunPass
    link: StoreLink | None
    tell: PassTeller
    results: Callable[[Sequence[StagePassEnded]], None] = lambda results: None
    gives_way: Callable[[], bool] = lambda: False


class Pushes:
    """The pushes of one stage's part of a pass, sorted by their last layer."""

    def __init__(self, pushes: Iterable[storage.Push]) -> None:
        self._waiting = deque(pushes)
        self.layer_ends = tuple(dict.fromkeys(push.layer_end for push in self._waiting))
        """Ends of the layers after which there is something to send."""

    def send(self, link: StoreLink, layer_end: int) -> None:
        """Sends those whose layers are all below. From any thread, one at a time."""
        while self._waiting and self._waiting[0].layer_end <= layer_end:
            link.send(self._waiting.popleft())


@dataclass(slots=True)
class StagedPass:
    """A pass that the stages are at."""

    launch: Launch
    pushes: Sequence[Pushes]
    """The pushes of each stage's part."""
    results: list[StagePassEnded | None]
    """What each stage says of its part, once it has ended."""
    heard_at: list[float] = field(init=False)
    """When the result of each stage was there."""
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.heard_at = [0.0] * len(self.results)

    @property
    def run(self) -> RunPass:
        return self.launch.run

    @property
    def ended(self) -> bool:
        """Whether no stage is at it any more."""
        return None not in self.results

    @property
    def through_at(self) -> float:
        """When the last of the results, so far, was there."""
        return max(self.heard_at)

    def times(self) -> tuple[StageTimes, ...]:
        """Each stage's part, once it has ended."""
        return tuple(
            StageTimes((heard_at - self.began) * 1000, result.busy_ms, result.waited_ms)
            for heard_at, result in zip(self.heard_at, self.results, strict=True)
            if result is not None
        )


def longest_pass_s(run: RunPass, lease_s: float, layers: int) -> float:
    """Seconds after which, with no other pass before it, a stage hangs. Each layer may wait `lease_s` for its part of a prefix that still
    arrives."""
    return longest_s(run.predicted_ms, lease_s if run.awaits is None else lease_s * layers)


def waits_for_prefix(run: RunPass, link: StoreLink | None, layers: int) -> bool:
    """The store is still at what the pass cannot go on without: it gives up by itself on sources that hang."""
    return run.awaits is not None and link is not None and link.waits(AttemptId(run.awaits), layers)


def conclude(run: RunPass, results: Sequence[StagePassEnded], elapsed_ms: float, stages: tuple[StageTimes, ...] = ()) -> PassEnded:
    """What the pass comes to, from what the stages say, the first one first."""
    why = next((result for result in results if result.outcome is not StageOutcome.DONE), None)
    waited_ms = sum(result.waited_ms for result in results)
    if why is None:
        ending = sum(row.sampling is not None for row in run.rows)
        sampled_tokens, refused = results[-1].tokens, {one.place: one.failure for one in results[-1].refused}
        if len(sampled_tokens) != ending:
            return PassFailed(run.pass_id, f"{len(sampled_tokens)} tokens were sampled for {ending} prompts that end in the pass")
        scoring = sum(row.scoring is not None for row in run.rows)
        if len(results[-1].scores) != scoring:
            return PassFailed(run.pass_id, f"{len(results[-1].scores)} rows were scored of {scoring} that want it")
        scores = iter(results[-1].scores)
        tokens = iter(refused.get(place, token) for place, token in enumerate(sampled_tokens))
        sampled = [next(tokens) if row.sampling is not None else None for row in run.rows]
        scored = [next(scores) if row.scoring is not None else None for row in run.rows] if scoring else ()
        return PassDone(run.pass_id, sampled, elapsed_ms, waited_ms, scored, stages=stages)
    if why.outcome is StageOutcome.VOID:
        return PassGaveWay(run.pass_id)
    if why.outcome in (StageOutcome.PREFIX_MISSING, StageOutcome.PREFIX_OVERDUE):
        return PassInterrupted(run.pass_id, why.outcome is StageOutcome.PREFIX_OVERDUE, waited_ms)
    return PassFailed(run.pass_id, why.message)
