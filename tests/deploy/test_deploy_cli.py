"""The command line: what is said when something is wrong, and that nothing is left behind by it."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from cryptography import x509

from deploy.ca.authority import addresses_in
from deploy.local import rundir
from deploy.local.certificates import OwnCertificates
from deploy.local.node import StagePlace, stage_place
from deploy.local.plan import SPINS, ClusterPaths, client_host, free_port, metrics_ports, node_processes, placed, processes, resolve
from deploy.local.rundir import ClusterRecord, RunDir
from springtide.config import SECRET_VARIABLE, load_config, write_config
from springtide.errors import ConfigError
from tests.support import command
from tests.support.command import Result


class Springtide(Protocol):
    def __call__(self, *arguments: str, **environment: str) -> Result: ...


@pytest.fixture
def springtide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Springtide:
    """Runs the command in this process, with `tmp_path` as temporary directory."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "400")
    return command.springtide


def left_behind(tmp: Path) -> list[str]:
    return [str(path.relative_to(tmp)) for path in tmp.rglob("*") if path.is_file()]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (("--set", "kv.block_tokns=64"), {}, "kv.block_tokns (from command line): there is no such setting"),
        (("--set", "kv.block_tokens"), {}, "--set kv.block_tokens: write --set KEY=VALUE"),
        (("--prefill", "65"), {}, "prefill (from command line)"),
        (("--prefill", "0"), {}, "a cluster of this machine alone has instances, or one of each at least"),
        (("--instances", "65"), {}, "instances (from command line)"),
        (("--dtype", "int4"), {}, "dtype (from command line)"),
        ((), {"SPRINGTIDE_DECODE": "many"}, "decode (from SPRINGTIDE_DECODE)"),
        (("--config", "/nowhere/cluster.yaml"), {}, "cannot read the configuration file /nowhere/cluster.yaml"),
        (("--model", "/nowhere/model"), {}, "model: there is no '/nowhere/model'"),
        (("--redis-url", "redis://127.0.0.1:9/0"), {}, "redis_url: no Valkey or Redis answers"),
        (("--redis-url", "nonsense"), {}, "redis_url: no Valkey or Redis answers"),
        (("--arena-size", "900TiB"), {}, "kv.arena_size: 2 nodes with 989560464998400 bytes each take more than this machine's memory"),
        (("--arena-size", "2MiB"), {}, "kv.arena_size: 2097152 bytes has room for 1 blocks"),
        (("--set", "prefill_node.stages=2"), {}, "prefill_node.stages: it is 2, but stages are of prefill groups, of which there are none"),
    ],
)
def test_a_wrong_setting_stops_up_with_2_and_one_clear_message(
    arguments: tuple[str, ...], environment: dict[str, str], said: str, springtide: Springtide, tmp_path: Path
) -> None:
    result = springtide("up", *arguments, **environment)
    assert result.returncode == 2
    assert said in result.stderr and "Traceback" not in result.stderr
    assert left_behind(tmp_path) == []


def test_a_port_that_is_taken_is_said_before_anything_starts(taken_port: int, springtide: Springtide, tmp_path: Path) -> None:
    result = springtide("up", "--port", str(taken_port))
    assert result.returncode == 2
    assert f"server.port: cannot listen on 127.0.0.1:{taken_port}" in result.stderr
    assert left_behind(tmp_path) == []


def test_a_model_that_cannot_be_read_ends_up_with_its_reason(springtide: Springtide, tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"this is no model")
    result = springtide("up", "--model", str(model), "--port", "0", "--grpc-port", "0")
    assert result.returncode == 2
    assert "broken.gguf is not a GGUF file" in result.stderr and "Traceback" not in result.stderr
    assert left_behind(tmp_path) == [model.name]


