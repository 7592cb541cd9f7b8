"""Where a running cluster keeps its sockets and logs, and how other commands of this machine find it.

Under a directory of this user in the temporary directory, a cluster whose supervisor has process id P has `P/`, its run directory unless
another was asked for, and `P.json`, its record. Both go when the cluster stops; what a killed supervisor left is swept at the next start.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from springtide.config import write_private
from springtide.errors import ConfigError

_MAX_SOCKET_PATH = 107
_CLOCK_SLACK_S = 2.0  # start times are told by a clock that is set now and then
_LONGEST_SOCKET_NAME = "prefill-63.store.sock"  # 64 is the most that ClusterConfig allows


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """What `springtide status` and tests need to know of a cluster that runs here."""

    pid: int
    created: float
    """The supervisor's start (psutil's create_time), so that another process with its id is not taken for it."""
    url: str
    grpc_address: str
    redis_url: str
    cluster: str
    cluster_secret: str = field(repr=False)
    """Empty without one. With it, commands of this user speak with the cluster's processes."""
    run_dir: str
    temporary: bool
    """The run directory is ours to remove."""
    ready: bool
    processes: dict[str, int]
    """Process ids by name (`prefill-0`, `prefill-0-store`, `conductor-0`, `valkey`)."""

    @property
    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < _CLOCK_SLACK_S
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def user_directory() -> Path:
    """This user's directory for running clusters, made if it is not there.

    Raises ConfigError when somebody else owns it: what they may rename or replace is no place for sockets.
    """
    path = Path(tempfile.gettempdir()) / f"springtide-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(f"{path} must be a directory that only its owner, user {os.getuid()}, can write to; remove it or set TMPDIR")
    return path


def create_run_dir(wanted: Path | None) -> Path:
    """An empty run directory: `wanted`, or a temporary one. Raises ConfigError when `wanted` cannot serve."""
    if wanted is None:
        path = user_directory() / str(os.getpid())
        shutil.rmtree(path, ignore_errors=True)
    else:
        path = wanted.absolute()
    if len(os.fsencode(path / _LONGEST_SOCKET_NAME)) > _MAX_SOCKET_PATH:
        longest = _MAX_SOCKET_PATH - len(_LONGEST_SOCKET_NAME) - 1
        raise ConfigError(f"run_dir: {path} is too long for the Unix sockets in it; it may have {longest} bytes at most")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (path / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir: {path} cannot be made: {error.strerror}") from None
    return path


def write_record(record: ClusterRecord) -> None:
    path = _record_path(record.pid)
    scratch = path.with_suffix(".tmp")
    write_private(scratch, json.dumps(asdict(record)))
    scratch.replace(path)


def remove(pid: int, run_dir: Path, temporary: bool) -> None:
    """Removes a cluster's record, and its run directory if that is temporary (in one that was asked for, the logs stay)."""
    _record_path(pid).unlink(missing_ok=True)
    if temporary:
        shutil.rmtree(run_dir, ignore_errors=True)
    else:
        for socket in run_dir.glob("*.sock"):
            socket.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        user_directory().rmdir()  # the last one turns off the light


def running_clusters() -> list[ClusterRecord]:
    return [record for record in _records() if record.alive]


def find_cluster(url: str) -> ClusterRecord | None:
    """The cluster of this user on this machine that serves at `url`, if there is one."""
    wanted = url.rstrip("/").replace("//localhost:", "//127.0.0.1:")
    return next((record for record in running_clusters() if record.url == wanted), None)


def sweep() -> None:
    """Removes what supervisors that were killed left behind."""
    for record in _records():
        if not record.alive:
            remove(record.pid, Path(record.run_dir), record.temporary)
    for path in user_directory().glob("[0-9]*/"):
        if not _record_path(int(path.name)).exists() and not psutil.pid_exists(int(path.name)):
            shutil.rmtree(path, ignore_errors=True)


def _records() -> Iterator[ClusterRecord]:
    for path in sorted(user_directory().glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            yield ClusterRecord(**json.loads(path.read_text()))


def _record_path(pid: int) -> Path:
    return user_directory() / f"{pid}.json"
