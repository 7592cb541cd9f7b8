"""Loads prompts ahead of the steps that they join."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from engine.device.streams import DeviceWork
from engine.runner import ModelRunner
from node_runtime.model_thread import ModelThread
from springtide.ids import AttemptId

logger = logging.getLogger(__name__)

PIECE_BLOCKS = 256
"""The thread that launches copies launches steps too: so many blocks' at a time, whosever, and one or two steps in between."""
POLL_S = 0.001


class LoadsAhead:
    """Loads beside the steps, which run on the same thread. Neither that nor the event loop waits for a copy."""

    def __init__(self, runner: ModelRunner, thread: ModelThread) -> None:
        self._runner = runner
        self._thread = thread
        self._in_flight: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    def start(self, attempt_id: AttemptId, slots: Sequence[int], still_there: Callable[[], bool], ended: Callable[[], None]) -> None:
        """Begins one. Calls `ended` when the slots are not read any more, whatever has become of it: a step loads what it lacks.
        `still_there`: the engine computes in the arena that they are in."""
        task = asyncio.create_task(self._run(attempt_id, slots, still_there, ended), name=f"load {attempt_id}")
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)

    def close(self) -> None:
        """Begins and tells of none any more; what has been launched the runner waits for."""
        for task in self._in_flight:
            task.cancel()

    async def _run(self, attempt_id: AttemptId, slots: Sequence[int], still_there: Callable[[], bool], ended: Callable[[], None]) -> None:
        launched: list[DeviceWork] = []
        with _logged(attempt_id):
            for begin in range(0, len(slots), PIECE_BLOCKS):
                async with self._turn:
                    if not still_there():
                        break
                    work = await self._thread.run(self._runner.load_ahead, slots[begin : begin + PIECE_BLOCKS])
                if work is not None:
                    launched.append(work)
        with _logged(attempt_id):
            for work in launched:
                while not work.done():  # noqa: ASYNC110 (nothing signals the end of a copy)
                    await asyncio.sleep(POLL_S)
        ended()


@contextmanager
def _logged(attempt_id: AttemptId) -> Iterator[None]:
    """An error ends nothing but what is in here."""
    try:
        yield
    except Exception:
        logger.exception("a prompt could not be loaded ahead of its step", extra={"attempt_id": attempt_id})
