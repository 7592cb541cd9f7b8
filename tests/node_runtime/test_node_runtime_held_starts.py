"""Grammars of attempts stay compiled for as long as the attempts are there."""

from __future__ import annotations

import asyncio
import gc
import weakref
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from node_runtime.held_starts import HeldStarts
from springtide.ids import AttemptId
from springtide.protocol.sampling import Grammar
from springtide.protocol.starts import DecodeStart, ForetellTokens
from tests.support import decode_core


class Compiler:
    """Has a grammar compiled at once, and keeps it no longer than others do."""

    def __init__(self) -> None:
        self.last: weakref.ref[Future[Any]] | None = None

    def prepare(self, grammar: Grammar) -> Future[Any]:
        compiled: Future[Any] = Future()
        compiled.set_result(grammar)
        self.last = weakref.ref(compiled)
        return compiled

    @property
    def keeps(self) -> bool:
        gc.collect()
        return self.last is not None and self.last() is not None


def test_a_grammar_is_kept_until_its_attempt_was_missing_twice() -> None:
    compiler = Compiler()
    held: HeldStarts[DecodeStart] = HeldStarts(compiler, lambda _: True, lambda _: None, lambda *_: None)  # type: ignore[arg-type]
    event = decode_core.start("a", 10)
    request = event.start.request
    params = replace(request.params, grammar=Grammar("%llguidance {}"))
    assert not held.keeps(replace(event, start=replace(event.start, request=replace(request, params=params))))
    for live in ({"a"}, set[str](), {"a"}, set[str]()):
        held.keep_compiled({AttemptId(attempt_id) for attempt_id in live})
        assert compiler.keeps, "the core may have yet to take it in"
    held.keep_compiled(set())
    assert not compiler.keeps


async def test_what_is_foretold_to_an_attempt_that_is_held_comes_after_its_start() -> None:
    compiled: Future[Any] = Future()
    told: list[object] = []

    class Slow:
        def prepare(self, grammar: Grammar) -> Future[Any]:
            return compiled

    held: HeldStarts[DecodeStart] = HeldStarts(Slow(), lambda _: True, told.append, lambda *_: None)  # type: ignore[arg-type]
    event = decode_core.start("a", 10)
    params = replace(event.start.request.params, grammar=Grammar("%llguidance {}"))
    event = replace(event, start=replace(event.start, request=replace(event.start.request, params=params)))
    foretold = [ForetellTokens(AttemptId("a"), position, (5,)) for position in range(2)]
    assert held.keeps(event) and all(map(held.keeps, foretold))
    assert not held.keeps(ForetellTokens(AttemptId("b"), 0, (5,))), "the core's affair"
    compiled.set_result(None)
    await asyncio.sleep(0)  # it is told so in the event loop
    await asyncio.sleep(0)
    assert told == [event, *foretold]
    assert not held.keeps(foretold[0])