def test_status_and_chat_say_when_there_is_no_cluster(springtide: Springtide) -> None:
    status = springtide("status", "--url", "http://127.0.0.1:9")
    assert status.returncode == 1 and "no cluster of this user on this machine serves at http://127.0.0.1:9" in status.stderr
    chat = springtide("chat", "hello", "--url", "http://127.0.0.1:9")
    assert chat.returncode == 1 and "the connection to http://127.0.0.1:9 failed" in chat.stderr


def test_bench_refuses_both_concurrency_and_rate(springtide: Springtide) -> None:
    result = springtide("bench", "serve", "--concurrency", "2", "--rate", "3")
    assert result.returncode == 2 and "either --concurrency or --rate" in result.stderr


def test_config_shows_what_all_sources_make_together(springtide: Springtide) -> None:
    result = springtide("config", "--set", "kv.arena_size=2MiB", SPRINGTIDE_PREFILL="3")
    assert result.returncode == 0
    assert "prefill: 3" in result.stdout and f"arena_size: {2 << 20}" in result.stdout


@pytest.mark.parametrize(
    ("environment", "counts"),
    [
        ({}, (2, 0, 0)),
        ({"SPRINGTIDE_INSTANCES": "0"}, (0, 1, 1)),
        ({"SPRINGTIDE_PREFILL": "2"}, (0, 2, 1)),
        ({"SPRINGTIDE_DECODE": "2"}, (0, 1, 2)),
        ({"SPRINGTIDE_DECODE": "0", "SPRINGTIDE_PREFILL": "0"}, (0, 0, 0)),
        ({"SPRINGTIDE_INSTANCES": "3"}, (3, 0, 0)),
        ({"SPRINGTIDE_INSTANCES": "3", "SPRINGTIDE_PREFILL": "1"}, (3, 1, 0)),
    ],
)
def test_beside_instances_there_are_no_nodes_of_one_role_unless_they_are_asked_for(
    environment: dict[str, str], counts: tuple[int, int, int], springtide: Springtide
) -> None:
    result = springtide("config", **environment)
    assert result.returncode == 0
    for name, count in zip(("instances", "prefill", "decode"), counts, strict=True):
        assert f"\n{name}: {count}\n" in f"\n{result.stdout}", name


def test_an_instance_is_an_engine_that_prefills_and_decodes_and_a_store(tmp_path: Path) -> None:
    config = placed(resolve(load_config(overrides={"server.port": 0, "server.grpc_port": 0, "instances": 2}, environ={})), tmp_path)
    specs = {spec.name: spec for spec in processes(config, ClusterPaths(tmp_path), embedded_valkey=False)}
    assert set(specs) == {"conductor-0", "instance-0", "instance-0-store", "instance-1", "instance-1-store"}
    assert "mixed_node" in specs["instance-0"].command and "--prefills" in specs["instance-0"].command


def test_a_simulated_cluster_has_instances_or_both_kinds_of_node(springtide: Springtide) -> None:
    few = ("simulate", "--workload", "chat", "--requests", "3")
    result = springtide(*few, "--prefill", "0")
    assert result.returncode == 2 and "a cluster without --instances needs one of each at least" in result.stderr
    result = springtide(*few, "--instances", "2")
    assert result.returncode == 0 and "2 without a split" in result.stdout
    result = springtide(*few, "--instances", "2", "--decode", "1")
    assert result.returncode == 0 and "1 decode + 2 without a split" in result.stdout


def test_a_simulated_coupled_cluster_names_its_routing(springtide: Springtide) -> None:
    coupled = ("simulate", "--workload", "chat", "--requests", "3", "--coupled", "2", "--routing")
    result = springtide(*coupled, "least-loaded")
    assert result.returncode == 0 and "2 coupled on a100-llama2-70b, least-loaded" in " ".join(result.stdout.split())
    result = springtide(*coupled, "fastest")
    assert result.returncode == 2 and "--routing: 'fastest' is not cache-aware or least-loaded" in result.stderr


