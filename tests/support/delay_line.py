"""A link with a delay, for kernels that have none to offer (netem): two TAP devices, and a process that carries frames between them and
holds each on the way for as long as told. Frames pass as the kernel hands them over, large ones before they are cut to the link's size,
so that it costs some hundred wake-ups a second however fast the link.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

_DEVICE = "/dev/net/tun"
# linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 0x01, 0x02, 0x04
_MOST_BYTES = (1 << 16) + 64
"""Of a frame with its headers."""


class DelayLine:
    """Devices of these names, in this network namespace until they are moved, and the process between them. Both are gone when it is."""

    def __init__(self, devices: tuple[str, str], delay_ms: float) -> None:
        """Raises OSError when there are no TAP devices."""
        self.devices = devices
        ends = [_tap(device) for device in devices]
        # It does not outlive the tests, however they end.
        command = ("setpriv", "--pdeathsig", "KILL", sys.executable, str(Path(__file__)), *map(str, ends), str(delay_ms / 1000))
        try:
            self._process = subprocess.Popen(command, pass_fds=ends)
        finally:
            for end in ends:
                os.close(end)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _tap(name: str) -> int:
    """Raises OSError."""
    end = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
        fcntl.ioctl(end, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
    except OSError:
        os.close(end)
        raise
    return end


def carry(ends: tuple[int, int], delay_s: float) -> None:
    """Without end."""
    peer = dict(zip(ends, reversed(ends), strict=True))
    held: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait_s = max(held[0][0] - time.monotonic(), 0.0) if held else None
        for end in select.select(ends, (), (), wait_s)[0]:
            due = time.monotonic() + delay_s
            try:
                while True:
                    held.append((due, peer[end], os.read(end, _MOST_BYTES)))
            except BlockingIOError:
                pass
        now = time.monotonic()
        while held and held[0][0] <= now:
            _, end, frame = held.popleft()
            # The device may be down or have no room: as on a wire, what is sent there is lost.
            with contextlib.suppress(OSError):
                os.write(end, frame)


if __name__ == "__main__":
    carry((int(sys.argv[1]), int(sys.argv[2])), float(sys.argv[3]))
