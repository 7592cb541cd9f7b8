"""A network of its own for a process: a namespace joined to this one by a pair of virtual interfaces, to be cut and slowed."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence

_numbers = itertools.count()


class Unavailable(Exception):
    """This machine or user cannot make network namespaces."""


class Namespace:
    """`here` and `there` are the addresses of the two ends (198.18.0.0/15 is set aside for tests). Processes started behind `prefix` see
    nothing but their end."""

    def __init__(self) -> None:
        """Raises Unavailable."""
        if shutil.which("ip") is None or shutil.which("tc") is None:
            raise Unavailable("there is no ip or tc command (iproute2)")
        number = next(_numbers)
        self._name = f"springtide-{os.getpid()}-{number}"
        self._device = f"sp{os.getpid()}-{number}"
        subnet = f"198.{18 + (os.getpid() >> 8) % 2}.{os.getpid() & 255}.{number * 4 % 256}".rpartition(".")
        base = int(subnet[2])
        self.here, self.there = f"{subnet[0]}.{base + 1}", f"{subnet[0]}.{base + 2}"
        try:
            _run("ip", "netns", "add", self._name)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"no network namespace can be made: {error.stderr.decode().strip()}") from error
        try:
            _run("ip", "link", "add", self._device, "type", "veth", "peer", "name", "up0", "netns", self._name)
            _run("ip", "address", "add", f"{self.here}/30", "dev", self._device)
            _run("ip", "link", "set", self._device, "up")
            _run("ip", "-n", self._name, "address", "add", f"{self.there}/30", "dev", "up0")
            _run("ip", "-n", self._name, "link", "set", "lo", "up")
            _run("ip", "-n", self._name, "link", "set", "up0", "up")
        except subprocess.CalledProcessError as error:
            self.close()
            raise Unavailable(f"no virtual interfaces can be made: {error.stderr.decode().strip()}") from error

    @property
    def prefix(self) -> Sequence[str]:
        return ("ip", "netns", "exec", self._name)

    def cut(self) -> None:
        """What is in flight is lost, without a word to either side."""
        _run("ip", "-n", self._name, "link", "set", "up0", "down")

    def mend(self) -> None:
        _run("ip", "-n", self._name, "link", "set", "up0", "up")

    def slow(self, mbit_per_s: float) -> None:
        """Both ways. Raises Unavailable when the kernel has no token bucket."""
        bucket = ("root", "tbf", "rate", f"{mbit_per_s}mbit", "burst", "32kb", "latency", "100ms")
        try:
            _run("tc", "qdisc", "replace", "dev", self._device, *bucket)
            _run("tc", "-n", self._name, "qdisc", "replace", "dev", "up0", *bucket)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"no link can be slowed: {error.stderr.decode().strip()}") from error

    def close(self) -> None:
        """After every process in it has ended."""
        subprocess.run(("ip", "link", "delete", self._device), capture_output=True, check=False)
        _run("ip", "netns", "delete", self._name)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True)
