"""A cluster whose Valkey is watched by Sentinels: the master's machine dies, and everything goes on with the promoted replica."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_conductor_ha import GOOD, load_on
from tests.support.cluster import Cluster, members_of, status_of
from tests.support.profiles import DEMO_PROFILE
from tests.support.sentinels import WatchedValkey

pytestmark = pytest.mark.alone

CONDUCTOR = {"replicas": 2, "leader_lease_s": 2.0}


def test_a_master_that_dies_with_a_sentinel_costs_no_request_and_its_replica_is_told_of_everybody_again(tmp_path: Path) -> None:
    with (
        WatchedValkey(tmp_path) as valkey,
        Cluster(
            redis_url=valkey.url, profile=DEMO_PROFILE, prefill=1, decode=1, conductor=CONDUCTOR, kv={"arena_size": "256MiB"}
        ) as cluster,
    ):

        def everybody() -> set[tuple[str, str, int]]:
            members = members_of(valkey.replica_url, cluster.record.cluster, cluster.credentials)
            return {(member.role, member.member_id, member.incarnation) for member in members}

        def leaders() -> list[int]:
            members = members_of(valkey.replica_url, cluster.record.cluster, cluster.credentials)
            said = [status_of([member], cluster.credentials) for member in members if member.role == "conductor"]
            return [each.epoch for each in said if each.leads]

        before, processes = everybody(), dict(cluster.record.processes)
        assert {role for role, _, _ in before} == {"store", "prefill", "decode", "conductor", "gateway"}
        with load_on(cluster) as load:
            valkey.kill_machine()
            valkey.wait_promoted()
            cluster.wait_until(lambda: everybody() == before, "the same members to be announced at the replica")
            cluster.wait_until(lambda: len(leaders()) == 1, "one Conductor to lead")
            load.wait_for_more()
        assert set(load.ends) == {GOOD}
        assert cluster.record.processes == processes
