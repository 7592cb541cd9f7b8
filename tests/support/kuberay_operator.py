"""Who plays KubeRay where its autoscaler runs: has a Ray node of this machine, at an address of its own, for each pod that a RayCluster in
the emulated Kubernetes API is to have, and lets go of those that the autoscaler names."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.chart import NAMESPACE, Object
from tests.support.environment import own_environment
from tests.support.kubernetes_api import KubernetesApi
from tests.support.ray_nodes import ENVIRONMENT, RayMachines, RayNode

LOOK_EVERY_S = 0.5
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


class KubeRay:
    """`with KubeRay(api, cluster, machines)`, whose head runs: reconciles until it is left. `cluster`: the RayCluster, which is not in
    the API yet. What it has failed with, who asks it or leaves it fails with too."""

    def __init__(self, api: KubernetesApi, cluster: Object, machines: RayMachines) -> None:
        self._api = api
        self._name = cluster["metadata"]["name"]
        self._machines = machines
        self._nodes: dict[str, tuple[str, str, RayNode]] = {}
        """Of each pod: its group, its address, and what runs there."""
        self._numbers = itertools.count(2)
        self._over = threading.Event()
        self._thread = ThreadPoolExecutor(1, "kuberay")
        self._running: Future[None] | None = None
        # As the API has it by KubeRay's definition.
        groups = [{"replicas": 0, **group} for group in cluster["spec"]["workerGroupSpecs"]]
        made = {**cluster, "spec": {**cluster["spec"], "workerGroupSpecs": groups}}
        self._path = f"/apis/{cluster['apiVersion']}/namespaces/{NAMESPACE}/rayclusters"
        api.answer("POST", self._path, {}, json.dumps(made).encode())
        self._say(f"{self._name}-head", "headgroup", "head", machines.host, runs=True)

    def replicas(self, group: str) -> int:
        """How many pods the RayCluster asks for."""
        self._check()
        (found,) = [each for each in self._groups() if each["groupName"] == group]
        return int(found["replicas"])

    def pods(self, group: str) -> set[str]:
        self._check()
        return self._pods_of(group)

    def _check(self) -> None:
        if self._running is not None and self._running.done():
            self._running.result()

    def _pods_of(self, group: str) -> set[str]:
        return {name for name, (its_group, _, _) in list(self._nodes.items()) if its_group == group}

    def __enter__(self) -> KubeRay:
        self._running = self._thread.submit(self._run)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.shutdown()
        self._check()

    def _run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            for group in self._groups():
                self._reconcile(group)

    def _reconcile(self, group: Object) -> None:
        name = group["groupName"]
        for pod in self._pods_of(name).intersection(group.get("scaleStrategy", {}).get("workersToDelete", ())):
            self._nodes.pop(pod)[2].kill(and_nodes=True)
            self._api.answer("DELETE", f"{_PODS}/{pod}", {}, b"")
        wanted = min(max(group["replicas"], group["minReplicas"]), group["maxReplicas"])
        for _ in range(wanted - len(self._pods_of(name))):
            number = next(self._numbers)
            address = f"127.0.0.{number}"
            pod = f"{self._name}-{name}-worker-{number}"
            self._nodes[pod] = (name, address, node := self._start(group, address))
            self._say(pod, name, "worker", address, runs=False)
            self._wait(node)
        for pod in self._pods_of(name):
            _, address, node = self._nodes[pod]
            if node.ended:  # the pod's own script does that
                self._nodes[pod] = (name, address, node := self._start(group, address))
                self._wait(node)
            self._say(pod, name, "worker", address, runs=node.started)

    def _wait(self, node: RayNode) -> None:
        """Ray nodes of one machine that start at the same moment take the same socket; those of pods have directories of their own."""
        while not (node.started or node.ended or self._over.is_set()):
            time.sleep(LOOK_EVERY_S)

    def _start(self, group: Object, address: str) -> RayNode:
        given = group["rayStartParams"]
        resources = f"--resources={given['resources'].strip(chr(39))}"
        return self._machines.add(int(given["num-cpus"]), resources, f"--node-ip-address={address}")

    def _say(self, pod: str, group: str, kind: str, address: str, runs: bool) -> None:
        """Puts the pod into the API as it is now."""
        state: dict[str, Any] = {"running": {}} if runs else {"waiting": {"reason": "ContainerCreating"}}
        status = {"name": "ray", "image": "ray", "imageID": "", "ready": runs, "restartCount": 0, "state": state}
        labels = {"ray.io/cluster": self._name, "ray.io/group": group, "ray.io/node-type": kind}
        found = {
            "metadata": {"name": pod, "labels": labels},
            "spec": {"containers": [{"name": "ray", "image": "ray"}]},
            "status": {"podIP": address, "containerStatuses": [status]},
        }
        self._api.answer("PUT", f"{_PODS}/{pod}", {}, json.dumps(found).encode())

    def _groups(self) -> list[Object]:
        return list(self._api.answer("GET", f"{self._path}/{self._name}", {}, b"")["spec"]["workerGroupSpecs"])


class Autoscaler:
    """Ray's own, as KubeRay starts it beside Ray's head. It speaks with the API by TLS alone."""

    def __init__(self, api: KubernetesApi, cluster: str, address: str, files: dict[str, Path], log: Path) -> None:
        """`files`: `certificate` and `key`, which it shows, and `authority`, which it believes."""
        ray = Path(sys.executable).with_name("ray")
        command = [str(ray), "kuberay-autoscaler", "--cluster-name", cluster, "--cluster-namespace", NAMESPACE, "--gcs-address", address]
        environment = {
            **own_environment(proxies=False),
            **ENVIRONMENT,
            "PATH": f"{ray.parent}{os.pathsep}{os.environ['PATH']}",
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT_HTTPS": str(api.port),
            "RAY_KUBERAY_CLIENT_CERT_PATH": str(files["certificate"]),
            "RAY_KUBERAY_CLIENT_KEY_PATH": str(files["key"]),
            "RAY_KUBERAY_CA_CERT_PATH": str(files["authority"]),
        }
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def __enter__(self) -> Autoscaler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()
