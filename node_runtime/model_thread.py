"""The one thread that runs the model, so that the event loop stays free."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def default_threads(num_engines: int) -> int:
    """The cores that this process may use, divided among the engines of the machine."""
    return max(1, len(os.sched_getaffinity(0)) // num_engines)


class ModelThread:
    """Calls run one after another in the order given. `num_threads`: of torch's operators."""

    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="model", initializer=torch.set_num_threads, initargs=(num_threads,))

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """To be awaited, or given a callback, in the event loop that calls this."""
        return asyncio.get_running_loop().run_in_executor(self._executor, lambda: work(*args, **kwargs))

    async def at_rest(self) -> None:
        """Returns when what was to run by now has ended."""
        await self.run(lambda: None)

    async def close(self) -> None:
        """Returns when what runs has ended; what waits is dropped."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)
