"""Where a running cluster keeps its sockets and logs, and how other commands of this machine find it.

Under a directory of this user in the temporary directory, a cluster whose supervisor has process id P has `P/`, its run directory unless
another was asked for, and `P.json`, its record. Both go when the cluster stops; what a killed supervisor left is swept at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from springtide.config import TlsConfig, replace_private
from springtide.credentials import OPEN, Credentials
from springtide.errors import ConfigError, Unavailable
from springtide.tls import cluster_tls

_MAX_SOCKET_PATH = 107
_CLOCK_SLACK_S = 2.0  # start times are told by a clock that is set now and then
_LOCK = "lock"
LONGEST_SOCKET_NAME = "instance-63.store.sock"  # 64 is the most that ClusterConfig allows


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
    tls: dict[str, str] = field(default_factory=dict)
    """The paths of certificate, key and authorities, by their settings' names; none where the processes speak in the clear."""
    ca_dir: str = ""
    """Where the cluster's authority is; empty where it has none of its own."""
    join_address: str = ""
    """Where machines join; empty where none can."""

    @property
    def credentials(self) -> Credentials:
        """To speak with its processes."""
        tls = cluster_tls(TlsConfig.model_validate(self.tls))
        return Credentials(self.cluster_secret.encode(), self.cluster, tls) if self.cluster_secret else OPEN

    @property
    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < _CLOCK_SLACK_S
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def user_directory() -> Path:
    """The user's directory for running clusters, made if it is not there.

    Raises ConfigError when somebody else owns it: what they may rename or replace is no place for sockets.
    """
    path = Path(tempfile.gettempdir()) / f"springtide-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(f"{path} must be a directory that only its owner, user {os.getuid()}, can write to; remove it or set TMPDIR")
    return path


class RunDir:
    """A run directory that is this process's alone, from `claim` to `release`: whoever holds the lock on a file in it.

    Many machines remove what in the temporary directory has not been used for days. systemd-tmpfiles, which does it, leaves out a
    directory on which somebody holds a lock, and all below it."""

    def __init__(self, path: Path, temporary: bool, lock: int) -> None:
        """Takes over `lock`, the locked file's descriptor."""
        self.path = path
        self.temporary = temporary
        self._lock = lock
        self._kept = contextlib.ExitStack()
        for directory in (path, user_directory()):
            with contextlib.suppress(OSError):  # of a file system without such locks
                self._kept.enter_context(_locked_directory(directory, fcntl.LOCK_SH))

    @classmethod
    def claim(cls, wanted: Path | None, longest_socket: str = LONGEST_SOCKET_NAME) -> RunDir:
        """`wanted`, or a temporary one, with room for sockets of such names. Nobody but this user can enter it. Logs of an earlier run in
        it are put aside. Raises ConfigError when `wanted` cannot serve, or serves another cluster."""
        if wanted is None:
            path = user_directory() / str(os.getpid())
            shutil.rmtree(path, ignore_errors=True)
        else:
            path = wanted.absolute()
        _make_private(path, longest_socket)
        lock = _lock(path)
        if lock is None:
            raise ConfigError(
                f"run_dir: {path} is in use by another cluster, of the supervisor {_holder(path)}; stop that, or name another"
            )
        os.truncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        for log in (path / "logs").glob("*.log"):
            log.replace(log.with_suffix(".log.1"))
        return cls(path, wanted is None, lock)

    def release(self) -> None:
        """Removes the cluster's record, and the directory if it is temporary (in one that was asked for, the logs stay)."""
        self._kept.close()
        _remove(os.getpid(), self.path, self.temporary)
        os.close(self._lock)


def _make_private(path: Path, longest_socket: str) -> None:
    if len(os.fsencode(path / longest_socket)) > _MAX_SOCKET_PATH:
        longest = _MAX_SOCKET_PATH - len(longest_socket) - 1
        raise ConfigError(f"run_dir: {path} is too long for the Unix sockets in it; it may have {longest} bytes at most")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.getuid():
            raise ConfigError(
                f"run_dir: {path} belongs to user {status.st_uid}, who could change what is in it; name a directory of your own"
            )
        if status.st_mode & stat.S_ISVTX:
            raise ConfigError(f"run_dir: {path} is shared by several users; name a directory in it")
        path.chmod(0o700)
        (path / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir: {path} cannot be made: {error.strerror}") from None


def _lock(run_dir: Path) -> int | None:
    """The descriptor of the locked file; None while somebody else holds it. The kernel frees it with its holder, however that ends."""
    lock = os.open(run_dir / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


@contextlib.contextmanager
def _locked_directory(directory: Path, lock: int) -> Iterator[None]:
    """Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, lock)
        yield
    finally:
        os.close(descriptor)


def _holder(run_dir: Path) -> str:
    with contextlib.suppress(OSError):
        return (run_dir / _LOCK).read_text() or "unknown"
    return "unknown"


def write_record(record: ClusterRecord) -> None:
    replace_private(_record_path(record.pid), json.dumps(asdict(record)))


def _remove(pid: int, run_dir: Path, temporary: bool) -> None:
    _record_path(pid).unlink(missing_ok=True)
    if temporary:
        shutil.rmtree(run_dir, ignore_errors=True)
    else:
        for socket in run_dir.glob("*.sock"):
            socket.unlink(missing_ok=True)
    with contextlib.suppress(OSError), _locked_directory(user_directory(), fcntl.LOCK_EX | fcntl.LOCK_NB):
        user_directory().rmdir()  # the last one turns off the light


def running_clusters() -> list[ClusterRecord]:
    return [record for record in _records() if record.alive]


def find_cluster(url: str) -> ClusterRecord | None:
    """The cluster of this user on this machine that serves at `url`, if there is one. Of a head and nodes that have joined it here, which
    are all said to be served at the same place, the head."""
    wanted = _place(url.replace("//localhost:", "//127.0.0.1:"))
    found = [record for record in running_clusters() if _place(record.url) == wanted]
    return min(found, key=lambda record: not record.join_address, default=None)


def this_machines(url: str, otherwise: str) -> ClusterRecord:
    """The same. Raises Unavailable where there is none; the message ends with what else can be done."""
    record = find_cluster(url)
    if record is None:
        raise Unavailable(f"no cluster of this user on this machine serves at {url}{otherwise}")
    return record


def _place(url: str) -> str:
    """Where it serves, with TLS or without."""
    return url.rstrip("/").partition("//")[2]


def sweep() -> None:
    """Removes what supervisors that were killed left behind."""
    for record in _records():
        if not record.alive:
            _sweep(record)
    for path in user_directory().glob("[0-9]*/"):
        if not _record_path(int(path.name)).exists() and not psutil.pid_exists(int(path.name)):
            shutil.rmtree(path, ignore_errors=True)


def _sweep(record: ClusterRecord) -> None:
    """A directory that was asked for may serve another cluster by now."""
    run_dir = Path(record.run_dir)
    lock = _lock(run_dir) if run_dir.is_dir() and not record.temporary else None
    if record.temporary or lock is not None:
        _remove(record.pid, run_dir, record.temporary)
    else:
        _record_path(record.pid).unlink(missing_ok=True)
    if lock is not None:
        os.close(lock)


def _records() -> Iterator[ClusterRecord]:
    for path in sorted(user_directory().glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            yield ClusterRecord(**json.loads(path.read_text()))


def _record_path(pid: int) -> Path:
    return user_directory() / f"{pid}.json"
