"""Several Conductors on one machine: what is started, and what `springtide status` says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.commands.conductors import View, cluster_status, leadership
from deploy.local.plan import ClusterPaths, placed, processes, resolve
from springtide.config import load_config
from springtide.errors import Unavailable
from springtide.protocol import wire
from springtide.protocol.status import ClusterStatus
from springtide.rpc import conductor_pb2 as pb


def status(**fields: Any) -> ClusterStatus:
    return replace(wire.CLUSTER_STATUS.decode(pb.ClusterStatus()), **fields)


LEADER = View("conductor-1", status(leads=True, epoch=4, requests_scheduled=7))
STANDBY = View("conductor-0", status(epoch=4))
SILENT = View("conductor-0", None, "the Conductor at 127.0.0.1:1 does not answer: Connection refused")


def names(run_dir: Path, **settings: object) -> list[str]:
    ports = {"server.port": 0, "server.grpc_port": 0}
    config = resolve(load_config(overrides={**ports, **{name.replace("__", "."): value for name, value in settings.items()}}, environ={}))
    return [spec.name for spec in processes(placed(config, run_dir), ClusterPaths(run_dir), embedded_valkey=True)]


def test_several_conductors_have_their_gateway_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert names(tmp_path)[-1] == "conductor-0"
    assert names(tmp_path, conductor__replicas=3)[-4:] == ["conductor-0", "conductor-1", "conductor-2", "gateway-0"]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([View("conductor-0", status(leads=True))], "conductor-0 leads"),
        ([LEADER, STANDBY], "conductor-1 leads (epoch 4), conductor-0 stands by"),
        ([LEADER, SILENT], "conductor-1 leads (epoch 4), conductor-0 [red]does not answer[/]"),
        ([STANDBY], "[red]no Conductor leads[/] (epoch 4), conductor-0 stands by"),
    ],
)
def test_status_says_who_leads(found: list[View], said: str) -> None:
    assert leadership(found) == said


def test_the_leaders_view_is_shown_or_a_standbys_when_there_is_none() -> None:
    assert cluster_status([LEADER, STANDBY]).requests_scheduled == 7
    assert cluster_status([SILENT, STANDBY]).epoch == 4
    with pytest.raises(Unavailable, match="Connection refused"):
        cluster_status([SILENT])
