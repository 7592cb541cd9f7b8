"""Whether grammars can be compiled, within bounds of time and memory. A process of its own finds out (`python -m gateway.grammar_checks`),
which is killed when it takes too long: nothing that a client sends holds up anybody but those whose grammars wait. They wait by tenants, of
which the one goes next that has had the least of the process's time: whoever sends slow ones waits for oneself."""

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
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
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
MOST_WAITING, MOST_WAITING_OF_A_TENANT = 256, 64
_START_S = 60.0
_ENDS_WITHIN_S = 1.0
_ENDED_BY_OTHERS = (-signal.SIGKILL, -signal.SIGTERM)
_MEMORY_BYTES = 4 << 30
"""Of addresses, of which the process uses a tenth for itself."""
_REMEMBERED = 1024
_LENGTH = struct.Struct("<I")


@dataclass(slots=True, eq=False)
class _Question:
    grammar: Grammar
    answer: asyncio.Future[str]
    """What is wrong with it; empty: nothing."""
    begun: bool = False


class _Lines:
    """Who waits, by tenants."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[_Question]] = {}
        """None is empty."""
        self._spent_s: dict[str, float] = {}
        """Of the process's time, on a scale on which whoever comes has had as much as the one that went last."""
        self._last_s = 0.0

    def join(self, tenant: str, question: _Question) -> None:
        """Raises Overloaded when too many wait."""
        line = self._lines.get(tenant, deque())
        if question in line:
            return
        if len(line) >= MOST_WAITING_OF_A_TENANT or sum(map(len, self._lines.values())) >= MOST_WAITING:
            raise Overloaded("too many grammars are waiting to be compiled", retry_after_s=1.0, reason="grammars")
        line.append(question)
        if tenant not in self._lines:
            self._lines[tenant] = line
            self._spent_s[tenant] = max(self._spent_s.get(tenant, 0.0), self._last_s)

    def next(self) -> tuple[str, _Question] | None:
        """The first in line of whoever has had the least; None when nobody waits."""
        while self._lines:
            tenant = min(self._lines, key=self._spent_s.__getitem__)
            line = self._lines[tenant]
            question = line.popleft()
            if not line:
                del self._lines[tenant]
            if not question.begun:  # it may have had its turn in another's line
                self._last_s = self._spent_s[tenant]
                return tenant, question
        self._spent_s.clear()
        self._last_s = 0.0
        return None

    def spent(self, tenant: str, seconds: float) -> None:
        """Charges the tenant whose turn it was."""
        self._spent_s[tenant] += seconds


class GrammarChecker:
    """The process, and what it has found out lately. It is used in one event loop. A thread of its own starts the process and speaks with
    it: what a loop forks amid the threads of gRPC may never come to its program."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._found: OrderedDict[bytes, str] = OrderedDict()
        """What is wrong with grammars, by their digests; empty: nothing."""
        self._asked: dict[bytes, _Question] = {}
        """What is being found out, by the same."""
        self._lines = _Lines()
        self._answering: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-checks")
        self._process: _Process | None = None
        self._ended = False
        """The process was ended by its last question."""
        self._closed = False

    def good(self, grammar: Grammar) -> bool:
        """Whether it is known to compile."""
        return not grammar or self._remembered(_digest(grammar)) == ""

    async def check(self, grammar: Grammar, field: str, tenant: str) -> None:
        """Returns when it is known to compile. Raises InvalidRequest, naming `field`, when it does not, Overloaded when too many
        of the tenant's, or in all, wait for this, and Unavailable when nobody can tell just now."""
        digest = _digest(grammar)
        message = self._remembered(digest)
        if message is None:
            # Whoever goes away leaves the question to others who have it, too.
            message = await asyncio.shield(self._ask(digest, grammar, tenant))
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

    def _ask(self, digest: bytes, grammar: Grammar, tenant: str) -> asyncio.Future[str]:
        question = self._asked.get(digest)
        if question is None:
            question = _Question(grammar, asyncio.get_running_loop().create_future())
            self._lines.join(tenant, question)
            self._asked[digest] = question
            question.answer.add_done_callback(lambda answer: self._end_of(digest, answer))
        elif not question.begun:
            with contextlib.suppress(Overloaded):  # it has its place in another's line
                self._lines.join(tenant, question)
        if self._answering is None:
            self._answering = asyncio.create_task(self._answer_all(), name="grammars")
        return question.answer

    async def _answer_all(self) -> None:
        try:
            while (turn := self._lines.next()) is not None:
                tenant, question = turn
                question.begun, began = True, time.monotonic()
                try:
                    question.answer.set_result(await self._found_out(question.grammar))
                except Exception as error:
                    question.answer.set_exception(error)
                if self._ended and not self._closed:
                    # Whoever's grammar has ended the process pays for the next one, too.
                    await self.warm_up()
                self._lines.spent(tenant, time.monotonic() - began)
        finally:
            self._answering = None

    async def _found_out(self, grammar: Grammar) -> str:
        if self._closed:
            raise Unavailable("the gateway ends", code="grammar_checks")
        return await self._in_thread(self._find_out, grammar)

    def _end_of(self, digest: bytes, answer: asyncio.Future[str]) -> None:
        del self._asked[digest]
        if not answer.cancelled() and answer.exception() is None:
            self._found[digest] = answer.result()
            if len(self._found) > _REMEMBERED:
                self._found.popitem(last=False)

    # ---- in the thread ----

    def _find_out(self, grammar: Grammar) -> str:
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
                self._ended = True

    def _warm(self) -> None:
        self._ended = False
        # What goes wrong is said to the first grammar, which starts it anew.
        with contextlib.suppress(Exception):
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
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    most = _MEMORY_BYTES if allowed == resource.RLIM_INFINITY else min(_MEMORY_BYTES, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
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
