"""Machines of a cluster on one: each a network, a host name, processes, mounts and shared memory of its own, on links of limited rate, with
`springtide` run there as an operator would. What a machine has on its disk is there after its power was lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from deploy.local.logs import last_lines
from deploy.local.rundir import ClusterRecord
from tests.support import waiting
from tests.support.environment import own_environment
from tests.support.netns import Plugged, Switch, Unavailable

PATIENCE_S = 120.0
POLL_S = 0.1
HEAD_NAME = "head.springtide.test"
"""What machines call the head, in whose host name it is not."""
# The first process of a machine: has orphans reaped, and everything ends with it.
_BOOT = "set -e; hostname {name}; mount -t tmpfs tmpfs /dev/shm; mount --bind {hosts} /etc/hosts; trap '' CHLD; exec sleep infinity"


class Host:
    def __init__(self, name: str, network: Plugged, disk: Path) -> None:
        self.name, self.network, self.disk = name, network, disk
        (disk / "tmp").mkdir(parents=True)
        self._first: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return self.network.address

    def boot(self, head_address: str) -> None:
        """Raises Unavailable."""
        hosts = self.disk / "hosts"
        hosts.write_text(f"127.0.0.1 localhost {self.name}\n{head_address} {HEAD_NAME}\n")
        own = ("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
        # It does not outlive the tests, however they end.
        command = ["setpriv", "--pdeathsig", "KILL", *self.network.prefix, *own, "sh", "-c", _BOOT.format(name=self.name, hosts=hosts)]
        self._first = subprocess.Popen(command, stderr=subprocess.PIPE)
        waiting.wait_until(self._up, f"{self.name} to boot", PATIENCE_S)

    def _up(self) -> bool:
        """Raises Unavailable where it has ended."""
        assert self._first is not None and self._first.stderr is not None
        if self._first.poll() is not None:
            raise Unavailable(f"no machine can be had: {self._first.stderr.read().decode().strip()}")
        try:
            return self._command("hostname", stdout=subprocess.PIPE).communicate(timeout=10)[0].decode().strip() == self.name
        except (psutil.NoSuchProcess, IndexError):
            return False

    def lose_power(self) -> None:
        """The kernel ends everything in it at once, and no connection is closed in an orderly way that the network would show."""
        self.network.swallow()
        self._end()

    def _end(self) -> None:
        if self._first is not None:
            for child in psutil.Process(self._first.pid).children():
                child.kill()
            self._first.kill()
            self._first.wait()
            self._first = None

    def close(self) -> None:
        self._end()

    def run(self, *command: str) -> str:
        """Runs `springtide` there to its end; returns what it printed. Raises CalledProcessError."""
        process = self._command(sys.executable, "-m", "deploy.cli", *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = process.communicate(timeout=PATIENCE_S)[0].decode()
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, command, said)
        return said

    def start(self, output: Path, *command: str) -> subprocess.Popen[bytes]:
        with output.open("ab") as log:
            return self._command(sys.executable, "-m", "deploy.cli", *command, stdout=log, stderr=log)

    def listening(self) -> set[tuple[str, int]]:
        """(address, port) of the TCP sockets that other machines could connect to."""
        lines = self._command("ss", "-Hltn", stdout=subprocess.PIPE).communicate(timeout=10)[0].decode().splitlines()
        places = (line.split()[3].rpartition(":") for line in lines)
        # gRPC listens at IPv4 addresses by IPv6 sockets.
        plain = ((address.strip("[]").removeprefix("::ffff:"), int(port)) for address, _, port in places)
        return {(address, port) for address, port in plain if not address.startswith("127.")}

    @property
    def ephemeral_ports(self) -> tuple[int, int]:
        """The first and the last of those that its kernel gives to who asks for any."""
        command = self._command("cat", "/proc/sys/net/ipv4/ip_local_port_range", stdout=subprocess.PIPE)
        low, high = map(int, command.communicate(timeout=10)[0].split())
        return low, high

    def connections(self, port: int) -> set[str]:
        """The addresses of whom a port of this machine has connections with."""
        command = self._command("ss", "-Htn", "state", "established", f"( sport = :{port} )", stdout=subprocess.PIPE)
        return {line.split()[3].rpartition(":")[0] for line in command.communicate(timeout=10)[0].decode().splitlines()}

    def _command(self, *command: str, **pipes: object) -> subprocess.Popen[bytes]:
        assert self._first is not None, f"{self.name} is off"
        (first,) = psutil.Process(self._first.pid).children()[:1] or (psutil.Process(self._first.pid),)
        own = ("nsenter", "--target", str(first.pid), "--mount", "--uts", "--ipc", "--pid", "--net")
        return subprocess.Popen([*own, *command], env={**own_environment(proxies=False), "TMPDIR": str(self.disk / "tmp")}, **pipes)  # type: ignore[call-overload,no-any-return]


class Running:
    """A `springtide up` or `springtide node` on a host, which can be told to stop and be started again as it was."""

    def __init__(self, host: Host, name: str, *command: str) -> None:
        """`command`: without its token, which is for the first time."""
        self.host, self.name = host, name
        self.run_dir = host.disk / name
        self._command = (*command, "--run-dir", str(self.run_dir))
        self._output = host.disk / f"{name}.out"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *token: str) -> None:
        self._seen = self._output.stat().st_size if self._output.exists() else 0
        self._process = self.host.start(self._output, *self._command, *token)

    def wait_ready(self) -> None:
        def ready() -> bool:
            if "(ready after" in self.said:
                return True
            assert self._process is not None and self._process.poll() is None, f"{self.name} has ended:\n{self.logs()}"
            return False

        wait_until(ready, f"{self.name} to be ready", self.logs)

    @property
    def said(self) -> str:
        """What it has printed since it was started."""
        with self._output.open(errors="replace") as output:
            output.seek(self._seen)
            return output.read()

    @property
    def record(self) -> ClusterRecord:
        """As commands on its machine find it."""
        for path in (self.host.disk / "tmp").glob("springtide-*/*.json"):
            record = ClusterRecord(**json.loads(path.read_text()))
            if record.run_dir == str(self.run_dir):
                return record
        raise AssertionError(f"{self.name} has no record:\n{self.logs()}")

    def terminate(self) -> int:
        """SIGTERM, as systemd does it; returns the exit code."""
        self._signal(signal.SIGTERM)
        assert self._process is not None
        return self._process.wait(PATIENCE_S)

    def kill(self) -> None:
        """SIGKILL; its children end with it."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(PATIENCE_S)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        for child in psutil.Process(self._process.pid).children():
            child.send_signal(number)

    def logs(self) -> str:
        parts = [f"--- {self.name} on {self.host.name}", last_lines(self._output, 40)]
        parts += [f"--- {self.name}: {path.name}\n{last_lines(path, 25)}" for path in sorted(self.run_dir.glob("logs/*.log"))]
        return "\n".join(parts)


