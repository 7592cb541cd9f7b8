"""Networks of their own for processes: namespaces joined by virtual interfaces, to be cut and slowed. Their addresses are of 198.18.0.0/15,
which is set aside for tests."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence

_numbers = itertools.count()
_SUBNET = f"198.{18 + (os.getpid() >> 8) % 2}.{os.getpid() & 255}"
_SWITCH_NETWORK = 192
"""Of 64 addresses; pairs of a Namespace and this one have those below."""


class Unavailable(Exception):
    """This machine or user cannot make network namespaces."""


class Network:
    """A namespace with one end of a link, which it calls up0. Processes started behind `prefix` see nothing but that."""

    def __init__(self, number: int) -> None:
        """Raises Unavailable."""
        if shutil.which("ip") is None or shutil.which("tc") is None:
            raise Unavailable("there is no ip or tc command (iproute2)")
        self.name = f"springtide-{os.getpid()}-{number}"
        try:
            _run("ip", "netns", "add", self.name)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"no network namespace can be made: {error.stderr.decode().strip()}") from error

    @property
    def prefix(self) -> Sequence[str]:
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        """What is in flight is lost, without a word to either side."""
        _run("ip", "-n", self.name, "link", "set", "up0", "down")

    def mend(self) -> None:
        _run("ip", "-n", self.name, "link", "set", "up0", "up")

    def up(self, address: str) -> None:
        """The end of the link, which is there, has this address, and is reached within."""
        _run("ip", "-n", self.name, "address", "add", address, "dev", "up0")
        _run("ip", "-n", self.name, "link", "set", "lo", "up")
        _run("ip", "-n", self.name, "link", "set", "up0", "up")

    def close(self) -> None:
        """After every process in it has ended."""
        _run("ip", "netns", "delete", self.name)


class Namespace(Network):
    """A namespace joined to this one. `here` and `there` are the addresses of the two ends."""

    def __init__(self) -> None:
        """Raises Unavailable."""
        number = next(_numbers)
        super().__init__(number)
        self._device = f"sp{os.getpid()}-{number}"
        base = number * 4 % _SWITCH_NETWORK
        self.here, self.there = f"{_SUBNET}.{base + 1}", f"{_SUBNET}.{base + 2}"
        try:
            _run("ip", "link", "add", self._device, "type", "veth", "peer", "name", "up0", "netns", self.name)
            _run("ip", "address", "add", f"{self.here}/30", "dev", self._device)
            _run("ip", "link", "set", self._device, "up")
            self.up(f"{self.there}/30")
        except subprocess.CalledProcessError as error:
            self.close()
            raise Unavailable(f"no virtual interfaces can be made: {error.stderr.decode().strip()}") from error

    def slow(self, mbit_per_s: float) -> None:
        """Both ways. Raises Unavailable when the kernel has no token bucket."""
        bucket = ("root", "tbf", "rate", f"{mbit_per_s}mbit", "burst", "32kb", "latency", "100ms")
        try:
            _run("tc", "qdisc", "replace", "dev", self._device, *bucket)
            _run("tc", "-n", self.name, "qdisc", "replace", "dev", "up0", *bucket)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"no link can be slowed: {error.stderr.decode().strip()}") from error

    def close(self) -> None:
        """After every process in it has ended."""
        subprocess.run(("ip", "link", "delete", self._device), capture_output=True, check=False)
        super().close()


class Plugged(Network):
    """A namespace on a Switch, with an address of its own."""

    def __init__(self, switch: Switch, address: str) -> None:
        """Raises Unavailable."""
        number = next(_numbers)
        super().__init__(number)
        self.address = address
        self._switch, self._port = switch, f"port{number}"
        try:
            switch.join(self._port, "peer", "name", "up0", "netns", self.name)
            self.up(f"{address}/26")
        except subprocess.CalledProcessError as error:
            self.close()
            raise Unavailable(f"no virtual interfaces can be made: {error.stderr.decode().strip()}") from error

    def swallow(self) -> None:
        """As when a switch on the way loses its power: the link stays, and nothing comes through it any more."""
        _run("ip", "-n", self._switch.name, "link", "set", self._port, "nomaster")

    def mend(self) -> None:
        _run("ip", "-n", self._switch.name, "link", "set", self._port, "master", "bridge")
        super().mend()

    def slow(self, mbit_per_s: float, delay_ms: float) -> bool:
        """Both ways. Returns whether there is a delay: not every kernel can. Raises Unavailable where none can be slowed at all."""
        ends = ((self._switch.name, self._port), (self.name, "up0"))
        delayed = ("netem", "delay", f"{delay_ms:g}ms", "rate", f"{mbit_per_s:g}mbit", "limit", "10000")
        try:
            for namespace, device in ends:
                _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *delayed)
            return True
        except subprocess.CalledProcessError:
            bucket = ("tbf", "rate", f"{mbit_per_s:g}mbit", "burst", "256kb", "latency", "200ms")
        try:
            for namespace, device in ends:
                _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket)
            return False
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"no link can be slowed: {error.stderr.decode().strip()}") from error


class Switch(Network):
    """What namespaces are plugged into that reach each other, and this one: a bridge, in a namespace where no rules of the host's hold."""

    def __init__(self) -> None:
        """Raises Unavailable."""
        number = next(_numbers)
        super().__init__(number)
        self._addresses = (f"{_SUBNET}.{host}" for host in range(_SWITCH_NETWORK + 1, 255))
        self.here = next(self._addresses)
        """The address of this namespace."""
        self._plugged: list[Plugged] = []
        self._device = f"sp{os.getpid()}-{number}"
        try:
            _run("ip", "-n", self.name, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self.name, "link", "set", "bridge", "up")
            self.join("here", "peer", "name", self._device, "netns", str(os.getpid()))
            _run("ip", "address", "add", f"{self.here}/26", "dev", self._device)
            _run("ip", "link", "set", self._device, "up")
        except subprocess.CalledProcessError as error:
            self.close()
            raise Unavailable(f"no bridge can be made: {error.stderr.decode().strip()}") from error

    def join(self, device: str, *peer: str) -> None:
        """A new device whose `peer` is elsewhere becomes a port of the bridge."""
        _run("ip", "-n", self.name, "link", "add", device, "type", "veth", *peer)
        _run("ip", "-n", self.name, "link", "set", device, "master", "bridge")
        _run("ip", "-n", self.name, "link", "set", device, "up")

    def plug(self) -> Plugged:
        """A further namespace. Raises Unavailable."""
        plugged = Plugged(self, next(self._addresses))
        self._plugged.append(plugged)
        return plugged

    def close(self) -> None:
        """After every process in what is plugged in has ended."""
        for plugged in self._plugged:
            plugged.close()
        subprocess.run(("ip", "link", "delete", self._device), capture_output=True, check=False)
        super().close()


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True)
