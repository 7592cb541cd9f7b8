"""The answer to one API request in the making: its choices run side by side, their text comes out as one sequence of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.tokenizer.detokenizer import StreamingDetokenizer
from engine.tokenizer.tokenizer import Tokenizer
from gateway import events as ev
from gateway.bodies import Bodies, ClientDisconnected
from gateway.conductor_link import ConductorLink
from gateway.prepare import PreparedRequest, Preparer
from gateway.runner import Runner, Sink
from gateway.side_thread import SideThread
from gateway.tenancy import ApiKeys
from gateway.text import PlacedToken, StopStrings, TextAssembler
from springtide.clock import Clock
from springtide.errors import SpringtideError
from springtide.ids import RequestId
from springtide.protocol.outputs import Finish, SampledToken
from springtide.protocol.usage import Usage


@dataclass(frozen=True, slots=True)
class Delta:
    """A further piece of choice `index`; the last one of a choice says why it finished."""

    index: int
    text: str
    tokens: tuple[PlacedToken, ...]
    finish: Finish | None = None


class Launcher(Protocol):
    """What an answer needs of the runner."""

    def launch(self, generation: ev.Generation, sink: Sink) -> None: ...

    def cancel(self, request_id: RequestId) -> None: ...


class AnswerStream:
    """The deltas of one answer. Iterate `batches()` once, and `close()` in any case: it frees what still runs."""

    def __init__(self, request: PreparedRequest, launcher: Launcher, new_detokenizer: Callable[[], StreamingDetokenizer]) -> None:
        self._request = request
        self._launcher = launcher
        self._stop = StopStrings(request.stop)
        self._new_detokenizer = new_detokenizer
        self._queue: asyncio.Queue[Delta | SpringtideError] = asyncio.Queue()
        self._choices: dict[int, _Choice] = {}
        self._running: set[int] = set()
        self._unstarted_leads = set(range(0, len(request.prompts) * request.n, request.n))
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
        unfinished = len(self._request.prompts) * self._request.n
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
        return self._request.request_id

    @property
    def usage(self) -> Usage:
        """What the answer took; final once `batches` has ended. Every prompt counts once, as found in the pool by its first choice."""
        return Usage(
            prompt_tokens=sum(len(prompt) for prompt in self._request.prompts),
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
        generation = self._request.generation(index, accepted=accepted)
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
            for sibling in range(index + 1, index + self._request.n):
                self._launch(sibling, accepted=True)

    def deliver(self, delta: Delta) -> None:
        self._queue.put_nowait(delta)

    def finished(self, index: int, cached_tokens: int) -> None:
        self._running.discard(index)
        if index % self._request.n == 0:
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
    def __init__(self, answer: AnswerStream, index: int, request_id: RequestId, assembler: TextAssembler) -> None:
        self.request_id = request_id
        self._answer = answer
        self._index = index
        self._assembler = assembler

    @property
    def num_tokens(self) -> int:
        return self._assembler.num_tokens

    def emit(self, tokens: Sequence[SampledToken]) -> bool:
        piece = self._assembler.push(tokens)
        if piece.text or piece.tokens:
            self._answer.deliver(Delta(self._index, piece.text, piece.tokens))
        self._answer.begun(self._index)
        return piece.stopped

    def end(self, reply: ev.Finished | ev.Failed | ev.Cancelled) -> None:
        if isinstance(reply, ev.Failed):
            self._answer.failed(self._index, reply.error)
            return
        if isinstance(reply, ev.Cancelled):
            self._answer.finished(self._index, 0)
            return
        piece = self._assembler.finish()
        finish = Finish.STOP if piece.stopped else reply.reason
        self._answer.deliver(Delta(self._index, piece.text, piece.tokens, finish))
        self._answer.finished(self._index, reply.cached_tokens)
        self._answer.begun(self._index)


@dataclass(frozen=True, slots=True)
class ApiBackend:
    """What the front ends, HTTP and gRPC, have behind them."""

    preparer: Preparer
    tokenizer: Tokenizer
    runner: Runner
    conductor: ConductorLink
    api_keys: ApiKeys
    bodies: Bodies
    side_thread: SideThread
    clock: Clock
    """The runner's."""

    def start(self, request: PreparedRequest) -> AnswerStream:
        return AnswerStream(request, self.runner, self.tokenizer.detokenizer)

    async def ready(self) -> bool:
        """Whether the cluster can take requests. Raises Unavailable when the Conductor cannot be asked."""
        return (await self.conductor.cluster()).ready
