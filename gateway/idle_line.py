"""Who asks for idle capacity, and when. Pure: no I/O, no clock."""

from __future__ import annotations

from springtide.ids import RequestId

LONGEST_PAUSE_S = 1.0


class IdleLine:
    """The requests that wait for idle capacity. One at a time asks the Conductor for it, each in its turn: when one finds some the next
    asks at once, else after a pause, which grows from one refusal to the next. So however many wait, they cost the Conductor little, and a
    large one that finds no room keeps no small one from it."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, None] = {}
        self._asking: RequestId | None = None
        self._next_at = float("-inf")
        self._pause_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    @property
    def next_at(self) -> float | None:
        """When the next may ask; None: when something else happens."""
        return self._next_at if self._waiting and self._asking is None else None

    def join(self, request_id: RequestId) -> None:
        """It waits behind all others."""
        self._waiting[request_id] = None

    def leave(self, request_id: RequestId) -> None:
        """It waits no more, nor is its answer awaited."""
        self._waiting.pop(request_id, None)
        if self._asking == request_id:
            self._asking = None

    def take(self, now: float) -> RequestId | None:
        """Whose turn it is to ask, and who from now on does; None: nobody's."""
        if self._asking is not None or not self._waiting or now < self._next_at:
            return None
        self._asking = next(iter(self._waiting))
        del self._waiting[self._asking]
        return self._asking

    def refused(self, now: float, again_s: float) -> None:
        """Whoever asked found none; it may be looked for again after so long at the earliest."""
        self._asking = None
        self._pause_s = min(max(2 * self._pause_s, again_s), LONGEST_PAUSE_S)
        self._next_at = now + self._pause_s

    def found(self) -> None:
        """There may be some: whoever asked has found it, or somebody has given it back."""
        self._pause_s, self._next_at = 0.0, float("-inf")
