"""What fault tests injected, and what came of it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from messenger.base import TransferTimeout
from springtide.errors import PeerLost, SpringtideError, StaleHandle


class Ended(Exception):
    """An operation came to a typed end other than success; `reason` names it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


_NAMES: dict[type[BaseException], str] = {PeerLost: "peer lost", TransferTimeout: "deadline", StaleHandle: "stale"}


@dataclass
class Tally:
    injected: Counter[str] = field(default_factory=Counter)
    tried: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    """Typed, by reason."""
    untyped: list[str] = field(default_factory=list)
    wrong_bytes: int = 0
    slots_leaked: int = 0
    slowest_failure_s: float | None = None
    """From the fault to the typed end of an operation that it befell, where that is measured."""

    @contextlib.contextmanager
    def operation(self, name: str) -> Iterator[None]:
        self.tried[name] += 1
        try:
            yield
        except Ended as end:
            self.failed[end.reason] += 1
            raise
        except SpringtideError as error:
            self.failed[_NAMES.get(type(error), type(error).__name__)] += 1
            raise
        except BaseException as error:
            self.untyped.append(f"{name}: {error!r}")
            raise
        else:
            self.done[name] += 1

    def ended_after(self, seconds: float) -> None:
        self.slowest_failure_s = max(seconds, self.slowest_failure_s or 0.0)

    def line(self, title: str) -> str:
        injected = ", ".join(f"{kind} {count}" for kind, count in sorted(self.injected.items()) if count) or "nothing"
        failed = ", ".join(f"{reason} {count}" for reason, count in sorted(self.failed.items()))
        slowest = "" if self.slowest_failure_s is None else f" within {self.slowest_failure_s:.1f} s"
        return (
            f"{title}: injected {injected}; operations tried {self.tried.total()}, done {self.done.total()}, "
            f"failed typed {self.failed.total()}{slowest}{f' ({failed})' if failed else ''}, failed otherwise {len(self.untyped)}, "
            f"wrong bytes {self.wrong_bytes}, slots leaked {self.slots_leaked}"
        )

    def check(self) -> None:
        """Asserts that every operation has ended, typed where not well, and that nothing was corrupted or lost."""
        assert not self.untyped, self.untyped
        assert self.tried.total() == self.done.total() + self.failed.total(), "an operation has not ended"
        assert self.wrong_bytes == 0
        assert self.slots_leaked == 0
