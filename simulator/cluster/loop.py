"""Virtual time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

EventT = TypeVar("EventT")


class Timer:
    """Something that will happen once, unless cancelled."""

    __slots__ = ("_do", "when")

    def __init__(self, when: float, do: Callable[[], None]) -> None:
        self.when = when
        self._do: Callable[[], None] | None = do

    def cancel(self) -> None:
        self._do = None

    def fire(self) -> None:
        do, self._do = self._do, None
        if do is not None:
            do()


class Loop:
    """`now` in seconds. What is due at the same moment happens in the order in which it was asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, Timer]] = []
        self.asked = 0
        """How many things, all in all."""
        self._stopped = False

    def at(self, when: float, do: Callable[[], None]) -> Timer:
        """`when` in the past means now."""
        timer = Timer(when if when > self.now else self.now, do)
        self.asked += 1
        heapq.heappush(self._timers, (timer.when, self.asked, timer))
        return timer

    def after(self, delay_s: float, do: Callable[[], None]) -> Timer:
        return self.at(self.now + delay_s, do)

    def run(self) -> None:
        """Runs until `stop` is called or nothing is left to happen."""
        timers, pop = self._timers, heapq.heappop
        self._stopped = False
        while timers and not self._stopped:
            self.now, _, timer = pop(timers)
            timer.fire()

    def stop(self) -> None:
        """Stops after what happens now."""
        self._stopped = True


class Mailbox(Generic[EventT]):
    """Events that come up while another is handled wait their turn."""

    def __init__(self, handle: Callable[[EventT], None]) -> None:
        self._handle = handle
        self._events: deque[EventT] = deque()
        self._busy = False

    def post(self, event: EventT) -> None:
        if self._busy:
            self._events.append(event)
            return
        self._busy = True
        try:
            self._handle(event)
            while self._events:
                self._handle(self._events.popleft())
        finally:
            self._busy = False
