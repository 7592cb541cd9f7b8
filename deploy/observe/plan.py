"""What `springtide up --observe` starts, where it is installed: Prometheus with the project's rules, and Alertmanager."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.local.plan import ProcessSpec
from deploy.observe.targets import Targets
from springtide.config import LOOPBACK, ClusterConfig, replace_private
from springtide.credentials import credentials_of
from springtide.membership import Membership

FILES = Path(__file__).parents[1] / "prometheus"
DASHBOARDS = Path(__file__).parents[1] / "grafana/dashboards"
COMPOSE = Path(__file__).parents[1] / "compose/observe.yaml"
PROMETHEUS, ALERTMANAGERS = "prometheus", ("alertmanager", "prometheus-alertmanager")
"""What the programs are called; Debian calls the second otherwise."""
SCRAPE_S = 5
LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Observation:
    """Of a placed configuration. All its files are in `observe` in the run directory."""

    config: ClusterConfig
    prometheus: str | None
    """Where the program is; None where there is none."""
    alertmanager: str | None

    @classmethod
    def of(cls, config: ClusterConfig) -> Observation | None:
        """None where it is not asked for."""
        if not config.observe.enabled:
            return None
        return cls(config, shutil.which(PROMETHEUS), next(filter(None, map(shutil.which, ALERTMANAGERS)), None))

    @property
    def directory(self) -> Path:
        assert self.config.run_dir is not None, "the configuration must be placed"
        return self.config.run_dir / "observe"

    @property
    def targets(self) -> Path:
        return self.directory / "targets.json"

    @property
    def prometheus_url(self) -> str:
        return f"http://{LOOPBACK}:{self.config.observe.prometheus_port}"

    @property
    def alertmanager_url(self) -> str:
        return f"http://{LOOPBACK}:{self.config.observe.alertmanager_port}"

    def prepare(self) -> None:
        """Writes the files, of which an Alertmanager's that was changed by hand is left as it is."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        shutil.copy(FILES / "rules.yaml", self.directory)
        if not (self.directory / "alertmanager.yaml").exists():
            shutil.copy(FILES / "alertmanager.yaml", self.directory)
        if not self.targets.exists():
            self.targets.write_text("[]\n")
        (self.directory / "prometheus.yaml").write_text(yaml.safe_dump(self._prometheus(), sort_keys=False))

    def processes(self) -> list[ProcessSpec]:
        """Of what is installed."""
        specs = []
        directory, observe = self.directory, self.config.observe
        if self.alertmanager is not None:
            command = (
                self.alertmanager,
                f"--config.file={directory / 'alertmanager.yaml'}",
                f"--storage.path={directory / 'alertmanager'}",
                f"--web.listen-address={LOOPBACK}:{observe.alertmanager_port}",
                "--cluster.listen-address=",
            )
            specs.append(ProcessSpec("alertmanager", "observer", "alertmanager", command, ready_url=f"{self.alertmanager_url}/-/ready"))
        if self.prometheus is not None:
            command = (
                self.prometheus,
                f"--config.file={directory / 'prometheus.yaml'}",
                f"--storage.tsdb.path={directory / 'prometheus'}",
                f"--web.listen-address={LOOPBACK}:{observe.prometheus_port}",
                "--enable-feature=exemplar-storage",
            )
            specs.append(ProcessSpec("prometheus", "observer", "prometheus", command, ready_url=f"{self.prometheus_url}/-/ready"))
        return specs

    async def follow(self) -> None:
        """Keeps the file of targets as the membership is; goes on for ever."""
        membership = Membership.of(self.config, credentials_of(self.config))
        targets, written = Targets(self.config.cluster), ""
        try:
            while True:
                members = await membership.leases()
                if members is not None:
                    targets.see(members, time.monotonic())
                    if (text := targets.as_file()) != written:
                        replace_private(self.targets, text)
                        written = text
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await membership.close()

    def greeting(self) -> str:
        """Where everything is."""
        if self.prometheus is None:
            shown = (
                "There is no `prometheus` on the PATH (on Debian and Ubuntu: apt-get install --no-install-recommends prometheus "
                f"prometheus-alertmanager). With Docker: SPRINGTIDE_OBSERVE={self.directory} docker compose -f {COMPOSE} --profile all up"
            )
        else:
            shown = f"Prometheus is on {self.prometheus_url}"
            shown += (
                f", Alertmanager on {self.alertmanager_url}" if self.alertmanager is not None else ", and Alertmanager is not installed"
            )
            shown += f". Grafana, with Docker: SPRINGTIDE_OBSERVE={self.directory} docker compose -f {COMPOSE} up"
        return f"{shown}\nDashboards, for Grafana's own import: {DASHBOARDS}"

    def _prometheus(self) -> dict[str, Any]:
        scrape: dict[str, Any] = {"job_name": "springtide", "file_sd_configs": [{"files": [str(self.targets)]}]}
        tls = self.config.tls
        if tls.certificate is not None:
            # Read again at each handshake, as they are written over when they are renewed.
            files = {"cert_file": tls.certificate, "key_file": tls.key, "ca_file": tls.ca}
            scrape |= {"scheme": "https", "tls_config": {name: str(path) for name, path in files.items()}}
        alertmanagers = [{"static_configs": [{"targets": [f"{LOOPBACK}:{self.config.observe.alertmanager_port}"]}]}]
        told = alertmanagers if self.alertmanager is not None or self.prometheus is None else []
        return {
            "global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
            "rule_files": [str(self.directory / "rules.yaml")],
            "alerting": {"alertmanagers": told},
            "scrape_configs": [scrape],
        }
