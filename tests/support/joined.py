"""Machines that join a cluster: `springtide node` in a process of its own, at an address of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from deploy.local import rundir
from deploy.local.logs import last_lines
from deploy.local.rundir import ClusterRecord
from tests.support.cluster import START_TIMEOUT_S, Cluster
from tests.support.environment import own_environment
from tests.support.installation import Installation, this_installation
from tests.support.waiting import wait_until

POLL_S = 0.05


def new_token(cluster: Cluster | JoinedNode, ttl: str = "10m") -> tuple[str, str]:
    """A token made at the cluster's head, or at a node with a join service, and where to join with it: as an operator would."""
    command = [sys.executable, "-m", "deploy.cli", "token", "create", "--url", cluster.url, "--ttl", ttl, "--json"]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=own_environment()).stdout)
    return said["token"], said["join"]


def ready(url: str) -> bool:
    """Whether a gateway takes requests."""
    try:
        return httpx.get(f"{url}/ready", timeout=2, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


class JoinedNode:
    """`with JoinedNode(cluster, "decode", "127.0.0.2") as node`: in the cluster when entered, gone when left."""

    def __init__(
        self,
        cluster: Cluster,
        role: str,
        address: str,
        *options: str,
        prefix: Sequence[str] = (),
        invitation: tuple[str, str] | None = None,
        installation: Installation | None = None,
        says_role: bool = True,
    ) -> None:
        """`prefix`: what the command is run behind, such as a network of its own. `invitation`: as of new_token, from before.
        `installation`: whose command it is; None: that of whoever runs the tests. `says_role`: False for what a node is that says none."""
        installation = installation or this_installation()
        self.profile = cluster.profile
        self.name = f"{role}-{address.rpartition('.')[2]}"
        self._scratch = tempfile.TemporaryDirectory(prefix="springtide-test-")
        token, join = invitation or new_token(cluster)
        command = [*prefix, *installation.springtide, "node", *([role] if says_role else []), "--join", join, "--address", address]
        if "--group" not in options:  # whose stages are named after it
            command += ["--name", self.name]
        if self.profile is not None:
            command += ["--set", f"profile={self.profile}"]
        with self._output.open("wb") as output:
            environment = {**installation.environment, "SPRINGTIDE_JOIN_TOKEN": token}
            self.process = subprocess.Popen([*command, *options], stdout=output, stderr=output, env=environment)

    @property
    def record(self) -> ClusterRecord:
        found = next((record for record in rundir.running_clusters() if record.pid == self.process.pid), None)
        assert found is not None, f"{self.name} is not running:\n{self.logs()}"
        return found

    @property
    def url(self) -> str:
        """A gateway's."""
        return self.record.url

    @property
    def log(self) -> str:
        """What the command printed."""
        return self._output.read_text()

    def __enter__(self) -> JoinedNode:
        try:
            wait_until(self._is_ready, f"{self.name} to be ready", START_TIMEOUT_S, self.logs, POLL_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"{self.name} ended:\n{self.logs()}"
        return any(record.pid == self.process.pid and record.ready for record in rundir.running_clusters())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            print(self.logs(), file=sys.stderr)
        self.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._scratch.cleanup()

    def terminate(self) -> None:
        """SIGTERM, as an operator would; does not wait."""
        if self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        """As when the machine loses power: everything at once."""
        everything = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for each in everything:
            with contextlib.suppress(ProcessLookupError):  # it has ended with its parent
                os.kill(each.pid, signal.SIGKILL)
        self.process.wait()

    def logs(self) -> str:
        parts = [f"--- springtide node: {self.name}", last_lines(self._output, 40)]
        for record in rundir.running_clusters():
            if record.pid == self.process.pid:
                parts += [f"--- {path.name}\n{last_lines(path, 30)}" for path in sorted(Path(record.run_dir, "logs").glob("*.log"))]
        return "\n".join(parts)

    @property
    def _output(self) -> Path:
        return Path(self._scratch.name, "node.log")
