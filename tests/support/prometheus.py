"""Prometheus and Alertmanager: those of this machine, or Debian's, downloaded and unpacked below `build/`; nothing is installed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.ports import ReservedPorts
from tests.support.waiting import wait_until

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy/prometheus"
RULES, ALERTMANAGER = DEPLOY / "rules.yaml", DEPLOY / "alertmanager.yaml"
PACKAGES = ("prometheus", "prometheus-alertmanager")
PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager", "amtool")
UNPACKED = REPOSITORY / "build/prometheus"
_DURATION = re.compile(r"(\d+)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_LEAST_MS = 10
_ALERTMANAGER = """#!/bin/sh
# It looks for its templates in /usr/share: they are laid over it, for this process alone.
exec unshare --mount sh -c 'mount -t overlay overlay -o lowerdir="$0/usr/share:/usr/share" /usr/share && exec "$0/usr/bin/prometheus-alertmanager" "$@"' {unpacked} "$@"
"""  # noqa: E501


class Unavailable(Exception):
    """This machine cannot have the programs; the message says why."""


@cache
def program(name: str) -> Path:
    """One of PROGRAMS. Skips the test where it cannot be had."""
    try:
        return _found(name)
    except Unavailable as why:
        pytest.skip(str(why))


def accepts(name: str, *arguments: str | Path) -> None:
    """Asserts that one of PROGRAMS finds nothing wrong with these."""
    ended = subprocess.run([program(name), *arguments], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def _found(name: str) -> Path:
    installed = shutil.which(name) or (name == "prometheus-alertmanager" and shutil.which("alertmanager"))
    if installed:
        return Path(installed)
    if name == "prometheus-alertmanager" and os.geteuid() != 0:
        raise Unavailable("there is no Alertmanager, and Debian's finds its templates where root alone can put them")
    if not UNPACKED.exists():
        _unpack()
    return UNPACKED / "bin" / name


def _unpack() -> None:
    for command in ("apt-get", "dpkg-deb"):
        if shutil.which(command) is None:
            raise Unavailable(f"there is no Prometheus, and no {command} by which to have Debian's")
    UNPACKED.parent.mkdir(exist_ok=True)
    with (UNPACKED.parent / "prometheus.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=UNPACKED.parent) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if UNPACKED.exists():
            return
        download = ["-qq", "-o", "APT::Sandbox::User=root", "download", *PACKAGES]
        if not _apt_get(download, scratch):
            _apt_get(["-qq", "update"], scratch)
            if not _apt_get(download, scratch):
                raise Unavailable(f"there is no Prometheus, and apt-get cannot download {' and '.join(PACKAGES)}")
        for package in Path(scratch).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, Path(scratch, "unpacked")], check=True)
        programs = Path(scratch, "unpacked/bin")
        programs.mkdir()
        for name in PROGRAMS:
            (programs / name).symlink_to(f"../usr/bin/{name}")
        (programs / PROGRAMS[2]).unlink()
        (programs / PROGRAMS[2]).write_text(_ALERTMANAGER.format(unpacked=UNPACKED))
        (programs / PROGRAMS[2]).chmod(0o755)
        Path(scratch, "unpacked").rename(UNPACKED)


def _apt_get(arguments: Sequence[str], directory: str) -> bool:
    return subprocess.run(["apt-get", *arguments], cwd=directory, capture_output=True).returncode == 0


def rules() -> dict[str, Any]:
    return dict(yaml.safe_load(RULES.read_text()))


def alerts(of: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in of["groups"] for rule in group["rules"] if "alert" in rule]


def seconds(duration: str) -> float:
    """A duration of Prometheus."""
    return sum(int(number) * _SECONDS[unit] for number, unit in _DURATION.findall(duration))


def shorter(duration: str, times: float) -> str:
    """A duration of Prometheus, so many times shorter."""
    return f"{max(round(seconds(duration) / times * 1000), _LEAST_MS)}ms"


def faster(given: Mapping[str, Any], times: float, patience: float = 1.0) -> dict[str, Any]:
    """The rules with every duration so many times shorter, and nothing else changed: the ranges in expressions, and, `patience` times less
    so, for how long something is to be so."""

    def rule(one: Mapping[str, Any]) -> dict[str, Any]:
        expr = re.sub(r"\[(\w+)\]", lambda found: f"[{shorter(found[1], times)}]", one["expr"])
        return {**one, "expr": expr, **{name: shorter(one[name], times / patience) for name in ("for", "keep_firing_for") if name in one}}

    groups = [{**group, "interval": "1s", "rules": [rule(one) for one in group["rules"]]} for group in given["groups"]]
    return {**given, "groups": groups}


@dataclass
class Server:
    """A program that serves HTTP on this machine."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}{path}", params=parameters, timeout=10, trust_env=False)
        answer.raise_for_status()
        return answer.json()

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series that an expression has now, each with `metric` and `value`; none while nobody answers."""
        with contextlib.suppress(httpx.TransportError):
            return list(self.get("/api/v1/query", query=expr)["data"]["result"])
        return []


@contextlib.contextmanager
def serving(command: Sequence[str | Path], url: str, log: Path, ready_path: str = "/-/ready") -> Iterator[Server]:
    """Ready when entered, ended when left."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        server = Server(url)

        def ready() -> bool:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{url}{ready_path}", timeout=2, trust_env=False).is_success
            return False

        wait_until(ready, f"{command[0]} to be ready")
        yield server
    finally:
        process.terminate()
        process.wait(10)


@contextlib.contextmanager
def prometheus(directory: Path, config: Mapping[str, Any]) -> Iterator[Server]:
    ports = ReservedPorts(1)
    (port,) = ports.numbers
    (directory / "prometheus.yml").write_text(yaml.safe_dump(dict(config)))
    command = [program("prometheus"), f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--rules.alert.resend-delay=1s"]
    ports.release()
    with serving(command, f"http://127.0.0.1:{port}", directory / "prometheus.log") as server:
        yield server


@contextlib.contextmanager
def alertmanager(directory: Path, config: Mapping[str, Any]) -> Iterator[Server]:
    ports = ReservedPorts(1)
    (port,) = ports.numbers
    (directory / "alertmanager.yml").write_text(yaml.safe_dump(dict(config)))
    command = [program("prometheus-alertmanager"), f"--config.file={directory / 'alertmanager.yml'}"]
    command += [f"--storage.path={directory / 'alerts'}", f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="]
    ports.release()
    with serving(command, f"http://127.0.0.1:{port}", directory / "alertmanager.log") as server:
        yield server
