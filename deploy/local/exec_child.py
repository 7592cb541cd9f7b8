"""Becomes the command given after the parent's process id, having asked the kernel to kill it when that parent dies.

Run by path, as `python -I -S exec_child.py PARENT_PID COMMAND…`: it imports nothing of Springtide, so it costs some milliseconds, and it
works for programs that know nothing of this, such as Valkey.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def signal_on_parent_death(number: int = signal.SIGTERM) -> None:
    """Asks the kernel for this signal to this process when the thread that started it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew
        sys.exit("the supervisor is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
