"""The answer to one API request in the making: its choices run side by side, their text comes out as one sequence of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.tokenizer.detokenizer import StreamingDetokenizer
from gateway import events as ev
from gateway.text import PlacedToken, StopStrings, TextAssembler
from springtide.errors import SpringtideError
from springtide.ids import RequestId
from springtide.protocol.outputs import Finish, SampledToken
from springtide.protocol.sampling import SamplingParams

SEED_RANGE = 1 << 64


class ClientDisconnected(SpringtideError):
    """Nobody waits for the answer any more."""

    http_status = 499


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A valid API request, reduced to what runs: every prompt `n` times."""

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    n: int
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    tenant: str = ""
    priority: int = 0
    traceparent: str = ""
    deadline_ms: float = 0.0
    requested_at: float | None = None

    def generation(self, index: int, *, accepted: bool) -> ev.Generation:
        """Of choice `index`: choice i of prompt p is number p * n + i, and draws with seed + i."""
        prompt, choice = divmod(index, self.n)
        single = len(self.prompts) * self.n == 1
        return ev.Generation(
            request_id=RequestId(self.request_id if single else f"{self.request_id}/{index}"),
            prompt_ids=self.prompts[prompt],
            sampling=replace(self.sampling, seed=(self.sampling.seed + choice) % SEED_RANGE),
            tenant=self.tenant,
            priority=self.priority,
            traceparent=self.traceparent,
            deadline_ms=self.deadline_ms,
            requested_at=self.requested_at,
            accepted=accepted,
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """More of choice `index`; the last one of a choice says why it finished."""

    index: int
    text: str
    tokens: tuple[PlacedToken, ...]
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Sink(Protocol):
    """Takes the output of one generation. Called by the runner, never again after `end`."""

    def emit(self, tokens: Sequence[SampledToken]) -> bool:
        """True when a stop string ended the text with these tokens."""
        ...

    def end(self, reply: ev.Finished | ev.Failed | ev.Cancelled) -> None: ...


class Launcher(Protocol):
    """What a reply needs of the runner."""

    def launch(self, generation: ev.Generation, sink: Sink) -> None: ...

    def cancel(self, request_id: RequestId) -> None: ...


class AnswerStream:
    """Iterate `batches()` once, and `close()` in any case: it frees what still runs."""

    def __init__(self, work: PreparedRequest, launcher: Launcher, new_detokenizer: Callable[[], StreamingDetokenizer]) -> None:
        self._work = work
        self._launcher = launcher
        self._stop = StopStrings(work.stop)
        self._new_detokenizer = new_detokenizer
        self._queue: asyncio.Queue[Delta | SpringtideError] = asyncio.Queue()
        self._choices: dict[int, _Choice] = {}
        self._running: set[int] = set()
        self._unstarted_leads = set(range(0, len(work.prompts) * work.n, work.n))
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cached_tokens = 0
        self._closed = False
        for index in sorted(self._unstarted_leads):
            self._launch(index, accepted=False)

    async def started(self) -> None:
        """Returns when every prompt has begun to be answered. Raises what the request failed with before that."""
        await self._started

    async def batches(self) -> AsyncIterator[list[Delta]]:
        """Whatever has come since the last batch, until all choices are finished. Raises what the request fails with."""
        unfinished = len(self._work.prompts) * self._work.n
        while unfinished:
            batch = [self._checked(await self._queue.get())]
            while not self._queue.empty():
                entry = self._queue.get_nowait()
                if isinstance(entry, SpringtideError):
                    # What came before the failure is still delivered.
                    self._queue.put_nowait(entry)
                    break
                batch.append(entry)
            unfinished -= sum(delta.finish is not None for delta in batch)
            yield batch

    @property
    def request_id(self) -> str:
        return self._work.request_id

    @property
    def usage(self) -> Usage:
        """Final once `batches` has ended. Every prompt counts once, as found in the pool by its first choice."""
        return Usage(
            prompt_tokens=sum(len(prompt) for prompt in self._work.prompts),
            completion_tokens=sum(choice.num_tokens for choice in self._choices.values()),
            cached_tokens=self._cached_tokens,
        )

    def close(self) -> None:
        """Gives up the choices that have not ended."""
        self._closed = True
        for index in list(self._running):
            self._launcher.cancel(self._choices[index].request_id)

    def disconnect(self) -> None:
        """The client is gone: frees everything and ends whoever waits for output with ClientDisconnected."""
        self._fail(ClientDisconnected("the client has closed the connection"))

    def _launch(self, index: int, *, accepted: bool) -> None:
        generation = self._work.generation(index, accepted=accepted)
        self._choices[index] = choice = _Choice(self, index, generation.request_id, TextAssembler(self._new_detokenizer(), self._stop))
        self._running.add(index)
        self._launcher.launch(generation, choice)

    @staticmethod
    def _checked(entry: Delta | SpringtideError) -> Delta:
        if isinstance(entry, SpringtideError):
            raise entry
        return entry

    # ---- from the choices ----

    def begun(self, index: int) -> None:
        if index not in self._unstarted_leads:
            return
        self._unstarted_leads.remove(index)
        if not self._unstarted_leads and not self._started.done():
            self._started.set_result(None)
        if not self._closed:
            # The further choices of a prompt wait for the first, so that they find its blocks in the pool.
            for sibling in range(index + 1, index + self._work.n):
                self._launch(sibling, accepted=True)

    def deliver(self, delta: Delta) -> None:
        self._queue.put_nowait(delta)

    def finished(self, index: int, cached_tokens: int) -> None:
        self._running.discard(index)
        if index % self._work.n == 0:
            self._cached_tokens += cached_tokens

    def failed(self, index: int, error: SpringtideError) -> None:
        self._running.discard(index)
        self._fail(error)

    def _fail(self, error: SpringtideError) -> None:
        if self._closed:
            return
        if not self._started.done():
            self._started.set_exception(error)
            # Whoever does not wait for the start reads it from the queue.
            self._started.exception()
        self._queue.put_nowait(error)
        self.close()


class _Choice:
    def __init__(self, reply: AnswerStream, index: int, request_id: RequestId, assembler: TextAssembler) -> None:
        self.request_id = request_id
        self._reply = reply
        self._index = index
        self._assembler = assembler

    @property
    def num_tokens(self) -> int:
        return self._assembler.num_tokens

    def emit(self, tokens: Sequence[SampledToken]) -> bool:
        piece = self._assembler.push(tokens)
        if piece.text or piece.tokens:
            self._reply.deliver(Delta(self._index, piece.text, piece.tokens))
        self._reply.begun(self._index)
        return piece.stopped

    def end(self, reply: ev.Finished | ev.Failed | ev.Cancelled) -> None:
        if isinstance(reply, ev.Failed):
            self._reply.failed(self._index, reply.error)
            return
        if isinstance(reply, ev.Cancelled):
            self._reply.finished(self._index, 0)
            return
        piece = self._assembler.finish()
        finish = Finish.STOP if piece.stopped else reply.reason
        self._reply.deliver(Delta(self._index, piece.text, piece.tokens, finish))
        self._reply.finished(self._index, reply.cached_tokens)
        self._reply.begun(self._index)
