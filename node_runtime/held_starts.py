"""Attempts whose grammar is still being compiled: the core hears of them when it is, so that the model's thread never waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic

from llguidance import LLMatcher

from engine.sampling.grammars import Grammars
from node_runtime.events import Ordered, SessionEnded, Start, StartT
from springtide.ids import AttemptId
from springtide.protocol.outputs import AttemptFailed, AttemptSign, Failure, FailureCode
from springtide.protocol.starts import AbortAttempt, ForetellTokens


def when_compiled(compiled: Future[LLMatcher], then: Callable[[], None]) -> None:
    """Calls it in the running event loop when that is done, however it ends."""
    loop = asyncio.get_running_loop()

    def done(_: Future[LLMatcher]) -> None:
        with suppress(RuntimeError):  # the process ends
            loop.call_soon_threadsafe(then)

    compiled.add_done_callback(done)


class HeldStarts(Generic[StartT]):
    """The attempts that are held. All but compiling runs in one event loop."""

    def __init__(
        self,
        grammars: Grammars,
        samples_first: Callable[[StartT], bool],
        tell: Callable[[Ordered[StartT]], None],
        refuse: Callable[[int, AttemptFailed], None],
    ) -> None:
        """Held are those of which this engine samples the first token. `tell` gets a start when its grammar is compiled; `refuse`, with its
        session, what is said of one whose grammar cannot be."""
        self._grammars = grammars
        self._samples_first: Callable[[StartT], bool] = samples_first
        self._tell: Callable[[Ordered[StartT]], None] = tell
        self._refuse = refuse
        self._held: dict[AttemptId, tuple[Start[StartT], list[ForetellTokens]]] = {}
        """Their starts, and what was foretold to them since."""
        self._compiled_for: dict[AttemptId, Future[LLMatcher]] = {}
        """The grammars of those that are held, and of those that the core has: they stay compiled, however many others come."""
        self._not_seen: set[AttemptId] = set()
        """Of these, those that neither had when last looked."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def attempt_ids(self) -> frozenset[AttemptId]:
        return frozenset(self._held)

    def signs(self) -> Iterator[tuple[int, AttemptSign]]:
        """Signs of the attempts, each with its session."""
        for attempt_id, (event, _) in self._held.items():
            yield event.session, AttemptSign(attempt_id, 0, waiting=True)

    def keep_compiled(self, live: Collection[AttemptId]) -> None:
        """Keeps the grammars of these, which the core has, and of those that are held. What the core has yet to take in is seen the next
        time."""
        gone = self._compiled_for.keys() - live - self._held.keys()
        for attempt_id in gone & self._not_seen:
            del self._compiled_for[attempt_id]
        self._not_seen = gone - self._not_seen

    def keeps(self, event: Ordered[StartT]) -> bool:
        """Whether the event is not for the core, or not yet."""
        match event:
            case Start(_, start):
                return self._hold(event) if start.request.params.grammar else False
            case ForetellTokens(attempt_id) if attempt_id in self._held:
                self._held[attempt_id][1].append(event)
                return True
            case AbortAttempt(attempt_id):
                return self._held.pop(attempt_id, None) is not None
            case SessionEnded(session):
                self._held = {attempt_id: held for attempt_id, held in self._held.items() if held[0].session != session}
        return False

    def _hold(self, event: Start[StartT]) -> bool:
        request = event.start.request
        if request.attempt_id in self._held:
            return True
        compiled = self._compiled_for[request.attempt_id] = self._grammars.prepare(request.params.grammar)
        if not self._samples_first(event.start) or (compiled.done() and compiled.exception() is None):
            return False
        self._held[request.attempt_id] = event, []
        when_compiled(compiled, lambda: self._compiled(event, compiled))
        return True

    def _compiled(self, event: Start[StartT], compiled: Future[LLMatcher]) -> None:
        attempt_id = event.start.request.attempt_id
        held, foretold = self._held.get(attempt_id, (None, []))
        if held is not event or compiled.cancelled():
            return
        del self._held[attempt_id]
        if (error := compiled.exception()) is None:
            self._tell(event)
            for told in foretold:
                self._tell(told)
        else:
            self._refuse(event.session, AttemptFailed(attempt_id, Failure(FailureCode.INVALID, str(error))))
