"""The answer to one API request in the making: its choices run side by side, and their tokens come out as one sequence of deltas, whose
text is cut at the first stop string, and held back while one may be in the making."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import redis.asyncio as redis

from engine.tokenizer.detokenizer import StreamingDetokenizer
from engine.tokenizer.tokenizer import Tokenizer
from gateway import events as ev
from gateway import metrics
from gateway.accounts.accounts import Accounts
from gateway.api_request import ApiRequest
from gateway.background import Background
from gateway.batches.desk import BatchDesk
from gateway.batches.files import Files
from gateway.bodies import UNKNOWN_BYTES, Bodies, ClientDisconnected, SideThread
from gateway.caching.desk import Desk
from gateway.caching.marks import written
from gateway.conductor_link import ConductorLink
from gateway.grammar_checks import GrammarChecker
from gateway.output import Answer, CallBegun, Delta, Ending, Part, PlacedToken, Reasoning, gathered
from gateway.prepare import Origin, PreparedRequest, Preparer
from gateway.runner import Runner
from gateway.tool_calls.reading import Reading
from gateway.tracing.tracer import Tracer
from springtide.clock import Clock
from springtide.config import ServerConfig
from springtide.errors import SpringtideError, Unavailable
from springtide.ids import RequestId
from springtide.protocol.outputs import Finish, PromptLogprobs, SampledToken
from springtide.protocol.usage import KeptTokens, Usage
from springtide.trace_context import TRACE_HEADER, TRACE_IDS, checked

logger = logging.getLogger(__name__)

_MEANT_FOR_CLIENTS = ("shutting_down", "not_ready", "deadline", "internal_error")
"""Codes of server errors whose messages say nothing of nodes and addresses."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A further piece of the output. Its tokens are those whose text is out in full, with this piece or before."""

    text: str
    tokens: tuple[PlacedToken, ...] = ()
    stop: str | None = None
    """The stop string that ended the text, which does not contain it."""


class StopStrings:
    """The stop strings of a request; its choices look for the same ones."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        self._borders = [_borders(text) for text in self.texts]

    def advance(self, begun: list[int], text: str) -> None:
        """`begun` has for each stop string how much of its beginning is the end of what has come so far; now `text` has come too, and none
        has come in full. Takes time in proportion to `text` alone (Knuth, Morris and Pratt)."""
        for index, (stop, borders) in enumerate(zip(self.texts, self._borders, strict=True)):
            length = begun[index]
            for character in text:
                while length and stop[length] != character:
                    length = borders[length - 1]
                length += stop[length] == character
            begun[index] = length


def _borders(text: str) -> list[int]:
    """For each beginning of `text` the length of its longest proper end that is a beginning too."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[length] != text[index]:
            length = borders[length - 1]
        length += text[length] == text[index]
        borders[index] = length
    return borders


class TextAssembler:
    """The text of one choice in the making."""

    def __init__(self, detokenizer: StreamingDetokenizer, stop: StopStrings, include_stop: bool = False) -> None:
        """`include_stop`: a stop string is part of the text that it ends."""
        self._include_stop = include_stop
        self._detokenizer = detokenizer
        self._stop = stop
        self._begun = [0] * len(stop.texts)
        self._released = 0
        self._held = ""
        self._pending: deque[tuple[SampledToken, int, int]] = deque()
        """Tokens not yet given out, with the begin and end of their text."""
        self._stopped_by: str | None = None
        self.num_tokens = 0
        """Taken in, up to the one that completed a stop string."""

    def push(self, tokens: Iterable[SampledToken]) -> Piece:
        for token in tokens:
            if self._stopped_by is not None:
                break
            self.num_tokens += 1
            begin = self._released + len(self._held)
            text = self._detokenizer.push(token.token_id)
            self._held += text
            self._pending.append((token, begin, self._released + len(self._held)))
            if (found := self._find_stop()) is not None:
                return self._cut(*found)
            self._stop.advance(self._begun, text)
        if self._stopped_by is not None:
            return Piece("", stop=self._stopped_by)
        return self._release(len(self._held) - max(self._begun, default=0))

    def finish(self, stop_token: int | None = None) -> Piece:
        """The rest, when the output has ended by itself, or by a stop token."""
        if self._stopped_by is not None:
            return Piece("", stop=self._stopped_by)
        self._held += self._detokenizer.finish()
        if stop_token is not None and self._include_stop:
            self._held += self._detokenizer.text_of(stop_token)
        if (found := self._find_stop()) is not None:
            return self._cut(*found)
        return self._release(len(self._held), everything=True)

    def _find_stop(self) -> tuple[int, str] | None:
        found = [(at, stop) for stop in self._stop.texts if (at := self._held.find(stop)) >= 0]
        return min(found, default=None)

    def _cut(self, at: int, stop: str) -> Piece:
        self._stopped_by = stop
        at += len(stop) if self._include_stop else 0
        end = self._released + at
        tokens = tuple(PlacedToken(token, begin) for token, begin, _ in self._pending if begin < end)
        text, self._held = self._held[:at], ""
        self._pending.clear()
        return Piece(text, tokens, stop)

    def _release(self, length: int, everything: bool = False) -> Piece:
        text, self._held = self._held[:length], self._held[length:]
        self._released += length
        tokens = []
        while self._pending and (everything or self._pending[0][2] <= self._released):
            token, begin, _ = self._pending.popleft()
            tokens.append(PlacedToken(token, begin))
        return Piece(text, tuple(tokens))


