"""Runs a command on a kernel that has software RDMA devices: `python tests/rdma [--links N] [--timeout S] COMMAND...`.

The virtual machine is emulated by QEMU (no KVM needed) and sees the host's files, read-only; what the command writes is forgotten. Code
runs some 20 times slower in it. Its output is the command's, its exit status too; 77 when this machine cannot have it, 124 when the time
is up, 125 when it broke.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from image import CannotRun, Image, make_image

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = REPOSITORY / "build" / "rdma-vm"
CANNOT_RUN, TIMED_OUT, BROKEN = 77, 124, 125
_ARGUMENTS = "springtide.job={} springtide.links={}"
"""Of init.sh."""
_STATUS = re.compile(rb"\x1eexit (\d+)")


def main() -> int:
    parser = argparse.ArgumentParser(prog="rdma-vm", description=__doc__)
    parser.add_argument("--links", type=int, default=2, help="RDMA devices, each with a network of its own: rxe0, rxe1, ...")
    parser.add_argument("--timeout", type=int, default=900, help="seconds")
    parser.add_argument("--memory", type=int, default=3072, help="MiB")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    try:
        _need_qemu()
        image = make_image(CACHE)
    except CannotRun as reason:
        print(f"rdma-vm: {reason}", file=sys.stderr)
        return CANNOT_RUN
    with tempfile.TemporaryDirectory(prefix="rdma-vm-") as scratch:
        job, console = Path(scratch) / "job", Path(scratch) / "console"
        job.write_text(_job(arguments.command, image))
        try:
            status = _boot(_qemu(image, job, console, arguments.links, arguments.memory), arguments.timeout)
        except subprocess.TimeoutExpired:
            print(f"rdma-vm: not done after {arguments.timeout} s", file=sys.stderr)
            return TIMED_OUT
        if status is None:
            print(f"rdma-vm: ended without a status; its console:\n{console.read_text(errors='replace')[-4000:]}", file=sys.stderr)
            return BROKEN
        return status


def _need_qemu() -> None:
    if shutil.which("qemu-system-x86_64"):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise CannotRun("there is no qemu-system-x86_64; on Debian: apt-get install qemu-system-x86")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "qemu-system-x86"]):
        if subprocess.run(["apt-get", *command], env=environment, stdout=sys.stderr).returncode != 0:
            raise CannotRun(f"apt-get {command[0]} failed: no QEMU to be had")


def _job(command: list[str], image: Image) -> str:
    variables = {
        "PATH": f"{sys.prefix}/bin:/usr/sbin:/usr/bin",
        "PYTHONPATH": str(image.python_path),
        "LC_ALL": "C.UTF-8",
        "HOME": "/tmp",
        "TEST_WAIT_S": "150",
    }
    lines = [*(f"export {name}={shlex.quote(value)}" for name, value in variables.items()), f"cd {shlex.quote(os.getcwd())}"]
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])


def _qemu(image: Image, job: Path, console: Path, links: int, memory: int) -> list[str]:
    # The clock is not the TSC, whose rate a busy host lets the kernel mistake.
    kernel = f"console=ttyS0 quiet panic=-1 mitigations=off nokaslr no_timer_check clocksource=hpet {_ARGUMENTS.format(job, links)}"
    # No AVX: QEMU 7.2 emulates AVX2 wrongly, and numpy's argsort then does not sort.
    processor = ["-accel", "tcg,thread=multi,tb-size=256", "-cpu", "Nehalem,+rdrand", "-smp", "2"]
    command = ["qemu-system-x86_64", "-machine", "pc", *processor, "-m", str(memory)]
    command += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    command += ["-kernel", str(image.kernel), "-initrd", str(image.initramfs), "-append", kernel]
    command += ["-serial", f"file:{console}", "-chardev", "stdio,id=out,signal=off", "-serial", "chardev:out"]
    for tag, path in (("host", "/"), ("tools", str(image.tools))):
        command += ["-fsdev", f"local,id={tag},path={path},security_model=none,multidevs=remap,readonly=on"]
        command += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    return command


def _boot(command: list[str], timeout_s: int) -> int | None:
    """Copies the machine's output to stdout; the command's status is its last line. Raises subprocess.TimeoutExpired."""
    status = None
    guarded = ["timeout", "--kill-after=5", str(timeout_s), *command]
    with subprocess.Popen(guarded, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as machine:
        assert machine.stdout is not None
        for line in machine.stdout:
            found = _STATUS.search(line)
            if found is not None:
                status = int(found[1])
                line = line[: found.start()]
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
    if status is None and machine.returncode in (124, 137):
        raise subprocess.TimeoutExpired(command, timeout_s)
    return status


if __name__ == "__main__":
    sys.exit(main())
