"""What KubeRay makes of a RayCluster, as much of it as our pods see: the Service of Ray's head, the Secret that is Ray's token, and pods
whose Ray container is told how Ray is started, after a container that waits for the head."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from tests.support.chart import NAMESPACE, Object, Pods, pods
from tests.support.chart_environment import quantity

RAY_PORT = 6379


def made_by_kuberay(objects: Sequence[Object]) -> list[Object]:
    """The objects, with that in the place of a RayCluster, which is not to be scaled."""
    return [made for found in objects for made in (_made(found) if found["kind"] == "RayCluster" else [found])]


def _made(cluster: Object) -> Iterator[Object]:
    name = cluster["metadata"]["name"]
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    assert "enableInTreeAutoscaling" not in cluster["spec"]
    token = base64.b64encode(secrets.token_hex(16).encode()).decode()
    yield {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": {"auth_token": token}}
    head, *workers = pods([cluster])
    ports = [{"name": port, "port": number} for port, number in head.ports().items()]
    service = {"selector": head.labels, "ports": ports, "clusterIP": "None"}
    yield {"apiVersion": "v1", "kind": "Service", "metadata": {"name": f"{name}-head-svc"}, "spec": service}
    yield _pod(name, head, "")
    for each in workers:
        yield _pod(name, each, f"{name}-head-svc.{NAMESPACE}.svc.cluster.local:{RAY_PORT}")


def _pod(cluster: str, each: Pods, head: str) -> Object:
    assert each.group is not None
    (ray,) = each.spec["containers"]
    token = {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": {"name": cluster, "key": "auth_token"}}}
    own = [{"name": "RAY_AUTH_MODE", "value": "token"}, token, {"name": "RAY_ADDRESS", "value": head or f"127.0.0.1:{RAY_PORT}"}]
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
        "containers": [{**ray, "env": [*ray["env"], *own, told]}],
    }
    metadata = {**each.template["metadata"], "name": f"{cluster}-{each.component()}"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def start_command(given: dict[str, str], limits: dict[str, Any], head: str) -> str:
    """`head`: where Ray's is; empty: it is to be here."""
    parameters = {"metrics-export-port": "8080", "dashboard-agent-listen-port": "52365", **given, "block": "true"}
    parameters |= {"address": head} if head else {"dashboard-host": "0.0.0.0"}
    parameters.setdefault("memory", str(int(quantity(limits["memory"]))))
    flags = []
    for name, value in sorted(parameters.items()):
        if value in ("true", "false") and name not in ("log-color", "include-dashboard", "include-log-monitor"):
            flags += [f" --{name} "] if value == "true" else []
        else:
            flags.append(f" --{name}={value} ")
    return f"ray start {'' if head else '--head '}{''.join(flags)}"
