"""Who runs the passes that the core decides: this process alone, or a group of stages (prefill_node/server/group.py)."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from engine.runner import ModelRunner
from kvstore.link import StoreLink
from node_runtime.model_thread import ModelThread
from node_runtime.watchdog import Watchdog, longest_s, stalled_after_s
from prefill_node.core.actions import RunPass
from prefill_node.core.events import PassDone, PassEnded, PassFailed, PassInterrupted, PassLeft
from prefill_node.stage.compute import Hooks, Outcome, Result, compute
from prefill_node.stage.wire import part_of
from springtide.errors import PeerLost
from springtide.ids import AttemptId, Incarnation
from springtide.process import end_process
from springtide.protocol import storage

logger = logging.getLogger(__name__)

PassTeller = Callable[[RunPass, PassLeft | PassEnded], None]


def longest_pass_s(run: RunPass, lease_s: float, layers: int) -> float:
    """After so long, with no other pass before it, a stage hangs. Each layer may wait `lease_s` for its part of a prefix that still
    arrives."""
    return longest_s(run.predicted_ms, lease_s if run.awaits is None else lease_s * layers)


def waits_for_prefix(run: RunPass, link: StoreLink | None, layers: int) -> bool:
    """The store is still at what the pass cannot go on without: it gives up by itself on sources that hang."""
    return run.awaits is not None and link is not None and link.waits(AttemptId(run.awaits), layers)


class Passes(ABC):
    """From `attach` to `at_rest` it writes into the arena of one store. `tell` is called in the event loop."""

    tell: PassTeller

    @abstractmethod
    async def attach(self, link: StoreLink, incarnation: Incarnation) -> None:
        """Returns when passes can run in the link's arena. Raises OSError, SpringtideError when they cannot."""

    @abstractmethod
    def launch(self, run: RunPass, link: StoreLink) -> None:
        """Tells of it as RunPass says. Pushes go to `link` as soon as their last layer is computed."""

    @abstractmethod
    def relay(self, notice: storage.Notice) -> None:
        """The store has said this."""

    @abstractmethod
    def forget(self, attempt_id: str) -> None:
        """Its slots were given back."""

    @abstractmethod
    def forget_slots(self, slots: Sequence[int]) -> None:
        """No attempt uses them any more (ModelRunner.forget): for runners other than the engine's own."""

    @property
    @abstractmethod
    def stalled(self) -> str:
        """Which pass is under way for too long; empty: none. It may yet end."""

    @abstractmethod
    async def broken(self) -> PeerLost:
        """Returns when no pass can be run any more before the next `attach`."""

    @abstractmethod
    async def at_rest(self) -> None:
        """Returns when no pass runs any more."""

    @abstractmethod
    async def close(self) -> None: ...


class OwnPasses(Passes):
    """All layers are computed here, on the model's thread."""

    def __init__(self, runner: ModelRunner, thread: ModelThread, prefix_timeout_s: float, silence_s: float) -> None:
        self._runner = runner
        self._silence_s = silence_s
        self._thread = thread
        self._prefix_timeout_s = prefix_timeout_s
        self._watchdog = Watchdog(end_process)

    async def attach(self, link: StoreLink, incarnation: Incarnation) -> None:
        """The runner has the arena already."""

    def launch(self, run: RunPass, link: StoreLink) -> None:
        self._thread.run(self._run, run, link).add_done_callback(partial(self._ended, run))

    def _ended(self, run: RunPass, ended: asyncio.Future[PassEnded]) -> None:
        """Told whatever comes of it: the core waits for every pass."""
        if ended.cancelled():
            return
        error = ended.exception()
        if error is not None:
            logger.error("pass %d failed", run.pass_id, exc_info=error)
        self.tell(run, ended.result() if error is None else PassFailed(run.pass_id, f"the pass failed: {error!r}"))

    def _run(self, run: RunPass, link: StoreLink) -> PassEnded:
        began = time.perf_counter()
        pushes = Pushes(run.pushes)
        part = part_of(run, pushes.layer_ends, last=True)
        hooks = Hooks(part, 0, link.wait_layer, self._prefix_timeout_s, lambda layer_end: pushes.send(link, layer_end))
        layers = self._runner.kv_spec.layers
        limit_s, stall_s = longest_pass_s(run, self._prefix_timeout_s, layers), stalled_after_s(run.predicted_ms, self._silence_s)
        with self._watchdog.during(f"pass {run.pass_id}", limit_s, stall_s, lambda: waits_for_prefix(run, link, layers)):
            result = compute(self._runner, part, None, None, hooks)
        return conclude(run, (result,), (time.perf_counter() - began) * 1000)

    def relay(self, notice: storage.Notice) -> None:
        """The link itself is asked for layers."""

    def forget(self, attempt_id: str) -> None:
        """The link does."""

    def forget_slots(self, slots: Sequence[int]) -> None:
        """There are none."""

    @property
    def stalled(self) -> str:
        return self._watchdog.stalled

    async def broken(self) -> PeerLost:
        never: asyncio.Future[PeerLost] = asyncio.get_running_loop().create_future()
        return await never

    async def at_rest(self) -> None:
        await self._thread.at_rest()

    async def close(self) -> None:
        """The thread is not its own."""
        self._watchdog.close()


class Pushes:
    """Of a pass, or of one stage's part of it, sorted by their last layer."""

    def __init__(self, pushes: Iterable[storage.Push]) -> None:
        self._waiting = deque(pushes)
        self.layer_ends = tuple(dict.fromkeys(push.layer_end for push in self._waiting))
        """After which there is something to send."""

    def send(self, link: StoreLink, layer_end: int) -> None:
        """Those whose layers are all below. From any thread, one at a time."""
        while self._waiting and self._waiting[0].layer_end <= layer_end:
            link.send(self._waiting.popleft())


def conclude(run: RunPass, results: Sequence[Result], elapsed_ms: float) -> PassEnded:
    """From what the stages say, the first one first."""
    why = next((result for result in results if result.outcome is not Outcome.DONE), None)
    waited_ms = sum(result.waited_ms for result in results)
    match why:
        case None:
            ending = sum(row.sampling is not None for row in run.rows)
            sampled_tokens = results[-1].tokens
            if len(sampled_tokens) != ending:
                return PassFailed(run.pass_id, f"{len(sampled_tokens)} tokens were sampled for {ending} prompts that end in the pass")
            tokens = iter(sampled_tokens)
            sampled = [next(tokens) if row.sampling is not None else None for row in run.rows]
            return PassDone(run.pass_id, sampled, elapsed_ms, waited_ms)
        case Result(Outcome.PREFIX_MISSING | Outcome.PREFIX_OVERDUE):
            return PassInterrupted(run.pass_id, why.outcome is Outcome.PREFIX_OVERDUE, waited_ms)
        case _:
            return PassFailed(run.pass_id, why.message)
