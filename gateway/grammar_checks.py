"""Whether grammars can be compiled, within bounds of time and memory. A process of its own finds out (`python -m gateway.grammar_checks`),
which is killed when it takes too long: nothing that a client sends holds up anybody but those whose grammars wait behind it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import BinaryIO, TypeVar

from engine.sampling.grammars import GrammarCompiler
from engine.tokenizer.tokenizer import load_tokenizer
from springtide.errors import InvalidRequest, Overloaded, SpringtideError, Unavailable
from springtide.modelinfo import ModelInfo
from springtide.process import die_with_parent, start_python
from springtide.protocol.sampling import Grammar

_Result = TypeVar("_Result")

COMPILE_CPU_S = 1.5
"""Within which a grammar has to be compiled: of processor time, as others may use the machine, too."""
_LONGEST_S = 20.0
"""Then it is given up whatever it waits for."""
MOST_WAITING = 64
_START_S = 60.0
_ENDS_WITHIN_S = 1.0
_ENDED_BY_OTHERS = (-signal.SIGKILL, -signal.SIGTERM)
_MEMORY_BYTES = 4 << 30
"""Of addresses, of which the process uses a tenth for itself."""
_REMEMBERED = 1024
_LENGTH = struct.Struct("<I")


class GrammarChecker:
    """The process, and what it has found out lately. It is used in one event loop. A thread of its own starts the process and speaks with
    it: what a loop forks amid the threads of gRPC may never come to its program."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._found: OrderedDict[bytes, str] = OrderedDict()
        """What is wrong with grammars, by their digests; empty: nothing."""
        self._asked: dict[bytes, asyncio.Future[str]] = {}
        """About the same, what is being found out."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-checks")
        self._process: _Process | None = None
        self._closed = False

    def good(self, grammar: Grammar) -> bool:
        """Whether it is known to compile."""
        return not grammar or self._remembered(_digest(grammar)) == ""

    async def check(self, grammar: Grammar, field: str) -> None:
        """Returns when it is known to compile. Raises InvalidRequest, naming `field`, when it does not, Overloaded when too many
        wait for this, and Unavailable when nobody can tell just now."""
        digest = _digest(grammar)
        message = self._remembered(digest)
        if message is None:
            # Whoever goes away leaves the question to others who have it, too.
            message = await asyncio.shield(self._asked.get(digest) or self._begin(digest, grammar))
        if message:
            raise InvalidRequest(f"{field} {message}", param=field)

    def _remembered(self, digest: bytes) -> str | None:
        """What is wrong with it, if that was found out lately. What is asked about is remembered longest."""
        if digest not in self._found:
            return None
        self._found.move_to_end(digest)
        return self._found[digest]

    async def warm_up(self) -> None:
        """Returns when the process is ready, so that the first grammar need not wait for it. What goes wrong is said to that."""
        await self._in_thread(self._warm)

    async def close(self) -> None:
        """Ends the process, and begins no other. Idempotent."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
        with contextlib.suppress(RuntimeError):  # it is closed already
            await self._in_thread(self._end)
        self._thread.shutdown(wait=False)

    def _in_thread(self, work: Callable[..., _Result], *args: object) -> asyncio.Future[_Result]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _begin(self, digest: bytes, grammar: Grammar) -> asyncio.Future[str]:
        if len(self._asked) >= MOST_WAITING:
            raise Overloaded("too many grammars are waiting to be compiled", retry_after_s=1.0, reason="grammars")
        asked = self._asked[digest] = self._in_thread(self._ask, grammar)
        asked.add_done_callback(lambda asked: self._end_of(digest, asked))
        return asked

    def _end_of(self, digest: bytes, asked: asyncio.Future[str]) -> None:
        del self._asked[digest]
        if not asked.cancelled() and asked.exception() is None:
            self._found[digest] = asked.result()
            if len(self._found) > _REMEMBERED:
                self._found.popitem(last=False)

    # ---- in the thread ----

    def _ask(self, grammar: Grammar) -> str:
        try:
            process = self._started()
        except OSError as error:
            raise Unavailable(f"grammars cannot be compiled just now: {error!r}", code="grammar_checks") from None
        except SpringtideError as error:
            return f"cannot be used with this model: {error.message}"
        try:
            return process.answer(grammar.source, _LONGEST_S)
        except OSError as error:
            # It may be about to end: for want of processor time or memory, which is the grammar's fault.
            if process.ended_within(_ENDS_WITHIN_S) in (None, *_ENDED_BY_OTHERS):
                raise Unavailable(f"grammars cannot be compiled just now: {error!r}", code="grammar_checks") from None
            return f"cannot be compiled within {COMPILE_CPU_S:g} s, or within the memory that there is for it; make it simpler"
        finally:
            if not process.in_step:
                self._end()

    def _warm(self) -> None:
        with contextlib.suppress(OSError, SpringtideError):
            self._started()

    def _started(self) -> _Process:
        """The process, which has the model. Raises OSError when there can be none, and SpringtideError, which says what is wrong with the
        model."""
        if self._process is not None and self._process.ended_within(0.0) is None:
            return self._process
        self._end()
        process = self._process = _Process()
        try:
            if self._closed:
                raise OSError("the gateway ends")
            if message := process.answer(json.dumps(asdict(self._info)), _START_S):
                raise InvalidRequest(message)
        except BaseException:
            self._end()
            raise
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