def test_help_imports_nothing_heavy() -> None:
    program = "import sys, deploy.cli; print([name for name in ('torch', 'grpc', 'numpy', 'httpx', 'fastapi') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_a_machine_that_lets_nobody_in_imports_no_http_server() -> None:
    program = "import sys, deploy.local.node; print([name for name in ('gateway', 'fastapi', 'uvicorn') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_a_resolved_configuration_leaves_nothing_to_choose(tmp_path: Path) -> None:
    config = resolve(load_config(overrides={"server.port": 0, "server.grpc_port": 0, "prefill": 2}, environ={}))
    assert config.server.port and config.server.grpc_port and config.prefill_node.threads and config.decode_node.threads
    config = placed(config, tmp_path)
    assert str(config.redis_url).startswith("unix://:") and str(config.redis_url).endswith(f"@{tmp_path}/valkey.sock")
    paths = ClusterPaths(tmp_path)
    write_config(config, paths.config)
    assert config.cluster_secret is not None
    assert load_config(paths.config, environ={SECRET_VARIABLE: config.cluster_secret.get_secret_value()}) == config


def test_a_run_directory_that_is_kept_keeps_the_clusters_secret(tmp_path: Path) -> None:
    """Machines that have joined would know a cluster with another one no more."""
    config = load_config(environ={})
    secret = placed(config, tmp_path).cluster_secret
    assert secret is not None and placed(config, tmp_path).cluster_secret == secret
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
    given = placed(load_config(environ={SECRET_VARIABLE: "another of sixteen"}), tmp_path).cluster_secret
    assert given is not None and given.get_secret_value() == "another of sixteen"
    (tmp_path / "secret").write_text("short")
    with pytest.raises(ConfigError, match="has 5 characters"):
        placed(config, tmp_path)


def test_the_heads_certificate_has_the_names_that_it_is_joined_at(tmp_path: Path) -> None:
    overrides = {"address": "10.0.0.1", "join_port": 0, "valkey_port": 0, "tls.names": ["head.example", "203.0.113.7"]}
    certificates = OwnCertificates.of(placed(load_config(overrides=overrides, environ={}), tmp_path))
    assert certificates is not None
    certificates.prepare(placed(load_config(overrides=overrides, environ={}), tmp_path))
    own = x509.load_pem_x509_certificate(certificates.identity.certificate.read_bytes())
    assert {"10.0.0.1", "head.example", "203.0.113.7", socket.gethostname()} <= addresses_in(own)


@pytest.mark.parametrize("address", ["2001:DB8::5", "[2001:db8:0:0::5]", "fe80::5%lo"])
def test_a_certificate_is_good_however_its_addresses_are_written(tmp_path: Path, address: str) -> None:
    overrides = {
        "address": address,
        "join_port": 8002,
        "tls.names": ["FD00::0:1"],
        "run_dir": str(tmp_path),
        "tls.ca_dir": str(tmp_path / "ca"),
    }
    config = load_config(overrides=overrides, environ={})
    certificates = OwnCertificates.of(config)
    assert certificates is not None
    certificates.prepare(config)
    first = certificates.identity.certificate.read_bytes()
    certificates.renew()
    assert certificates.identity.certificate.read_bytes() == first


def test_who_has_no_token_and_has_not_joined_before_is_told_where_one_is_to_be_had(springtide: Springtide, tmp_path: Path) -> None:
    result = springtide("node", "store", "--join", "127.0.0.1:1", "--run-dir", str(tmp_path / "run"))
    assert result.returncode == 2 and "--token: this machine has not joined before" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--name", "my node"), "--name: 'my node' is no name of a node"),
        (("--name", "x.prefill"), "'x.prefill' is no name of a node: so an instance 'x' is called as one that prefills"),
        (("--group", "x.prefill", "--stage", "0/2"), "--group: 'x.prefill' is no name of a node"),
        (("--name", 65 * "x"), "is no name of a node"),
        ((), "--name: 'prefill-hhh"),
        (("--group", "g/1", "--stage", "0/2"), "--group: 'g/1' is no name of a node"),
        (("--name", "x", "--address", "münchen.example"), "'münchen.example' is no address for a certificate"),
        (("--address", "127.0.0.1", "--join", "head:80o2"), "--join: 'head:80o2' is no HOST:PORT"),
    ],
)
def test_what_no_node_can_be_called_is_said_before_anybody_is_asked(
    options: tuple[str, ...], said: str, springtide: Springtide, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: 63 * "h")
    token = f"{8 * '0'}.{32 * '0'}.{64 * '0'}"
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    result = springtide("node", "prefill", "--join", "127.0.0.1:1", "--token", token, *options)
    assert result.returncode == 2
    assert said in result.stderr and "Traceback" not in result.stderr


