"""A network and mounts of the run's own: cuts and full disks then befall this cluster and nothing else on the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

_VARIABLE = "CHAOS_ISOLATED"
_NEEDS = ("unshare", "ip", "tc", "ss", "mount")


def isolated() -> bool:
    return os.environ.get(_VARIABLE) == "1"


def enter(arguments: Sequence[str]) -> None:
    """Runs this command again in namespaces of its own, as root or as an unprivileged user who may have such.

    Returns when already there, or when none can be had: then cuts and full disks are not injected.
    """
    if isolated() or any(shutil.which(command) is None for command in _NEEDS):
        return
    unshare = ["unshare", "--net", "--mount", *([] if os.getuid() == 0 else ["--user", "--map-root-user"])]
    if subprocess.run([*unshare, "ip", "link", "set", "lo", "up"], capture_output=True, check=False).returncode != 0:
        return
    # Shared memory of its own too: what others on the machine put there is not taken for a leak.
    script = 'ip link set lo up && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
    command = [*unshare, "sh", "-c", script, "sh", sys.executable, "-m", "tests.chaos", *arguments]
    os.execvpe(command[0], command, {**os.environ, _VARIABLE: "1"})
