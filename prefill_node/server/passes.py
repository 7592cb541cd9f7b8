"""Runs a pass over the model, on its thread."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass

from engine.runner import ModelRunner
from engine.sampler import sample
from kvstore.link import StoreLink
from messenger.base import DeadlineExceeded
from node_runtime import storage
from prefill_node.core.actions import RunPass
from prefill_node.core.events import PassDone, PassFailed, PassInterrupted
from springtide.errors import PeerLost
from springtide.ids import AttemptId

logger = logging.getLogger(__name__)


class PrefixMissing(Exception):
    """The prefix that the pass waits for was truncated."""


@dataclass(slots=True)
class PassHooks:
    """Waits for the prefix before a layer, and orders what a layer has completed to be pushed after it."""

    link: StoreLink
    awaits: str | None
    pushes: deque[storage.Push]
    prefix_timeout_s: float

    def before(self, layer: int) -> None:
        """Raises PrefixMissing, DeadlineExceeded, PeerLost."""
        if self.awaits is not None and self.link.wait_layer(AttemptId(self.awaits), layer, self.prefix_timeout_s) is not None:
            raise PrefixMissing

    def after(self, layer: int) -> None:
        while self.pushes and self.pushes[0].layer_end <= layer + 1:
            self.link.send(storage.to_command(self.pushes.popleft()))


def run_pass(runner: ModelRunner, link: StoreLink, run: RunPass, prefix_timeout_s: float) -> PassDone | PassInterrupted | PassFailed:
    started = time.perf_counter()
    hooks = PassHooks(link, run.awaits, deque(run.pushes), prefix_timeout_s)
    try:
        logits = runner.forward([row.chunk for row in run.rows], hooks)
        ending = [row.sampling for row in run.rows if row.sampling is not None]
        tokens = iter(sample(logits, ending) if ending else ())
    except PrefixMissing:
        return PassInterrupted(run.pass_id, overdue=False)
    except DeadlineExceeded:
        return PassInterrupted(run.pass_id, overdue=True)
    except PeerLost as error:
        return PassFailed(run.pass_id, error.message)
    except Exception as error:
        logger.exception("a pass over %s failed", ", ".join(row.attempt_id for row in run.rows))
        return PassFailed(run.pass_id, f"the pass failed: {error!r}")
    sampled = [next(tokens) if row.sampling is not None else None for row in run.rows]
    return PassDone(run.pass_id, sampled, (time.perf_counter() - started) * 1000)