def test_each_stage_of_a_prefill_group_has_its_share_of_the_cores() -> None:
    free = {"server.port": 0, "server.grpc_port": 0}
    two, many = (resolve(load_config(overrides={**free, "prefill": 1, "prefill_node.stages": n}, environ={})) for n in (1, 1000))
    assert (two.num_engines, many.num_engines) == (2, 1001)
    assert two.prefill_node.threads == max(1, len(os.sched_getaffinity(0)) // 2) and many.prefill_node.threads == 1


def test_every_process_is_told_the_clusters_secret_and_nobody_sees_it(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    config, other = (
        placed(resolve(load_config(overrides={"server.port": 0, "server.grpc_port": 0}, environ={})), run_dir)
        for run_dir in (tmp_path, tmp_path / "other")
    )
    assert config.cluster_secret is not None and other.cluster_secret is not None
    secret = config.cluster_secret.get_secret_value()
    assert secret != other.cluster_secret.get_secret_value() and len(secret) == 64
    specs = processes(config, ClusterPaths(tmp_path), embedded_valkey=True)
    assert {spec.role for spec in specs if spec.environment.get(SECRET_VARIABLE) != secret} == {"valkey"}
    engines = [spec.environment["GOMP_SPINCOUNT"] for spec in specs if spec.name in ("instance-0", "instance-1")]
    assert engines == [SPINS] * 2, "their threads do not keep cores from one another"
    write_config(config, tmp_path / "config.yaml")
    assert secret not in repr(specs) + (tmp_path / "config.yaml").read_text()


def test_every_process_of_a_cluster_has_its_place(tmp_path: Path) -> None:
    config = resolve(
        load_config(overrides={"server.port": 0, "server.grpc_port": 0, "prefill": 2, "server.separate_gateway": True}, environ={}),
    )
    config = placed(config, tmp_path)
    names = [spec.name for spec in processes(config, ClusterPaths(tmp_path), embedded_valkey=True)]
    nodes = [f"{node}{part}" for node in ("prefill-0", "prefill-1", "decode-0") for part in ("-store", "")]
    assert names == ["valkey", *nodes, "conductor-0", "gateway-0"]
    assert "valkey" not in [spec.name for spec in processes(config, ClusterPaths(tmp_path), embedded_valkey=False)]


def test_who_has_requests_of_its_own_ends_them_before_it_ends(tmp_path: Path) -> None:
    """As a Conductor with a gateway in its process does, and one without does not."""

    def who(**settings: bool | str) -> set[str]:
        config = load_config(overrides=settings, environ={})
        return {spec.name for spec in processes(config, ClusterPaths(tmp_path), embedded_valkey=False) if spec.drains}

    assert who() == {"instance-0", "instance-1", "conductor-0"}
    assert who(prefill="1") == {"prefill-0", "decode-0", "conductor-0"}
    assert who(**{"server.separate_gateway": True}) == {"instance-0", "instance-1", "gateway-0"}
    assert who(**{"ray.address": "127.0.0.1:6379"}) == {"placer", "conductor-0"}


def test_metrics_are_at_ports_that_are_known_beforehand(tmp_path: Path) -> None:
    settings = {"prefill": 1, "decode": 1, "server.separate_gateway": True, "conductor.replicas": 2}

    def ports(**own: int) -> dict[str, str]:
        config = load_config(overrides={**settings, **own}, environ={})
        specs = processes(config, ClusterPaths(tmp_path), embedded_valkey=False)
        return {spec.name: spec.command[spec.command.index("--metrics-port") + 1] for spec in specs}

    names = ("prefill-0", "prefill-0-store", "decode-0", "decode-0-store", "conductor-0", "conductor-1", "gateway-0")
    assert ports(metrics_port=9400) == {name: str(9400 + number) for number, name in enumerate(names)}
    assert ports() == dict.fromkeys(names, "0")


def test_a_stage_on_a_machine_of_its_own_has_a_store_beside_it(tmp_path: Path) -> None:
    """And all of the machine's cores, however many stages there are elsewhere."""
    overrides = {"prefill": 1, "decode": 0, "prefill_node.stages": 8, "prefill_node.spread_stages": True}
    config = load_config(overrides=overrides, environ={})
    assert config.num_engines == 1
    specs = node_processes("prefill", "long.stage-7", config, ClusterPaths(tmp_path), metrics_ports(config), 7)
    assert [(spec.name, spec.role, spec.member_id) for spec in specs] == [
        ("long.stage-7-store", "layer-store", "long.stage-7"),
        ("long.stage-7", "stage", "long.stage-7"),
    ]
    assert all(spec.command[-2:] == ("--stage", "7") for spec in specs)
    first = node_processes("prefill", "long", config, ClusterPaths(tmp_path), metrics_ports(config))
    assert [(spec.name, spec.role) for spec in first] == [("long-store", "store"), ("long", "prefill")]
    with pytest.raises(ConfigError, match=r"prefill_node\.spread_stages: each stage is on a node of its own"):
        resolve(config)


def test_the_place_of_a_stage_is_said_in_full() -> None:
    assert stage_place("prefill", None, "long", "2/3") == StagePlace("long", 2, 3)
    assert stage_place("prefill", "any", None, None) is None
    for said, message in {
        ("prefill", None, "long", None): "a stage has both",
        ("prefill", None, None, "0/2"): "a stage has both",
        ("decode", None, "long", "0/2"): "stages are of prefill groups, not of a decode node",
        ("prefill", "mine", "long", "0/2"): "'mine' is not needed",
        ("prefill", None, "long", "2/2"): "must be I/X with I from 0 to X - 1 and X at least 2, not '2/2'",
        ("prefill", None, "long", "0/1"): "must be I/X",
        ("prefill", None, "long", "first"): "must be I/X",
    }.items():
        with pytest.raises(ConfigError, match=message):
            stage_place(*said)


def test_a_taken_port_is_refused_by_name(taken_port: int) -> None:
    with pytest.raises(ConfigError, match=r"server\.grpc_port: cannot listen"):
        free_port("server.grpc_port", "127.0.0.1", taken_port)


@pytest.mark.parametrize(
    ("host", "reached_at"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("localhost", "127.0.0.1"), ("10.0.0.3", "10.0.0.3")]
)
def test_clients_get_an_address_they_can_reach(host: str, reached_at: str) -> None:
    assert client_host(host) == reached_at


def test_what_a_killed_supervisor_left_is_swept(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    run_dir = RunDir.claim(None).path
    record = ClusterRecord(os.getpid(), 0.0, "http://127.0.0.1:1", "127.0.0.1:2", "", "springtide", "", str(run_dir), True, True, {})
    rundir.write_record(record)  # of a process that had our id and started in 1970
    assert json.loads((rundir.user_directory() / f"{os.getpid()}.json").read_text())["url"] == "http://127.0.0.1:1"
    assert rundir.find_cluster("http://127.0.0.1:1") is None
    rundir.sweep()
    assert not run_dir.exists() and left_behind(short_path) == []


def test_a_directory_of_somebody_else_is_no_place_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"springtide-{os.getuid()}").mkdir()
    (tmp_path / f"springtide-{os.getuid()}").chmod(0o777)
    with pytest.raises(ConfigError, match="only its owner"):
        rundir.user_directory()