class _Process:
    """`python -m gateway.grammar_checks`, from outside. Everything blocks, for as long as is said."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._socket, theirs = socket.socketpair()
        self.in_step = True
        """Whether each question so far was answered: else the next answer would not be the next question's."""
        try:
            with theirs:
                self._process = start_python("gateway.grammar_checks", stdin=theirs.fileno(), stdout=theirs.fileno())
        except BaseException:
            self._socket.close()
            raise

    def answer(self, text: str, within_s: float) -> str:
        """Raises OSError when there is none until then."""
        until = time.monotonic() + within_s
        data = text.encode()
        self.in_step = False
        self._socket.settimeout(within_s)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)
        (length,) = _LENGTH.unpack(self._receive(_LENGTH.size, until))
        answer = self._receive(length, until).decode()
        self.in_step = True
        return answer

    def _receive(self, num_bytes: int, until: float) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no answer in time")
            self._socket.settimeout(left_s)
            piece = self._socket.recv(num_bytes - len(data))
            if not piece:
                raise ConnectionResetError("the process that compiles them has ended")
            data += piece
        return bytes(data)

    def ended_within(self, seconds: float) -> int | None:
        """What it returned; None: it runs."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """May be called from any thread."""
        self._process.kill()

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


def _digest(grammar: Grammar) -> bytes:
    return hashlib.blake2b(grammar.source.encode(), digest_size=32).digest()


def main() -> None:
    """The process: the model first, then grammar after grammar, each answered with what is wrong with it."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    first = _read(asked)
    if first is None:
        return
    fields = json.loads(first)
    info = ModelInfo(**{**fields, "eos_token_ids": tuple(fields["eos_token_ids"])})
    try:
        compiler = GrammarCompiler(load_tokenizer(info), info)
    except SpringtideError as error:
        _write(answers, error.message)
        return
    _write(answers, "")
    while (source := _read(asked)) is not None:
        _write(answers, _wrong_with(compiler, source))


def _wrong_with(compiler: GrammarCompiler, source: str) -> str:
    # Its signal ends the process in the middle of whatever it is at.
    signal.setitimer(signal.ITIMER_PROF, COMPILE_CPU_S)
    try:
        compiler.compile(Grammar(source))
    except InvalidRequest as error:
        return error.message.removeprefix("grammar ")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return ""


def _read(stream: BinaryIO) -> str | None:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    return stream.read(length).decode()


def _write(stream: BinaryIO, text: str) -> None:
    data = text.encode()
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


if __name__ == "__main__":
    main()
