"""Networks of their own for processes: namespaces joined by virtual interfaces, to be cut and slowed. Their addresses are of 198.18.0.0/15,
which is set aside for tests."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence

from tests.support.delay_line import DelayLine

_numbers = itertools.count()
_SUBNET = f"198.{18 + (os.getpid() >> 8) % 2}.{os.getpid() & 255}"
_SWITCH_NETWORK = 192
"""Of 64 addresses; pairs of a Namespace and this one have those below."""


class Unavailable(Exception):
    """This machine or user cannot make network namespaces: the test that wants them is skipped (tests/conftest.py)."""


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
        for namespace, device in ((None, self._device), (self.name, "up0")):
            _slow(namespace, device, mbit_per_s, "burst", "32kb", "latency", "100ms")

    def close(self) -> None:
        """After every process in it has ended."""
        subprocess.run(("ip", "link", "delete", self._device), capture_output=True, check=False)
        super().close()


class Plugged(Network):
    """A namespace on a Switch, with an address of its own."""

    def __init__(self, switch: Switch, address: str, delay_ms: float) -> None:
        """Raises Unavailable."""
        number = next(_numbers)
        super().__init__(number)
        self.address = address
        self._switch, self._port = switch, f"port{number}"
        self._line: DelayLine | None = None
        try:
            if delay_ms:
                self._line = DelayLine((f"sp{os.getpid()}-{number}a", f"sp{os.getpid()}-{number}b"), delay_ms)
                for end, (namespace, device) in zip(self._line.devices, self._ends, strict=True):
                    _run("ip", "link", "set", end, "netns", namespace, "name", device)
            else:
                _run("ip", "-n", switch.name, "link", "add", self._port, "type", "veth", "peer", "name", "up0", "netns", self.name)
            switch.join(self._port)
            self.up(f"{address}/26")
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            raise Unavailable(f"no virtual interfaces can be made: {_why(error)}") from error

    @property
    def _ends(self) -> Sequence[tuple[str, str]]:
        return (self._switch.name, self._port), (self.name, "up0")

    def swallow(self) -> None:
        """As when a switch on the way loses its power: the link stays, and nothing comes through it any more."""
        _run("ip", "-n", self._switch.name, "link", "set", self._port, "nomaster")

    def mend(self) -> None:
        _run("ip", "-n", self._switch.name, "link", "set", self._port, "master", "bridge")
        super().mend()

    def slow(self, mbit_per_s: float) -> None:
        """Both ways. Raises Unavailable when the kernel has no token bucket."""
        for namespace, device in self._ends:
            _slow(namespace, device, mbit_per_s, "burst", "256kb", "latency", "200ms")

    def close(self) -> None:
        """After every process in it has ended."""
        super().close()
        if self._line is not None:
            self._line.close()


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
            _run("ip", "-n", self.name, "link", "add", "here", "type", "veth", "peer", "name", self._device, "netns", str(os.getpid()))
            self.join("here")
            _run("ip", "address", "add", f"{self.here}/26", "dev", self._device)
            _run("ip", "link", "set", self._device, "up")
        except subprocess.CalledProcessError as error:
            self.close()
            raise Unavailable(f"no bridge can be made: {error.stderr.decode().strip()}") from error

    def further_address(self) -> str:
        """One more of this namespace."""
        address = next(self._addresses)
        _run("ip", "address", "add", f"{address}/32", "dev", self._device)
        return address

    def join(self, device: str) -> None:
        """A device of this namespace becomes a port of the bridge."""
        _run("ip", "-n", self.name, "link", "set", device, "master", "bridge")
        _run("ip", "-n", self.name, "link", "set", device, "up")

    def plug(self, delay_ms: float = 0.0) -> Plugged:
        """A further namespace, whose link holds what passes for so long, both ways. Raises Unavailable."""
        plugged = Plugged(self, next(self._addresses), delay_ms)
        self._plugged.append(plugged)
        return plugged

    def close(self) -> None:
        """After every process in what is plugged in has ended."""
        for plugged in self._plugged:
            plugged.close()
        subprocess.run(("ip", "link", "delete", self._device), capture_output=True, check=False)
        super().close()


def _slow(namespace: str | None, device: str, mbit_per_s: float, *bucket: str) -> None:
    """What leaves the device. Raises Unavailable."""
    within = () if namespace is None else ("-n", namespace)
    try:
        _run("tc", *within, "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{mbit_per_s:g}mbit", *bucket)
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"no link can be slowed: {_why(error)}") from error


def _why(error: OSError | subprocess.CalledProcessError) -> str:
    return str(error) if isinstance(error, OSError) else error.stderr.decode().strip()


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True)
