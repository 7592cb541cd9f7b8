"""Tasks and their ends: those that go on for as long as what made them, those that are ended, those of which the first to end ends the
others, those that are all waited for, those that come to their end though they are cancelled, and those that may forget that they were."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger(__name__)

AGAIN_AFTER_S = 1.0
Arguments = ParamSpec("Arguments")
T = TypeVar("T")


def supervised(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
    """Runs `work()` until it returns or the task is cancelled. What it raises is a mistake in it, no end of it: nobody waits for such a
    task, so the error is logged with its traceback, and the work begun anew after a pause."""
    return asyncio.create_task(_supervise(work, name), name=name)


async def _supervise(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    while True:
        try:
            return await work()
        except Exception:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                logger.exception("the task %s has failed as it was ended", name)
                raise asyncio.CancelledError from None
            logger.exception("the task %s has died; it begins anew", name)
        await asyncio.sleep(AGAIN_AFTER_S)


async def end(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancels `tasks`, of which those that were never begun are None, and returns when all of them have ended, even if it is cancelled
    itself. Whatever they come to is dropped."""
    cancelled = [task for task in tasks if task is not None]
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)


async def first_of(*works: Awaitable[T]) -> T:
    """Runs `works` side by side until one of them ends; returns what that returns or raises what it raises. The others are cancelled, and
    have ended when this returns: a work that is to go on is given as `asyncio.shield(work)`, by who awaits the work itself later.

    Of several that end at the same moment one with an error counts before one without, and then who is named first: name what is to be
    done before what ends it. Where any result could be that of either, give what is to be done as a task, and see whether it was cancelled.
    Cancelled from outside, this cancels all, and ends when they have. No error is lost: those that are not raised, mostly of works that
    fail while they are being cancelled, are logged.
    """
    tasks: list[asyncio.Future[T]] = [asyncio.ensure_future(work) for work in works]
    first: asyncio.Future[T] | None = None
    try:
        try:
            # Not asyncio.wait_for, whose Python 3.11 forgets a cancellation that meets the end of what it waits for.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(*tasks)
        ended = [task for task in tasks if task in done]
        first = next((task for task in ended if task.cancelled() or task.exception() is not None), ended[0])
        return first.result()
    finally:
        for task in tasks:
            if task is not first and task.done() and not task.cancelled() and (error := task.exception()) is not None:
                logger.error("what was to end with another has failed: %s", error, exc_info=error)


async def all_of(works: Iterable[Awaitable[T]]) -> list[T]:
    """What `works`, side by side, come to, once all of them have ended, however that was. Raises the first error there is. Cancelled from
    outside, this cancels all, and ends when they have."""
    tasks = [asyncio.ensure_future(work) for work in works]
    interrupted: asyncio.CancelledError | None = None
    while under_way := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(under_way)
        except asyncio.CancelledError as cancelled:
            interrupted = cancelled
            for task in under_way:
                task.cancel()
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if interrupted is not None:
        raise interrupted
    if errors:
        raise errors[0]
    return [task.result() for task in tasks]


async def uninterrupted(work: Awaitable[T]) -> T:
    """What `work`, that has to come to its end, comes to. Cancelled from outside, this ends as cancelled, but only then."""
    task = asyncio.ensure_future(work)
    interrupted: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as cancelled:
            interrupted = cancelled
    if interrupted is not None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("what was to come to its end has failed: %s", error, exc_info=error)
        raise interrupted
    return task.result()


async def persevere(attempt: Callable[[], Awaitable[T]], waiting_for: str, every_s: float, *errors: type[Exception]) -> T:
    """What `attempt()` comes to, once it raises none of `errors`. The log has what is waited for, and why, whenever that is another."""
    said = ""
    while True:
        try:
            return await attempt()
        except errors as error:
            if str(error) != said:
                said = str(error)
                logger.info("waiting for %s: %s", waiting_for, said)
        await asyncio.sleep(every_s)


def heeds_cancellation(function: Callable[Arguments, Awaitable[T]]) -> Callable[Arguments, Awaitable[T]]:
    """Ends `function` as cancelled whatever it came to, when its task has been cancelled meanwhile: what a task that was cancelled before
    calls to clean up goes on.

    Python 3.11's `asyncio.wait_for` forgets a cancellation that meets the answer (CPython issue 86296), and redis-py sends each command
    through it: a loop over such calls would outlive its `cancel()` for ever.
    """

    @wraps(function)
    async def heeding(*arguments: Arguments.args, **named: Arguments.kwargs) -> T:
        task = asyncio.current_task()
        before = 0 if task is None else task.cancelling()
        try:
            return await function(*arguments, **named)
        finally:
            if task is not None and task.cancelling() > before:
                raise asyncio.CancelledError

    return heeding
