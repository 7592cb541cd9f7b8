"""What `springtide up --observe` watches: who comes, who leaves, who is lost; and the files that Prometheus and Docker are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.local.plan import placed, resolve
from deploy.observe import plan
from deploy.observe.plan import COMPOSE, DASHBOARDS, Observation
from deploy.observe.targets import KEEP_LOST_S, Targets
from springtide.config import ClusterConfig, TlsConfig
from springtide.membership import Member, MemberRole
from tests.support.dashboards import DASHBOARDS as COMMITTED
from tests.support.prometheus import RULES, accepts

GRAFANA = COMPOSE.parents[1] / "grafana"
LEASE_S = 5.0


def member(role: MemberRole, name: str, port: int, pid: int = 1) -> Member:
    return Member(role, name, 1, "127.0.0.1:1", metrics_address=f"127.0.0.1:{port}", pid=pid)


def seen(targets: Targets) -> dict[str, tuple[str, str]]:
    groups: list[dict[str, Any]] = json.loads(targets.as_file())
    assert all(group["labels"]["cluster"] == "moon" for group in groups)
    return {group["labels"]["instance"]: (group["labels"]["springtide_role"], group["targets"][0]) for group in groups}


ENGINE, STORE = member("decode", "decode-0", 9001), member("store", "decode-0", 9002)


def test_each_process_is_one_target_called_as_its_log_is() -> None:
    targets = Targets("moon")
    head = [member("gateway", "conductor-0", 9000), member("conductor", "conductor-0", 9000)]
    targets.see([(each, LEASE_S) for each in (*head, ENGINE, STORE)], 0.0)
    assert seen(targets) == {
        "conductor-0": ("conductor", "127.0.0.1:9000"),
        "decode-0": ("decode", "127.0.0.1:9001"),
        "decode-0-store": ("store", "127.0.0.1:9002"),
    }


def test_an_engine_that_prefills_and_decodes_is_one_target_called_as_its_node() -> None:
    targets = Targets("moon")
    both = [member("prefill", "instance-0.prefill", 9001), member("decode", "instance-0", 9001), member("store", "instance-0", 9002)]
    targets.see([(each, LEASE_S) for each in both], 0.0)
    assert seen(targets) == {"instance-0": ("instance", "127.0.0.1:9001"), "instance-0-store": ("store", "127.0.0.1:9002")}


def test_who_starts_anew_keeps_its_name() -> None:
    targets = Targets("moon")
    targets.see([(STORE, LEASE_S)], 0.0)
    targets.see([(member("store", "decode-0", 9777, pid=2), LEASE_S)], 1.0)
    assert seen(targets) == {"decode-0-store": ("store", "127.0.0.1:9777")}


def test_who_withdraws_is_left_out() -> None:
    targets = Targets("moon")
    targets.see([(ENGINE, 4.0), (STORE, 4.0)], 0.0)
    targets.see([(STORE, 4.0)], 1.0)
    assert set(seen(targets)) == {"decode-0-store"}


def test_who_is_lost_is_asked_for_a_while() -> None:
    targets = Targets("moon")
    for now in range(5):
        targets.see([(ENGINE, LEASE_S - now), (STORE, LEASE_S)], now)
    targets.see([(STORE, LEASE_S)], 5.0)
    assert set(seen(targets)) == {"decode-0", "decode-0-store"}
    targets.see([(STORE, LEASE_S)], 6.0 + KEEP_LOST_S)
    assert set(seen(targets)) == {"decode-0-store"}


def test_a_valkey_that_has_forgotten_everybody_changes_nothing() -> None:
    targets = Targets("moon")
    targets.see([(ENGINE, LEASE_S)], 0.0)
    targets.see([], 1.0)
    assert set(seen(targets)) == {"decode-0"}


def observation(tmp_path: Path, **settings: Any) -> Observation:
    ports = {"enabled": True, "prometheus_port": 0, "alertmanager_port": 0}
    config = placed(resolve(ClusterConfig.model_validate({"observe": ports, "server": {"port": 0, "grpc_port": 0}, **settings})), tmp_path)
    made = Observation.of(config)
    assert made is not None
    made.prepare()
    return made


def test_nothing_is_started_that_nobody_asked_for(tmp_path: Path) -> None:
    assert Observation.of(placed(resolve(ClusterConfig.model_validate({"server": {"port": 0, "grpc_port": 0}})), tmp_path)) is None


def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    made = observation(tmp_path)
    accepts("promtool", "check", "config", made.directory / "prometheus.yaml")
    assert (made.directory / "rules.yaml").read_text() == RULES.read_text()


def test_processes_with_certificates_are_scraped_with_one(tmp_path: Path) -> None:
    made = observation(tmp_path)
    files = {name: tmp_path / name for name in ("certificate", "key", "ca")}
    secure = Observation(made.config.model_copy(update={"tls": TlsConfig(**files)}), None, None)
    secure.prepare()
    (scrape,) = yaml.safe_load((secure.directory / "prometheus.yaml").read_text())["scrape_configs"]
    assert scrape["scheme"] == "https"
    assert scrape["tls_config"] == {
        f"{name}_file": str(tmp_path / source) for name, source in (("cert", "certificate"), ("key", "key"), ("ca", "ca"))
    }


@pytest.mark.parametrize("there", [(), ("prometheus",), ("prometheus", "prometheus-alertmanager"), ("prometheus", "alertmanager")])
def test_what_is_installed_is_started_and_what_is_not_is_said(
    there: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan.shutil, "which", lambda name: f"/usr/bin/{name}" if name in there else None)
    made = observation(tmp_path)
    assert {spec.command[0] for spec in made.processes()} == {f"/usr/bin/{name}" for name in there}
    said = made.greeting()
    assert ("apt-get" in said) == (not there) and str(DASHBOARDS) in said
    assert ("Alertmanager is not installed" in said) == (there == ("prometheus",))


def test_an_alertmanagers_file_that_was_changed_is_left_alone(tmp_path: Path) -> None:
    made = observation(tmp_path)
    (made.directory / "alertmanager.yaml").write_text("# ours\n")
    made.prepare()
    assert (made.directory / "alertmanager.yaml").read_text() == "# ours\n"


def test_docker_is_given_files_that_there_are() -> None:
    described = yaml.safe_load(COMPOSE.read_text())
    assert set(described["services"]) == {"grafana", "prometheus", "alertmanager"}
    for name, service in described["services"].items():
        assert service["network_mode"] == "host" and not service["image"].endswith(":latest") and ":" in service["image"], name
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source.startswith("${SPRINGTIDE_OBSERVE") or source.isidentifier() or (COMPOSE.parent / source).exists(), volume


def test_grafana_finds_the_dashboards_and_the_source_that_they_ask() -> None:
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/springtide.yaml").read_text())["providers"]
    mounts = dict(volume.split(":")[:2] for volume in yaml.safe_load(COMPOSE.read_text())["services"]["grafana"]["volumes"])
    (source,) = [source for source, target in mounts.items() if target == provider["options"]["path"]]
    assert (COMPOSE.parent / source).resolve() == DASHBOARDS and len(list(DASHBOARDS.glob("*.json"))) == len(COMMITTED)
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/springtide.yaml").read_text())["datasources"]
    assert [each["type"] for each in sources if each["isDefault"]] == ["prometheus"]
