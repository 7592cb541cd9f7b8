"""The KubeRay that tests play."""

from __future__ import annotations

import pytest

from tests.support.kuberay_operator import KubeRay
from tests.support.kubernetes_api import KubernetesApi
from tests.support.ray_nodes import RayMachines
from tests.support.waiting import wait_until

pytest.importorskip("ray")


def test_what_it_fails_with_is_what_the_test_fails_with() -> None:
    lacks_its_bounds = {"groupName": "prefill", "replicas": 1}
    cluster = {"apiVersion": "ray.io/v1", "metadata": {"name": "a"}, "spec": {"workerGroupSpecs": [lacks_its_bounds]}}
    api = KubernetesApi()
    try:
        with (
            RayMachines() as machines,
            pytest.raises(KeyError, match="minReplicas"),
            KubeRay(api, cluster, machines) as kuberay,
            pytest.raises(KeyError, match="minReplicas"),
        ):
            wait_until(lambda: kuberay.pods("prefill"), "a pod that never comes")
    finally:
        api.close()