class Hosts:
    """Machines on one switch, the first of which is the head."""

    def __init__(self, names: tuple[str, ...], directory: Path, mbit_per_s: float, delay_ms: float) -> None:
        """Raises Unavailable."""
        self._switch = Switch()
        self.hosts: dict[str, Host] = {}
        try:
            for name in names:
                network = self._switch.plug(delay_ms)
                network.slow(mbit_per_s)
                self.hosts[name] = Host(name, network, directory / name)
            for host in self.hosts.values():
                host.boot(self.head.address)
        except BaseException:
            self.close()
            raise

    @property
    def head(self) -> Host:
        return next(iter(self.hosts.values()))

    def boot(self, host: Host) -> None:
        """After its power was lost."""
        host.network.mend()
        host.boot(self.head.address)

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()
        self._switch.close()


def wait_until(condition: Callable[[], bool], what: str, more: Callable[[], str] = str) -> None:
    waiting.wait_until(condition, what, PATIENCE_S, more, POLL_S)


def with_settings(model: Path, served_name: str, more: Mapping[str, object]) -> list[str]:
    """A command's words that set what suits small models on machines of little, and more."""
    settings = {
        "model": model,
        "served_model_name": served_name,
        "dtype": "float32",
        "device": "cpu",
        "kv.block_tokens": 16,
        "kv.arena_size": "64MiB",
        "conductor.admission": "baseline",
        "prefill_node.threads": 1,
        "decode_node.threads": 1,
        "tls.names": f"[{HEAD_NAME}]",
        **more,
    }
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
