"""Whose a run directory is, and what of an earlier run is left in it."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.local import rundir
from deploy.local.rundir import ClusterRecord, RunDir
from springtide.config import load_config, write_config
from springtide.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_records(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))


@pytest.fixture
def wanted(short_path: Path) -> Path:
    return short_path / "run"


@pytest.fixture
def claimed(wanted: Path) -> Iterator[RunDir]:
    run_dir = RunDir.claim(wanted)
    yield run_dir
    run_dir.release()


def test_nobody_else_can_enter_a_directory_that_was_open_to_all(wanted: Path) -> None:
    wanted.mkdir()
    wanted.chmod(0o755)
    RunDir.claim(wanted).release()
    assert stat.S_IMODE(wanted.stat().st_mode) == 0o700


def test_a_directory_of_another_user_is_refused_and_left_as_it_is(wanted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted.mkdir()
    wanted.chmod(0o755)
    monkeypatch.setattr("os.getuid", lambda: wanted.stat().st_uid + 1)
    with pytest.raises(ConfigError, match=r"run_dir: .* belongs to user"):
        RunDir.claim(wanted)
    assert stat.S_IMODE(wanted.stat().st_mode) == 0o755


def test_a_directory_that_users_share_is_refused_and_left_as_it_is(wanted: Path) -> None:
    wanted.mkdir()
    wanted.chmod(0o1777)
    with pytest.raises(ConfigError, match="shared by several users"):
        RunDir.claim(wanted)
    assert stat.S_IMODE(wanted.stat().st_mode) == 0o1777


def test_the_configuration_in_it_is_for_this_user_only_also_where_it_was_not(wanted: Path, claimed: RunDir) -> None:
    config = wanted / "config.yaml"
    config.write_text("of an earlier run: " + "x" * 100_000)
    config.chmod(0o644)
    written = load_config(overrides={"redis_url": "redis://:password@valkey/0"}, environ={})
    write_config(written, config)
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert load_config(config, environ={}) == written


def test_a_directory_in_use_is_refused_until_it_is_released(wanted: Path) -> None:
    first = RunDir.claim(wanted)
    with pytest.raises(ConfigError, match=f"run_dir: {wanted} is in use by another cluster, of the supervisor {os.getpid()}"):
        RunDir.claim(wanted)
    first.release()
    RunDir.claim(wanted).release()


def test_a_directory_whose_holder_was_killed_is_free(wanted: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from deploy.local.rundir import RunDir; run_dir = RunDir.claim(Path(sys.argv[1]));"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program + "print('mine', flush=True); time.sleep(60)", str(wanted)], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"mine\n"
    with pytest.raises(ConfigError, match=f"supervisor {holder.pid}"):
        RunDir.claim(wanted)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    RunDir.claim(wanted).release()


def test_what_is_swept_of_a_dead_cluster_is_not_what_another_has_there_now(wanted: Path, claimed: RunDir) -> None:
    sock = wanted / "prefill-0.store.sock"
    sock.touch()
    dead = ClusterRecord(1 << 30, 0.0, "http://127.0.0.1:1", "", "", "springtide", "", str(wanted), False, True, {})
    rundir.user_directory()
    rundir.write_record(dead)
    rundir.sweep()
    assert sock.exists() and not list(rundir.user_directory().glob("*.json"))


def test_what_a_dead_cluster_left_in_a_directory_of_its_own_is_swept(wanted: Path) -> None:
    RunDir.claim(wanted).release()
    sock = wanted / "prefill-0.store.sock"
    sock.touch()
    rundir.user_directory()
    rundir.write_record(ClusterRecord(1 << 30, 0.0, "http://127.0.0.1:1", "", "", "springtide", "", str(wanted), False, True, {}))
    rundir.sweep()
    assert not sock.exists() and wanted.exists()


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="needs systemd-tmpfiles")
@pytest.mark.parametrize("temporary", [True, False])
def test_what_is_in_use_is_not_removed_as_old(short_path: Path, temporary: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned, rules = short_path / "tmp", short_path / "rules.conf"
    cleaned.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(cleaned))
    rules.write_text(f"e {cleaned} - - - 0\n")

    def clean() -> set[Path]:
        """What is left, when everything is old."""
        subprocess.run(["systemd-tmpfiles", "--clean", str(rules)], check=True)
        return set(cleaned.rglob("*"))

    run_dir = RunDir.claim(None if temporary else cleaned / "run")
    rundir.write_record(
        ClusterRecord(os.getpid(), 0.0, "http://127.0.0.1:1", "", "", "springtide", "", str(run_dir.path), temporary, True, {})
    )
    (run_dir.path / "config.yaml").touch()
    (cleaned / "somebody-elses" / "old").mkdir(parents=True)
    there = {path for path in cleaned.rglob("*") if "somebody-elses" not in str(path)}
    assert clean() == there
    run_dir.release()
    assert clean() == set()


def test_the_directory_of_all_records_stays_while_somebody_starts_who_has_none_yet(wanted: Path, claimed: RunDir) -> None:
    RunDir.claim(None).release()
    assert (wanted.parent / f"springtide-{os.getuid()}").is_dir()


def test_the_logs_of_an_earlier_run_are_put_aside(wanted: Path) -> None:
    RunDir.claim(wanted).release()
    log = wanted / "logs" / "conductor-0.log"
    log.write_text("12:00:00.000 WARNING conductor-0 of yesterday\n")
    RunDir.claim(wanted).release()
    assert not log.exists() and "of yesterday" in log.with_suffix(".log.1").read_text()


def test_a_head_is_found_whoever_has_joined_it_on_its_machine() -> None:
    for pid, join_address in ((os.getpid(), "127.0.0.1:8002"), (os.getppid(), "")):
        created = psutil.Process(pid).create_time()
        rundir.user_directory()
        rundir.write_record(
            ClusterRecord(pid, created, "http://127.0.0.1:8000", "", "", "c", "", "", True, True, {}, join_address=join_address)
        )
    assert len(rundir.running_clusters()) == 2
    found = rundir.find_cluster("http://localhost:8000")
    assert found is not None and found.join_address and rundir.find_cluster("http://localhost:8009") is None


def test_a_record_that_holds_the_clusters_secret_is_for_this_user_only() -> None:
    directory = rundir.user_directory()
    record = ClusterRecord(1 << 30, 0.0, "http://127.0.0.1:1", "", "", "springtide", "the secret of a cluster", "", True, True, {})
    rundir.write_record(record)
    assert stat.S_IMODE((directory / f"{1 << 30}.json").stat().st_mode) == 0o600
    assert "the secret of a cluster" not in repr(record)