class AnswerStream:
    """The deltas of one answer. Iterate `batches()` once, and `close()` in any case: it frees what still runs."""

    def __init__(
        self,
        request: PreparedRequest,
        runner: Runner,
        tokenizer: Tokenizer,
        on_prompt: Callable[[PreparedRequest, int, ev.Finished], str],
        checker: GrammarChecker,
        on_begin: Callable[[AnswerStream], Callable[[], None]],
    ) -> None:
        """`on_prompt` is told of each prompt of the request, by its number, how its first choice ended, and says why a context cache was
        missed. What the outputs are held to is checked before anything runs. `on_begin` is told of the answer, and returns what is to be
        told of its end, when nothing of it runs any more."""
        self._on_prompt = on_prompt
        self._cache_miss = ""
        self._request = request
        self._runner = runner
        self._stop = StopStrings(request.stop)
        kept = [token_id for marker in request.reading.markers if (token_id := tokenizer.special_id(marker)) is not None]
        self._new_detokenizer = functools.partial(tokenizer.detokenizer, skip_special_tokens=request.skip_special_tokens, kept=kept)
        self._queue: asyncio.Queue[Delta | SpringtideError | None] = asyncio.Queue()
        self._choices: dict[int, _Choice] = {}
        self._running: set[int] = set()
        self._unstarted_leads = set(range(0, len(request.prompts) * request.n, request.n))
        self._unaccepted_leads = set(self._unstarted_leads)
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cached_tokens: dict[int, int] = {}
        """Of each prompt, by its number, that has a token or has ended."""
        self._prompts = list(request.told)
        self._closed = False
        self._on_end: Callable[[], None] | None = on_begin(self)
        self._checking: asyncio.Task[None] | None = None
        if checker.good(request.sampling.grammar):
            self._launch_leads()
        else:
            self._checking = asyncio.create_task(self._check(checker))

    async def accepted(self) -> None:
        """Returns when every prompt has a place to be computed. Raises what the request failed with before that. Afterwards it may still be
        refused, at the last admission check."""
        await asyncio.shield(self._accepted)

    async def batches(self, ping_s: float | None = None) -> AsyncIterator[list[Delta]]:
        """Whatever has come since the last batch, until all choices are finished: nothing, when there has been nothing for `ping_s`. Raises
        what the request fails with."""
        pings = None if ping_s is None else _Pings(self._queue, ping_s)
        unfinished = len(self._request.prompts) * self._request.n
        try:
            while unfinished:
                batch = self._batch(await self._queue.get())
                unfinished -= sum(delta.ending is not None for delta in batch)
                if pings is not None:
                    pings.due = False
                yield batch
        finally:
            if pings is not None:
                pings.close()

    def _batch(self, entry: Delta | SpringtideError | None) -> list[Delta]:
        """The entry, and what else there is. Raises an error that is the first."""
        batch: list[Delta] = []
        while True:
            if isinstance(entry, SpringtideError):
                if not batch:
                    raise entry
                # What came before the failure is still delivered.
                self._queue.put_nowait(entry)
                return batch
            if entry is not None:
                batch.append(entry)
            if self._queue.empty():
                return batch
            entry = self._queue.get_nowait()

    async def whole(self) -> Answer:
        """All of it; of more outputs of a prompt than are wanted, the likeliest. Raises what the request fails with."""
        answer = gathered([delta async for batch in self.batches() for delta in batch], self.usage)
        kept = self._request.kept
        return answer.likeliest(kept, self._request.n) if kept < self._request.n else answer

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def usage(self) -> Usage:
        """What the answer took; final once `batches` has ended. Every prompt counts once, as found in the pool by its first choice."""
        return Usage(
            prompt_tokens=sum(len(prompt) for prompt in self._request.prompts),
            completion_tokens=sum(choice.num_tokens for choice in self._choices.values()),
            cached_tokens=sum(self._cached_tokens.values()),
            kept_tokens=self._kept_tokens(),
            cache_miss=self._cache_miss,
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices.values()),
        )

    def _kept_tokens(self) -> tuple[KeptTokens, ...]:
        if not self._request.marks:
            return ()
        found = sorted(self._cached_tokens.items())
        return tuple(kept for prompt, cached in found for kept in written(self._request.marks[prompt], cached))

    @property
    def served(self) -> Usage:
        """The same of what was served: without the prompts for which there is nothing yet."""
        n, waiting = self._request.n, self._unstarted_leads
        begun = (len(prompt) for number, prompt in enumerate(self._request.prompts) if number * n not in waiting)
        return replace(self.usage, prompt_tokens=sum(begun))

    def close(self) -> None:
        """Gives up the choices that have not ended."""
        self._closed = True
        if self._checking is not None and self._checking is not asyncio.current_task():
            self._checking.cancel()
        for index in list(self._running):
            self._runner.cancel(self._choices[index].request_id)
        self._check_end()

    def disconnect(self) -> None:
        """The client is gone: frees everything and ends whoever waits for output with ClientDisconnected."""
        self._fail(ClientDisconnected("the client has closed the connection"))

    async def _check(self, checker: GrammarChecker) -> None:
        try:
            await checker.check(self._request.sampling.grammar, self._request.grammar_field, self._request.tenant)
        except SpringtideError as error:
            self._fail(error)
        except Exception:
            logger.exception("a grammar could not be checked", extra={"request_id": self.request_id})
            self._fail(internal_error())
        else:
            self._launch_leads()

    def _launch_leads(self) -> None:
        """The first choice of each prompt."""
        for index in sorted(self._unstarted_leads):
            self._launch(index, accepted=False)

    def _launch(self, index: int, *, accepted: bool) -> None:
        generation = self._request.generation(index, accepted=accepted)
        assembler = TextAssembler(self._new_detokenizer(), self._stop, self._request.include_stop)
        self._choices[index] = choice = _Choice(self, index, generation.request_id, assembler, self._request.reading)
        self._running.add(index)
        self._runner.launch(generation, choice)

    # ---- from the choices ----

    def placed(self, index: int) -> None:
        self._unaccepted_leads.discard(index)
        if not self._unaccepted_leads and not self._accepted.done():
            self._accepted.set_result(None)

    def begun(self, index: int) -> None:
        if index not in self._unstarted_leads:
            return
        self._unstarted_leads.remove(index)
        if not self._closed:
            # The further choices of a prompt wait for the first, so that they find its blocks in the pool.
            for sibling in range(index + 1, index + self._request.n):
                self._launch(sibling, accepted=True)

    def scored(self, index: int, logprobs: PromptLogprobs) -> None:
        """The choice's prompt has these."""
        number = index // self._request.n
        self._prompts[number] = replace(self._prompts[number], logprobs=logprobs)

    def tell_prompt(self, index: int) -> None:
        """Delivers what is to be told of the choice's prompt, if anything is."""
        if self._prompts:
            self.deliver(Delta(index, (), prompt=self._prompts[index // self._request.n]))

    def deliver(self, delta: Delta) -> None:
        self._queue.put_nowait(delta)

    def found(self, index: int, cached_tokens: int) -> None:
        """So many tokens of the choice's prompt were in the pool. Of a prompt its first choice says so, with its first token or its end."""
        prompt, choice = divmod(index, self._request.n)
        if choice == 0:
            self._cached_tokens[prompt] = cached_tokens

    def finished(self, index: int, reply: ev.Finished) -> None:
        self._running.discard(index)
        prompt, choice = divmod(index, self._request.n)
        if choice == 0:
            self._cache_miss = self._on_prompt(self._request, prompt, reply) or self._cache_miss
        self._check_end()

    def cancelled(self, index: int, cached_tokens: int) -> None:
        self._running.discard(index)
        self.found(index, cached_tokens)
        self._check_end()

    def failed(self, index: int, error: SpringtideError, cached_tokens: int) -> None:
        self.cancelled(index, cached_tokens)
        self._fail(error)

    def _check_end(self) -> None:
        if self._closed and not self._running and self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end()

    def _fail(self, error: SpringtideError) -> None:
        if self._closed:
            return
        if not self._accepted.done():
            self._accepted.set_exception(error)
            # Whoever does not wait for that reads it from the queue.
            self._accepted.exception()
        self._queue.put_nowait(error)
        self.close()


class _Pings:
    """Puts None into a queue when nothing has been taken from it for a while. One timer a stream, not one for each token."""

    def __init__(self, queue: asyncio.Queue[Delta | SpringtideError | None], every_s: float) -> None:
        self._queue, self._every_s = queue, every_s
        self.due = True
        """Nothing has been taken since the last look."""
        self._timer = asyncio.get_running_loop().call_later(every_s, self._ring)

    def _ring(self) -> None:
        if self.due:
            self._queue.put_nowait(None)
        self.due = True
        self._timer = asyncio.get_running_loop().call_later(self._every_s / 2, self._ring)

    def close(self) -> None:
        self._timer.cancel()


class _Choice:
    def __init__(self, answer: AnswerStream, index: int, request_id: RequestId, assembler: TextAssembler, reading: Reading) -> None:
        self.request_id = request_id
        self._answer = answer
        self._index = index
        self._assembler = assembler
        self._reader = reading.new_reader()
        self._called = False
        self._num_read = 0
        """Tokens of which it is known what they are."""
        self.num_reasoning_tokens = 0
        self._begun = False

    @property
    def num_tokens(self) -> int:
        return self._assembler.num_tokens

    def prompt(self, logprobs: PromptLogprobs) -> None:
        self._answer.scored(self._index, logprobs)

    def accepted(self) -> None:
        self._answer.placed(self._index)

    def emit(self, tokens: Sequence[SampledToken], cached_tokens: int) -> bool:
        self._begin(cached_tokens)
        piece = self._assembler.push(tokens)
        self._deliver(self._reader.push(piece.text), piece)
        self._answer.begun(self._index)
        return piece.stop is not None

    def end(self, reply: ev.Finished | ev.Failed | ev.Cancelled) -> None:
        if isinstance(reply, ev.Failed):
            self._answer.failed(self._index, reply.error, reply.cached_tokens)
            return
        if isinstance(reply, ev.Cancelled):
            self._answer.cancelled(self._index, reply.cached_tokens)
            return
        self._begin(reply.cached_tokens)
        piece = self._assembler.finish(reply.stop_token)
        parts = [*self._reader.push(piece.text), *self._reader.finish()]
        finish, stop = (reply.reason, reply.stop_token) if piece.stop is None else (Finish.STOP, piece.stop)
        self._deliver(parts, piece, finish, stop)
        self._answer.finished(self._index, reply)
        self._answer.begun(self._index)

    def _deliver(self, parts: list[Part], piece: Piece, finish: Finish | None = None, stop: str | int | None = None) -> None:
        self._called = self._called or any(isinstance(part, CallBegun) for part in parts)
        if parts:
            # Whatever stands between two parts, such as a marker, goes with the one after it.
            self.num_reasoning_tokens += isinstance(parts[-1], Reasoning) * (self.num_tokens - self._num_read)
            self._num_read = self.num_tokens
        ending = None if finish is None else Ending(finish, self._called, stop)
        if parts or piece.tokens or ending is not None:
            self._answer.deliver(Delta(self._index, tuple(parts), piece.tokens, ending))

    def _begin(self, cached_tokens: int) -> None:
        if not self._begun:
            self._begun = True
            self._answer.found(self._index, cached_tokens)
            self._answer.tell_prompt(self._index)


@dataclass(frozen=True, slots=True)
class ApiBackend:
    """What the front ends, HTTP and gRPC, have behind them."""

    cluster: str
    """Its name, with which its keys in Valkey begin."""
    valkey: redis.Redis
    """For what is remembered beyond this process: `Records`."""
    server: ServerConfig

    files: Files
    batches: BatchDesk
    preparer: Preparer
    tokenizer: Tokenizer
    runner: Runner
    conductor: ConductorLink
    accounts: Accounts
    bodies: Bodies
    side_thread: SideThread
    clock: Clock
    """The runner's."""
    caches: Desk
    """The contexts that are kept."""
    background: Background
    grammars: GrammarChecker
    tracer: Tracer | None = None
    """None: nothing is traced."""

    def start(self, request: PreparedRequest) -> AnswerStream:
        """Whoever asked for it, what is served of it is written down, and settled with what was taken of the caller's limits."""

        metrics.INCOMING.labels(self.preparer.model_name).inc()

        def on_begin(answer: AnswerStream) -> Callable[[], None]:
            return self.accounts.meter(request.usage_row, request.receipt, lambda: answer.served)

        return AnswerStream(request, self.runner, self.tokenizer, self.caches.answered, self.grammars, on_begin)

    async def begun_with_cache(self, request: ApiRequest, origin: Origin, num_bytes: int = UNKNOWN_BYTES) -> PreparedRequest:
        """What runs of a request that names a context cache, and has so many bytes itself. Raises InvalidRequest."""
        whole, use = await self.caches.applied(origin.tenant, request)
        size = max(num_bytes, 0 if use is None else use.cache.tokens)
        return replace(await self.side_thread.run(size, self.preparer.prepared, whole, origin), use=use)

    async def ready(self) -> bool:
        """Whether the cluster can take requests. Raises Unavailable when the Conductor cannot be asked, or this gateway is to stop."""
        if self.runner.leaving:
            raise Unavailable("this gateway is about to stop, and ends what it has", code="leaving")
        return (await self.conductor.cluster()).ready


class Traced:
    """An API request that has just begun to come, and its trace: its own, or its client's where nothing is traced."""

    def __init__(self, backend: ApiBackend, request_id: str, traceparent: str, endpoint: str, operation: str) -> None:
        """`traceparent` is what the client says, if it does; `operation` is what it asks for, by OpenTelemetry's name."""
        self._backend = backend
        now = backend.clock.now()
        if backend.tracer is None:
            self._trace = None
            TRACE_IDS.note(request_id, traceparent)
            traceparent = checked(traceparent)
        else:
            self._trace = backend.tracer.begin(request_id, traceparent, endpoint, operation, now, time.time_ns())
            traceparent = self._trace.header
        self.origin = Origin(request_id, now, traceparent=traceparent, endpoint=endpoint, operation=operation)
        """Without whose it is."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Of its answer."""
        return {} if self._trace is None else {TRACE_HEADER: self._trace.header}

    def tell(self, prepared: PreparedRequest, stream: bool) -> None:
        """What it has asked for."""
        if self._trace is not None:
            self._trace.tell(self._backend.preparer.model_name, stream, prepared.num_prompt_tokens, prepared.n)

    def end(self, status: str) -> None:
        """It is answered, with this status, as far as whoever asked is concerned."""
        if self._trace is not None and self._backend.tracer is not None:
            self._backend.tracer.end(self._trace, status, self._backend.clock.now())


def internal_error() -> SpringtideError:
    """What clients are told of a fault of ours, which the log has with its traceback."""
    return SpringtideError("internal error; the server's log has more", code="internal_error")


def message_for_client(error: SpringtideError, request_id: str = "") -> str:
    """The message for clients. Which node failed, and where it is, is for the log; they learn under which id to look there."""
    if error.http_status < 500 or error.code in _MEANT_FOR_CLIENTS:
        return error.message
    what = "the cluster cannot serve this request just now; try again later" if isinstance(error, Unavailable) else "internal error"
    return f"{what} (the server's log has more{f' under {request_id}' if request_id else ''})"
