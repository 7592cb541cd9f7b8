"""What KubeRay makes of a RayCluster, as much of it as our pods see: the Service of Ray's head, the Secret that is Ray's token, and pods
whose Ray container is told how Ray is started, after a container that waits for the head, and Ray's autoscaler beside the head."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from tests.support.chart import NAMESPACE, Object, Pods, pods
from tests.support.chart_pods import API_NAME

RAY_PORT = 6379
AUTOSCALER = f"until ray kuberay-autoscaler --cluster-name {{cluster}} --cluster-namespace {NAMESPACE}; do sleep 1; done"
"""It ends when it looks before all of Ray is there, and is started again."""


def made_by_kuberay(objects: Sequence[Object], api_port: int = 443) -> list[Object]:
    """The objects, with that in the place of a RayCluster. `api_port`: of the Kubernetes API."""
    return [made for found in objects for made in (_made(found, api_port) if found["kind"] == "RayCluster" else [found])]


def _made(cluster: Object, api_port: int) -> Iterator[Object]:
    name = cluster["metadata"]["name"]
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    token = base64.b64encode(secrets.token_hex(16).encode()).decode()
    yield {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": {"auth_token": token}}
    head, *workers = pods([cluster])
    ports = [{"name": port, "port": number} for port, number in head.ports().items()]
    service = {"selector": head.labels, "ports": ports, "clusterIP": "None"}
    yield {"apiVersion": "v1", "kind": "Service", "metadata": {"name": f"{name}-head-svc"}, "spec": service}
    made = _pod(name, head, "")
    if cluster["spec"].get("enableInTreeAutoscaling"):
        _have_scaled(made, cluster["spec"]["autoscalerOptions"], name, api_port)
    yield made
    for each in workers:
        yield _pod(name, each, f"{name}-head-svc.{NAMESPACE}.svc.cluster.local:{RAY_PORT}")


def _token(cluster: str) -> list[Object]:
    token = {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": {"name": cluster, "key": "auth_token"}}}
    return [{"name": "RAY_AUTH_MODE", "value": "token"}, token]


def _pod(cluster: str, each: Pods, head: str) -> Object:
    assert each.group is not None
    ray, *others = each.spec["containers"]
    own = [*_token(cluster), {"name": "RAY_ADDRESS", "value": head or f"127.0.0.1:{RAY_PORT}"}]
    told = {"name": "KUBERAY_GEN_RAY_START_CMD", "value": start_command(each.group["rayStartParams"], ray["resources"]["limits"], head)}
    waits = {
        **{name: ray[name] for name in ("image", "volumeMounts", "securityContext")},
        "name": "wait-gcs-ready",
        "command": ["/bin/bash", "-c", f"until ray health-check --address {head}; do sleep 5; done"],
        "env": [*ray["env"], *own],
    }
    spec = {
        **each.spec,
        "initContainers": [*each.spec["initContainers"], *([waits] if head else [])],
        "containers": [{**ray, "env": [*ray["env"], *own, told]}, *others],
    }
    metadata = {**each.template["metadata"], "name": f"{cluster}-{each.component()}"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _have_scaled(head: Object, options: Object, cluster: str, api_port: int) -> None:
    assert options["version"] == "v1"
    spec, logs = head["spec"], {"name": "ray-logs", "mountPath": "/tmp/ray"}
    (ray,) = spec["containers"]
    autoscaler = {
        "name": "autoscaler",
        "image": ray["image"],
        "command": ["/bin/bash", "-c", "--", AUTOSCALER.format(cluster=cluster)],
        "env": [
            {"name": "KUBERAY_CRD_VER", "value": "v1"},
            {"name": "KUBERNETES_SERVICE_HOST", "value": API_NAME},
            {"name": "KUBERNETES_SERVICE_PORT_HTTPS", "value": str(api_port)},
            *_token(cluster),
            *options["env"],
        ],
        "resources": options["resources"],
        "securityContext": options["securityContext"],
        "volumeMounts": [*options["volumeMounts"], logs],
    }
    command = {**ray["env"][-1], "value": f"{ray['env'][-1]['value']} --no-monitor"}
    second = {"name": "RAY_enable_autoscaler_v2", "value": "false"}
    spec["containers"] = [{**ray, "env": [*ray["env"][:-1], second, command], "volumeMounts": [*ray["volumeMounts"], logs]}, autoscaler]
    spec["volumes"] = [*spec["volumes"], {"name": "ray-logs", "emptyDir": {}}]


def start_command(given: dict[str, str], limits: dict[str, Any], head: str) -> str:
    """`head`: where Ray's is; empty: it is to be here."""
    parameters = {"metrics-export-port": "8080", "dashboard-agent-listen-port": "52365", **given, "block": "true"}
    parameters |= {"address": head} if head else {"dashboard-host": "0.0.0.0"}
    parameters.setdefault("memory", str(_bytes(limits["memory"])))
    flags = []
    for name, value in sorted(parameters.items()):
        if value in ("true", "false") and name not in ("log-color", "include-dashboard", "include-log-monitor"):
            flags += [f" --{name} "] if value == "true" else []
        else:
            flags.append(f" --{name}={value} ")
    return f"ray start {'' if head else '--head '}{''.join(flags)}"


def _bytes(quantity: str) -> int:
    units = {"Mi": 1 << 20, "Gi": 1 << 30}
    return int(quantity[:-2]) * units[quantity[-2:]]


def as_taken(cluster: Object) -> Object:
    """A RayCluster, as the Kubernetes API has it."""
    groups = [{"replicas": 0, **group} for group in cluster["spec"]["workerGroupSpecs"]]
    return {**cluster, "spec": {**cluster["spec"], "workerGroupSpecs": groups}}


def as_seen(cluster: str, component: str, name: str, address: str) -> Object:
    """A pod of a RayCluster that runs, as its autoscaler sees it."""
    kind, group = ("head", "headgroup") if component == "head" else ("worker", component)
    labels = {"ray.io/cluster": cluster, "ray.io/node-type": kind, "ray.io/group": group}
    status = {"podIP": address, "containerStatuses": [{"state": {"running": {}}}]}
    metadata = {"name": name, "namespace": NAMESPACE, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}
