"""Who of many has said nothing for too long, as far as the observer has looked itself (springtide.clock).

A thousand engines and their stores are listened to. One look for all of them costs what one of them would: they stand in the order in which
they were last heard.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from types import TracebackType

LOOK_EVERY_S = 0.25


class Silences:
    """All that must say something every `limit_s`. Lives in one event loop."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._looks = 0
        self._heard: OrderedDict[Silence, int] = OrderedDict()
        """Before how many looks each was last heard, the longest silent first."""
        self._next_look: asyncio.TimerHandle | None = None

    def begin(self, silence: Silence) -> None:
        """From now on it must be heard."""
        self.heard(silence)
        if self._next_look is None:
            self._look_again()

    def heard(self, silence: Silence) -> None:
        self._heard[silence] = self._looks
        self._heard.move_to_end(silence)

    def end(self, silence: Silence) -> None:
        """It need not be heard any more."""
        self._heard.pop(silence, None)
        if not self._heard and self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

    def _look(self) -> None:
        self._looks += 1
        most = math.ceil(self._limit_s / LOOK_EVERY_S)
        while self._heard:
            silence, heard = next(iter(self._heard.items()))
            if self._looks - heard < most:
                break
            del self._heard[silence]
            silence.over((self._looks - heard) * LOOK_EVERY_S)
        self._next_look = None
        if self._heard:
            self._look_again()

    def _look_again(self) -> None:
        self._next_look = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)


class Silence:
    """`async with Silence(silences) as silence:` raises TimeoutError when its body has not called `heard` in time."""

    def __init__(self, silences: Silences) -> None:
        self._silences = silences
        self._timeout = asyncio.timeout(None)
        self._over = False
        self._silent_s = 0.0

    def heard(self) -> None:
        if not self._over:
            self._silences.heard(self)

    def over(self, silent_s: float) -> None:
        """It was not heard for so long."""
        self._over, self._silent_s = True, silent_s
        self._timeout.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> Silence:
        await self._timeout.__aenter__()
        self._silences.begin(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over = True
        self._silences.end(self)
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise TimeoutError(f"nothing was heard for {self._silent_s:.1f} s") from None
