"""What the virtual machine boots: Debian's kernel, a small initramfs, and the tools that the host may lack. Nothing is installed.

Everything comes from Debian packages that are downloaded with apt-get and unpacked below one directory.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PACKAGES = (
    "busybox-static",
    "ibverbs-providers",
    "iproute2",
    "libbpf1",
    "libbsd0",
    "libcap2",
    "libelf1",
    "libibverbs1",
    "libmd0",
    "libmnl0",
    "libnl-3-200",
    "libnl-route-3-200",
    "librdmacm1",
    "libtirpc3",
    "libxtables12",
    "python3-pyverbs",
)
MODULES = ("virtio_pci", "9p", "9pnet_virtio", "overlay", "dummy", "crc32_generic", "rdma_rxe", "ib_uverbs")
INIT = Path(__file__).with_name("init.sh")


class CannotRun(Exception):
    """This machine cannot have the virtual machine; the message says why."""


@dataclass(frozen=True)
class Image:
    directory: Path

    @property
    def kernel(self) -> Path:
        return self.directory / "vmlinux"

    @property
    def initramfs(self) -> Path:
        return self.directory / "initramfs.cpio"

    @property
    def tools(self) -> Path:
        """Laid over the host's files."""
        return self.directory / "tools"

    @property
    def python_path(self) -> Path:
        """Has pyverbs, and nothing else of Debian's."""
        return self.directory / "python"


def make_image(cache: Path) -> Image:
    """Made once, in some ten seconds. Raises CannotRun."""
    if platform.machine() != "x86_64":
        raise CannotRun(f"the virtual machine is for x86_64, not {platform.machine()}")
    for command in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(command) is None:
            raise CannotRun(f"there is no {command}: the virtual machine is made of Debian packages")
    recipe = hashlib.sha256(Path(__file__).read_bytes() + INIT.read_bytes()).hexdigest()[:16]
    image = Image(cache / recipe)
    if not image.directory.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            _build(Image(Path(scratch) / "image"), Path(scratch))
            for outdated in [path for path in cache.iterdir() if path != Path(scratch)]:
                shutil.rmtree(outdated)
            (Path(scratch) / "image").rename(image.directory)
    _check_python(image)
    return image


def _build(image: Image, scratch: Path) -> None:
    print("rdma-vm: downloading packages and making the image", file=sys.stderr, flush=True)
    kernel = _kernel_package()
    unpacked = scratch / "kernel"
    _download([kernel, *PACKAGES], scratch)
    image.tools.mkdir(parents=True)
    for package in scratch.glob("*.deb"):
        target = unpacked if package.name.startswith(kernel) else image.tools
        _run(["dpkg-deb", "-x", str(package), str(target)])
    version = kernel.removeprefix("linux-image-")
    image.kernel.write_bytes(_decompressed((unpacked / "boot" / f"vmlinuz-{version}").read_bytes()))
    _make_initramfs(image, unpacked / "lib" / "modules" / version, scratch / "initramfs")
    _merge_usr(image.tools)
    image.python_path.mkdir()
    shutil.move(image.tools / "usr/lib/python3/dist-packages/pyverbs", image.python_path / "pyverbs")


def _kernel_package() -> str:
    answer = subprocess.run(["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True)
    found = re.search(r"Depends: (linux-image-\d\S*)", answer.stdout)
    if found is None:
        raise CannotRun("apt knows no linux-image-amd64: `apt-get update` first, on Debian 12")
    return found[1]


def _download(packages: list[str], directory: Path) -> None:
    _run(["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *packages], directory)


def _run(command: list[str], directory: Path | None = None) -> None:
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    if result.returncode != 0:
        raise CannotRun(f"{' '.join(command[:3])} ... failed: {result.stderr.strip()[-500:]}")


def _decompressed(image: bytes) -> bytes:
    """The ELF file inside of a boot image: booted directly, it need not unpack itself under emulation."""
    start = image.find(b"\xfd7zXZ\0")
    while start >= 0:
        try:
            kernel = lzma.LZMADecompressor().decompress(image[start:])
        except lzma.LZMAError:
            kernel = b""
        if kernel.startswith(b"\x7fELF"):
            return kernel
        start = image.find(b"\xfd7zXZ\0", start + 1)
    raise CannotRun("the kernel is not compressed with xz, as Debian 12's is")


def _make_initramfs(image: Image, modules: Path, root: Path) -> None:
    for directory in ("bin", "modules", "proc", "sys", "dev", "host", "tools", "written", "root"):
        (root / directory).mkdir(parents=True)
    shutil.copy(image.tools / "bin/busybox", root / "bin/busybox")
    shutil.copy(INIT, root / "init")
    (root / "init").chmod(0o755)
    ordered = _with_dependencies(modules)
    for module in ordered:
        shutil.copy(module, root / "modules" / module.name)
    (root / "modules/order").write_text("".join(f"{module.name}\n" for module in ordered))
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    with image.initramfs.open("wb") as out:
        command = [str(image.tools / "bin/busybox"), "cpio", "-o", "-H", "newc"]
        subprocess.run(command, cwd=root, input=names.encode(), stdout=out, stderr=subprocess.DEVNULL, check=True)


def _with_dependencies(directory: Path) -> list[Path]:
    """MODULES and what they need, in the order in which they can be loaded. What is not found is built into the kernel."""
    files = {path.stem.replace("-", "_"): path for path in directory.rglob("*.ko")}
    ordered: dict[str, Path] = {}

    def add(name: str) -> None:
        if name in ordered or name not in files:
            return
        needed = re.search(rb"\0depends=([^\0]*)\0", files[name].read_bytes())
        for other in needed[1].decode().split(",") if needed else []:
            add(other.replace("-", "_"))
        ordered[name] = files[name]

    for module in MODULES:
        add(module)
    return list(ordered.values())


def _merge_usr(tools: Path) -> None:
    """On the host /bin, /sbin and /lib are links into /usr, which a directory of that name would cover."""
    for name in ("bin", "sbin", "lib"):
        if (tools / name).is_dir():
            shutil.copytree(tools / name, tools / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(tools / name)


def _check_python(image: Image) -> None:
    tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}-"
    if not any(tag in name for name in os.listdir(image.python_path / "pyverbs")):
        raise CannotRun(f"Debian's pyverbs is not built for Python {platform.python_version()}")
