"""What those who watch are sent: one picture for all of them, asked for once a second while there are any, and of each viewer's part of it
what has changed, made once for all who see the same."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from gateway.caching.context import ContextCache
from gateway.console.deltas import Tables, changed, written_delta, written_state
from gateway.console.picture import Picture, Viewer
from gateway.exchange import event_of, written
from springtide.errors import Overloaded, Unavailable
from springtide.protocol.observation import Observe, ObservedPart
from springtide.supervision import end, supervised

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
MOST_WATCHERS = 100
_ANSWER_S = 3.0
"""For the Conductor, and for Valkey."""
_LINGER_S = 5.0
"""Who asks for the state alone may ask again."""
_CACHES_EVERY_S = 10.0
_MOST_TENANTS, _MOST_CACHES = 50, 50
"""Whose context caches are shown, and how many of each."""
_MOST_BEHIND = 8
"""Changes that wait for a watcher; who is further behind is sent everything anew."""


class _Watcher:
    def __init__(self) -> None:
        self.changes: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_BEHIND)
        """None: the end."""
        self.behind = False

    def put(self, change: bytes | None) -> None:
        if self.changes.full():
            self.behind = True
            while not self.changes.empty():
                self.changes.get_nowait()
        self.changes.put_nowait(change)


class _View:
    """What one kind of viewer sees, as it was last sent."""

    def __init__(self, viewer: Viewer, picture: Picture) -> None:
        self.watchers: set[_Watcher] = set()
        self._viewer = viewer
        self._picture = picture
        self._head = picture.head(viewer)
        self._tables: Tables = picture.tables(viewer)
        self._state = ""
        self._lock = asyncio.Lock()

    async def publish(self) -> None:
        """Sends its watchers what has changed."""
        async with self._lock:
            tables, before = self._picture.tables(self._viewer), self._tables
            self._head, self._tables, self._state = self._picture.head(self._viewer), tables, ""
            if not self.watchers:
                return
            changes = {}
            for name, table in tables.items():
                changes[name] = changed(before[name], table)
                await asyncio.sleep(0)
            event = event_of(await written(written_delta(self._head, changes)), "delta")
            for watcher in self.watchers:
                watcher.put(event)

    async def state(self) -> str:
        """All of it, as JSON."""
        async with self._lock:
            return await self._whole()

    async def join(self, watcher: _Watcher) -> bytes:
        """All of it, as the event after which the watcher's changes count."""
        async with self._lock:
            state = await self._whole()
            while not watcher.changes.empty():
                watcher.changes.get_nowait()
            watcher.behind = False
            self.watchers.add(watcher)
        return event_of(state, "state")

    async def _whole(self) -> str:
        if not self._state:
            self._state = await written(written_state(self._head, self._tables))
        return self._state


class Feed:
    """Looks while somebody watches."""

    def __init__(
        self,
        observe: Callable[[Observe], AsyncGenerator[ObservedPart, None]],
        caches: Callable[[int, int], Awaitable[Sequence[ContextCache]]],
    ) -> None:
        """`observe` asks the Conductor, `caches` lists so many context caches of so many tenants; both raise Unavailable."""
        self.picture = Picture()
        self._observe = observe
        self._caches = caches
        self._views: dict[str | None, _View] = {}
        self._num_watchers = 0
        self._wanted_until = 0.0
        self._caches_at = float("-inf")
        self._looked_at = float("-inf")
        self._looked = asyncio.Event()
        """Set, and replaced, after each look."""
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def num_watchers(self) -> int:
        return self._num_watchers

    async def state(self, viewer: Viewer) -> str:
        """All that the viewer may see now, as JSON."""
        view = await self._current(viewer)
        return await view.state()

    async def events(self, viewer: Viewer) -> AsyncGenerator[bytes, None]:
        """The same as a server-sent event, then what changes. Raises Overloaded when too many watch already."""
        if self._num_watchers >= MOST_WATCHERS:
            raise Overloaded(f"{MOST_WATCHERS} watch this gateway already", retry_after_s=10.0, reason="too_many_watchers")
        watcher, view = _Watcher(), None
        self._num_watchers += 1
        try:
            view = await self._current(viewer)
            yield await view.join(watcher)
            while not self._closed and (change := await watcher.changes.get()) is not None:
                yield await view.join(watcher) if watcher.behind else change
        finally:
            self._num_watchers -= 1
            if view is not None:
                view.watchers.discard(watcher)

    async def close(self) -> None:
        """Ends all streams. Idempotent."""
        self._closed = True
        for view in self._views.values():
            for watcher in view.watchers:
                watcher.put(None)
        await end(self._task)

    async def _current(self, viewer: Viewer) -> _View:
        """The viewer's, not older than a look."""
        self._wanted_until = time.monotonic() + _LINGER_S
        if self._task is None or self._task.done():
            self._task = supervised(self._look_on, "console-feed")
        if time.monotonic() - self._looked_at > 2 * LOOK_EVERY_S:
            await self._looked.wait()
        view = self._views.get(viewer.key)
        if view is None:
            view = self._views[viewer.key] = _View(viewer, self.picture)
        return view

    async def _look_on(self) -> None:
        while self._num_watchers or time.monotonic() < self._wanted_until:
            began = time.monotonic()
            await self._look()
            for key, view in list(self._views.items()):
                await view.publish()
                if not view.watchers and began > self._wanted_until:
                    del self._views[key]
            self._looked_at = time.monotonic()
            self._looked.set()
            self._looked = asyncio.Event()
            await asyncio.sleep(max(0.1, began + LOOK_EVERY_S - time.monotonic()))
        self._views.clear()

    async def _look(self) -> None:
        picture = self.picture
        picture.begin()
        try:
            async with asyncio.timeout(_ANSWER_S), contextlib.aclosing(self._observe(picture.asks)) as parts:
                async for part in parts:
                    picture.take(part, time.time())
                    await asyncio.sleep(0)
            picture.complete(time.time())
        except Unavailable as error:
            picture.lost(error.message)
        except ValueError:
            logger.exception("the Conductor's answer makes no sense")
            picture.lost("the Conductor's answer makes no sense; the gateway's log has more")
        except TimeoutError:
            picture.lost(f"the Conductor has not answered within {_ANSWER_S:g} s")
        if time.monotonic() - self._caches_at >= _CACHES_EVERY_S:
            self._caches_at = time.monotonic()
            # Without Valkey the caches are shown as they last were.
            with contextlib.suppress(Unavailable, TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    picture.take_caches(await self._caches(_MOST_TENANTS, _MOST_CACHES), time.time())
