"""A network and mounts of the run's own: cuts and full disks then befall this cluster and nothing else on the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

_VARIABLE = "CHAOS_ISOLATED"
_NEEDS = ("unshare", "ip", "tc", "ss", "mount")
# Shared memory of its own too: what others on the machine put there is not taken for a leak.
_SCRIPT = 'ip link set lo up && mount -t tmpfs tmpfs /dev/shm && exec "$@"'


def isolated() -> bool:
    return os.environ.get(_VARIABLE) == "1"


def isolating(command: Sequence[str]) -> list[str] | None:
    """What runs this command in namespaces of its own, as root or as an unprivileged user who may have such; None: none can be had."""
    if any(shutil.which(tool) is None for tool in _NEEDS):
        return None
    unshare = ["unshare", "--net", "--mount", *([] if os.getuid() == 0 else ["--user", "--map-root-user"])]
    prefix = [*unshare, "env", f"{_VARIABLE}=1", "sh", "-c", _SCRIPT, "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        return None
    return [*prefix, *command]


def enter(arguments: Sequence[str]) -> None:
    """Runs the suite again in namespaces of its own. Returns when already there, or when none can be had: then cuts and full disks are not
    injected."""
    command = None if isolated() else isolating([sys.executable, "-m", "tests.chaos", *arguments])
    if command is not None:
        os.execvp(command[0], command)
