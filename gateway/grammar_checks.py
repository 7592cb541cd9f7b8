"""Whether grammars can be compiled, within bounds of time and memory. A process of its own finds out (`python -m gateway.grammar_checks`),
which is killed when it takes too long: nothing that a client sends holds up anybody but those whose grammars wait behind it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import resource
import signal
import struct
import sys
from collections import OrderedDict
from dataclasses import asdict
from typing import BinaryIO

from engine.sampling.grammars import GrammarCompiler
from engine.tokenizer.tokenizer import load_tokenizer
from springtide.errors import InvalidRequest, Overloaded, SpringtideError, Unavailable
from springtide.modelinfo import ModelInfo
from springtide.process import die_with_parent
from springtide.protocol.sampling import Grammar

logger = logging.getLogger(__name__)

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
    """The process, and what it has found out lately. Everything runs in one event loop."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._found: OrderedDict[bytes, str] = OrderedDict()
        """What is wrong with grammars, by their digests; empty: nothing."""
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0

    def good(self, grammar: Grammar) -> bool:
        """Whether it is known to compile."""
        return not grammar or self._found.get(_digest(grammar)) == ""

    async def check(self, grammar: Grammar, field: str) -> None:
        """Returns when it is known to compile. Raises InvalidRequest, naming `field`, when it does not, Overloaded when too many
        wait for this, and Unavailable when nobody can tell just now."""
        digest = _digest(grammar)
        if digest not in self._found:
            if self._waiting >= MOST_WAITING:
                raise Overloaded("too many grammars are waiting to be compiled", retry_after_s=1.0, reason="grammars")
            self._waiting += 1
            try:
                async with self._turn:
                    if digest not in self._found:
                        self._found[digest] = await self._ask(grammar)
            finally:
                self._waiting -= 1
            if len(self._found) > _REMEMBERED:
                self._found.popitem(last=False)
        self._found.move_to_end(digest)
        if message := self._found[digest]:
            raise InvalidRequest(f"{field} {message}", param=field)

    async def warm_up(self) -> None:
        """Returns when the process is ready, so that the first grammar need not wait for it. What goes wrong is said to that."""
        async with self._turn:
            if self._process is None:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    await self._started()

    async def close(self) -> None:
        """Ends the process."""
        if (process := self._process) is not None:
            self._process = None
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ask(self, grammar: Grammar) -> str:
        try:
            if self._process is None and (message := await self._started()):
                return message
            return await self._answer(grammar.source, _LONGEST_S)
        except (OSError, asyncio.IncompleteReadError) as error:  # TimeoutError is an OSError
            process = self._process
            # It may be about to end: for want of processor time or memory, which is the grammar's fault.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ENDS_WITHIN_S):
                    if process is not None:
                        await process.wait()
            ended_by_itself = process is not None and process.returncode not in (None, *_ENDED_BY_OTHERS)
            await self.close()
            if not ended_by_itself:
                raise Unavailable(f"grammars cannot be compiled just now: {error!r}", code="grammar_checks") from None
            return f"cannot be compiled within {COMPILE_CPU_S:g} s, or within the memory that there is for it; make it simpler"
        except BaseException:
            # Cancelled in the middle: its answer would be taken for the next one's.
            await self.close()
            raise

    async def _started(self) -> str:
        """What is wrong with the model; empty: nothing, and the process is ready. There is none otherwise, nor where it raises."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "gateway.grammar_checks"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "SPRINGTIDE_PARENT_PID": str(os.getpid())},
            )
            message = await self._answer(json.dumps(asdict(self._info)), _START_S)
        except BaseException:
            await self.close()
            raise
        if not message:
            return ""
        await self.close()
        return f"cannot be used with this model: {message}"

    async def _answer(self, text: str, within_s: float) -> str:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        data = text.encode()
        async with asyncio.timeout(within_s):
            process.stdin.write(_LENGTH.pack(len(data)) + data)
            await process.stdin.drain()
            (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
            return (await process.stdout.readexactly(length)).decode()


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
