"""`springtide up` with everything real: what the other commands see of it, and what is left when it ends."""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.local import rundir
from springtide.capacity import memory_bytes
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(instances=2, kv={"arena_size": "256MiB"}) as cluster:
        yield cluster


def springtide(cluster: Cluster, *arguments: str) -> str:
    command = [sys.executable, "-m", "deploy.cli", *arguments, "--url", cluster.url]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, env={"COLUMNS": "200", "PATH": ""}).stdout


def wait_until_gone(processes: list[psutil.Process], timeout_s: float) -> None:
    def gone() -> bool:
        return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)

    wait_until(gone, f"{processes} to end", timeout_s)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_every_process_says_its_role(cluster: Cluster) -> None:
    commands = {name: " ".join(psutil.Process(pid).cmdline()) for name, pid in cluster.record.processes.items()}
    for name, words in {
        "conductor-0": "conductor",
        "instance-0": "instance instance-0",
        "instance-1": "instance instance-1",
        "instance-0-store": "store instance-0",
        "instance-1-store": "store instance-1",
        "valkey": "valkey-server",
    }.items():
        assert words in commands.pop(name)
    assert not commands


def test_chat_answers_with_its_figures(cluster: Cluster) -> None:
    answer = springtide(cluster, "chat", "Name three colours.", "--max-tokens", "8", "--temperature", "0")
    text, figures = answer.strip().rsplit("\n", 1)
    assert text.strip()
    for figure in ("TTFT", "tokens/s", "8 tokens", "prompt tokens cached"):
        assert figure in figures


def test_bench_serve_measures_what_was_asked_for(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    shape = ("--requests", "6", "--concurrency", "3", "--prompt-tokens", "200", "--output-tokens", "6", "--shared-prefix", "0.64")
    printed = json.loads(springtide(cluster, "bench", "serve", "--json", "--output", str(out), *shape))
    assert printed == json.loads(out.read_text())
    results = printed["results"]
    assert (results["completed"], results["errors"]) == (6, {})
    assert (results["prompt_tokens"], results["output_tokens"]) == (6 * 200, 6 * 6)
    assert results["cached_tokens"] >= 3 * 128, "the second three find the shared prefix of the first"
    assert 0 < results["ttft_ms"]["p50"] <= results["ttft_ms"]["p99"]
    assert 0 < results["tbt_ms"]["p50"] <= results["tbt_ms"]["p99"]


def test_status_shows_nodes_and_hit_rate(cluster: Cluster) -> None:
    table = springtide(cluster, "status")
    for word in ("SmolLM2-135M-Instruct: ready", "instance-0.prefill", "instance-1", "hit rate", "slots used"):
        assert word in table


def test_status_shows_how_good_the_predictions_were(cluster: Cluster) -> None:
    springtide(cluster, "bench", "serve", "--requests", "2", "--concurrency", "1", "--prompt-tokens", "100", "--output-tokens", "4")
    table = springtide(cluster, "status", "--predictions")
    for word in ("ttft", "queue", "prefill", "tbt", "output tokens", "median error", "bias"):
        assert word in table


def test_a_run_directory_in_use_is_refused_and_whose_it_is_keeps_its_sockets(cluster: Cluster) -> None:
    run_dir = cluster.record.run_dir
    before = sorted(path.name for path in Path(run_dir).glob("*.sock"))
    command = [sys.executable, "-m", "deploy.cli", "up", "--port", "0", "--grpc-port", "0", "--run-dir", run_dir]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert f"run_dir: {run_dir} is in use by another cluster, of the supervisor {cluster.record.pid}" in result.stderr
    assert "instance-0.store.sock" in before and sorted(path.name for path in Path(run_dir).glob("*.sock")) == before
    cluster.kill("instance-0")
    cluster.wait_ready(restarted="instance-0")


def test_killing_the_supervisor_takes_everything_with_it(cluster: Cluster) -> None:
    record = cluster.record
    children = [psutil.Process(pid) for pid in record.processes.values()]
    assert len(children) == 6
    cluster.supervisor.kill()
    wait_until_gone(children, timeout_s=2)
    assert Path(record.run_dir).exists(), "nobody was there to remove it"
    rundir.sweep()
    assert not Path(record.run_dir).exists()


def test_sigterm_in_the_middle_of_the_start_leaves_nothing_behind() -> None:
    before = shared_memory()
    command = [sys.executable, "-m", "deploy.cli", "up", "--port", "0", "--grpc-port", "0", "--separate-gateway"]
    supervisor = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    record = wait_for_record(supervisor.pid, num_processes=7)
    children = [psutil.Process(pid) for pid in record.processes.values()]
    supervisor.terminate()
    assert supervisor.wait(timeout=5) == 0
    wait_until_gone(children, timeout_s=0.1)
    assert not Path(record.run_dir).exists()
    assert record.pid not in [running.pid for running in rundir.running_clusters()]
    assert shared_memory() <= before


@pytest.mark.parametrize(
    ("arena_bytes", "limit_bytes", "process", "said"),
    [
        pytest.param(memory_bytes() // 2, memory_bytes() // 2, "-store", "kv.arena_size: no room for an arena of ", id="arenas"),
        pytest.param(64 << 20, 1 << 30, "", "Cannot allocate memory", id="models"),
    ],
)
def test_a_start_for_which_there_is_no_memory_ends_with_what_lacks_it(arena_bytes: int, limit_bytes: int, process: str, said: str) -> None:
    """No process may have more than `limit_bytes`, as by `ulimit -v`."""
    before = shared_memory()
    with tempfile.TemporaryDirectory() as scratch:  # short enough for the Unix sockets of a run directory
        command = [sys.executable, "-m", "deploy.cli", "up", "--port", "0", "--grpc-port", "0", "--arena-size", str(arena_bytes)]
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "TMPDIR": scratch},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes)),
        )
        assert result.returncode == 1, result.stderr
        told = result.stdout + result.stderr
        assert re.search(rf"instance-[01]{process} exited with 1 and was not ready once in 2 starts. The end of its log:", told)
        assert said in told
        assert not [path for path in Path(scratch).rglob("*") if not path.is_dir()]
        assert not [each for each in psutil.process_iter(["cmdline"]) if scratch in " ".join(each.info["cmdline"] or ())]
    assert shared_memory() <= before


def wait_for_record(pid: int, num_processes: int) -> rundir.ClusterRecord:
    def found() -> rundir.ClusterRecord | None:
        records = (record for record in rundir.running_clusters() if record.pid == pid and len(record.processes) == num_processes)
        return next(records, None)

    record = wait_until(found, f"supervisor {pid} to start {num_processes} processes")
    assert record is not None
    return record
