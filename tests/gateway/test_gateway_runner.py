"""The doer of the gateway's core: whatever goes wrong in what it does, the request gets its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gateway_world import LIMITS, generation, new_core

from gateway import events as ev
from gateway import metrics
from gateway.objectives import Objectives
from gateway.runner import Runner
from springtide.clock import MonotonicClock
from springtide.errors import Unavailable
from springtide.protocol.outputs import SampledToken
from tests.support.waiting import until


class BrokenLink:
    """Fails in a way that nobody has foreseen."""

    async def schedule(self, request: Any) -> Any:
        raise ZeroDivisionError

    def report(self, report: Any) -> None:
        pass


class Sink:
    def __init__(self) -> None:
        self.ends: list[ev.Finished | ev.Failed | ev.Cancelled] = []

    def accepted(self) -> None:
        pass

    def emit(self, tokens: Sequence[SampledToken], cached_tokens: int) -> bool:
        raise AssertionError("there is no output")

    def end(self, reply: ev.Finished | ev.Failed | ev.Cancelled) -> None:
        self.ends.append(reply)


async def test_a_request_ends_when_asking_the_conductor_fails_unforeseen() -> None:
    core, link, sink = new_core(replace(LIMITS, scheduler_wait_s=0)), BrokenLink(), Sink()
    runner = Runner(core, link, MonotonicClock(), Objectives(ttft_s=1.0, tbt_s=0.1))  # type: ignore[arg-type]
    runner.start()
    try:
        runner.launch(generation(1, 4), sink)
        await until(lambda: sink.ends)
        (end,) = sink.ends
        assert isinstance(end, ev.Failed) and isinstance(end.error, Unavailable)
    finally:
        await runner.close()


class Taking(Sink):
    def emit(self, tokens: Sequence[SampledToken], cached_tokens: int) -> bool:
        return False


async def test_of_tokens_that_come_together_each_counts_in_the_time_between_tokens() -> None:
    def counted() -> float:
        return sum(sample.value for family in metrics.TBT_SECONDS.collect() for sample in family.samples if sample.name.endswith("_count"))

    core, before = new_core(replace(LIMITS, scheduler_wait_s=0)), counted()
    runner = Runner(core, BrokenLink(), MonotonicClock(), Objectives(ttft_s=1.0, tbt_s=0.1))  # type: ignore[arg-type]
    asked = generation(1, 4)
    runner.launch(asked, sink := Taking())
    for tokens in (1, 5, 1):
        runner._do(ev.Emit(asked.request_id, (SampledToken(7),) * tokens, cached_tokens=0))
    assert counted() == before + 6
    await until(lambda: sink.ends)
    await runner.close()


class Wordless(Sink):
    """Whose text cannot be put into words at its end."""

    def end(self, reply: ev.Finished | ev.Failed | ev.Cancelled) -> None:
        super().end(reply)
        if len(self.ends) == 1:
            raise RecursionError


async def test_a_text_that_has_no_end_ends_its_request_and_nothing_else() -> None:
    core, link, wordless, sink = new_core(replace(LIMITS, scheduler_wait_s=0)), BrokenLink(), Wordless(), Sink()
    runner = Runner(core, link, MonotonicClock(), Objectives(ttft_s=1.0, tbt_s=0.1))  # type: ignore[arg-type]
    runner.start()
    try:
        runner.launch(generation(1, 4), wordless)
        runner.launch(generation(2, 4), sink)
        await until(lambda: sink.ends and len(wordless.ends) == 2)
        last = wordless.ends[-1]
        assert isinstance(last, ev.Failed) and "internal error" in last.error.message
    finally:
        await runner.close()
