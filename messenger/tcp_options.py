"""What can be chosen about the tcp transport."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from messenger import native

DEFAULT_LANES = 4
"""Where there are cores for them."""
MAX_LANES = 32
"""Of one connection. The C part has room for twice as many: those that end are still there while others take their place."""


@dataclass(frozen=True, slots=True)
class TcpOptions:
    lanes: int = field(default_factory=lambda: min(DEFAULT_LANES, max(2, len(os.sched_getaffinity(0)))))
    """Connections to one peer that large batches are striped over. More of them than cores cost a tenth of the rate."""
    connect_timeout_s: float = 2.0
    peer_timeout_s: float = 1.2
    """A peer that is silent for so long in the middle of an exchange is lost."""
    checksums: bool = False
    """Of every slice, both ways, on connections that are opened from here."""
    secret: bytes | None = field(default=None, repr=False)
    """The cluster's: only who knows it is served, and believed. Without one, only this machine is spoken with."""
    open_to_strangers: bool = False
    """Does without a secret on other addresses than loopback too: whoever reaches the port can read and write the region."""
    native: bool = native.AVAILABLE
    """The data plane of the C part; False: that in Python. Either speaks with either."""

    def __post_init__(self) -> None:
        if not 1 <= self.lanes <= MAX_LANES:
            raise ValueError(f"TcpOptions.lanes must be from 1 to {MAX_LANES}, not {self.lanes}")
        if self.native and not native.AVAILABLE:
            raise ValueError("TcpOptions.native is set, but messenger._native has not been built (it takes a C compiler)")
