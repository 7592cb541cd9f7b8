"""A thread that is stuck, in a process that otherwise goes on: stopped as a debugger stops it."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
"""Requests of ptrace(2)."""
_WAIT_FOR_ANY_THREAD = 0x40000000
"""__WALL of waitpid(2)."""
_LOOK_S = 0.2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


@contextmanager
def stuck(pid: int) -> Iterator[None]:
    """The thread of the process that is busiest now goes no further until this is left, by the thread that has entered it. Skips the test
    where this user may not."""
    thread = _busiest(pid)
    try:
        _ptrace(_SEIZE, thread)
    except PermissionError as error:
        pytest.skip(f"a thread cannot be stopped here: {error}")
    try:
        _ptrace(_INTERRUPT, thread)
        os.waitpid(thread, _WAIT_FOR_ANY_THREAD)
        yield
    finally:
        with suppress(ProcessLookupError):  # its process has ended
            _ptrace(_DETACH, thread)


def _busiest(pid: int) -> int:
    process = psutil.Process(pid)
    before = {thread.id: thread.user_time for thread in process.threads()}
    time.sleep(_LOOK_S)
    return int(max(process.threads(), key=lambda thread: thread.user_time - before.get(thread.id, thread.user_time)).id)


def _ptrace(request: int, thread: int) -> None:
    if _libc.ptrace(request, thread, None, None) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace of thread {thread}: {os.strerror(code)}")
