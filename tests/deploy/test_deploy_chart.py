"""The Helm chart: what it renders is what Kubernetes takes, hangs together, and keeps to rules that no schema knows."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.ca.authority import Authority
from deploy.local.plan import SPINS
from deploy.ray.resources import Pool, bundle, fits, least_nodes, pool_config
from springtide.config import ClusterConfig
from tests.support.chart import (
    CHART,
    NAMESPACE,
    RELEASE,
    REPOSITORY,
    Object,
    Pods,
    custom_resource_problems,
    kubernetes_problems,
    name_of,
    of_kind,
    pods,
    ray_cluster_problems,
    rendered,
    selected,
)
from tests.support.chart_schema import schema_of_config
from tests.support.chart_tools import HELM, TOOLS, helm
from tests.support.label_bounds import metrics_by_sample

KUBERNETES = tuple(f"1.{minor}" for minor in range(30, 37))
KUBERAY = Path(os.environ.get("KUBERAY_CRDS", REPOSITORY.parent / "shared/crds"))
"""Where KubeRay's definitions are, if they are here: helm-chart/kuberay-operator/crds of its repository."""
CUSTOM = ("gateway.networking.k8s.io/", "keda.sh/", "monitoring.coreos.com/", "ray.io/")
MONITORED = {"monitoring": {"podMonitor": {"enabled": True}}}
WATCHED = {"monitoring": {"podMonitor": {"enabled": True}, "rules": {"enabled": True}, "dashboards": {"enabled": True}}}
SCALED = {"autoscaling": {"enabled": True, "latencySeconds": 2.5}}
ON_QUEUE = {"autoscaling": {"enabled": True, "latencySeconds": 2.5, "queuedTokens": 16384}}
MATRIX: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "cuda": {
        "image": {"repository": "registry.example/springtide", "digest": "sha256:" + "0" * 64, "pullSecrets": [{"name": "registry"}]},
        "config": {"kv": {"arena_size": "64GiB"}, "device": "cuda"},
        "model": {
            "path": "/models/kimi",
            "servedName": "kimi",
            "volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
        },
        "prefill": {
            "replicas": 3,
            "gpu": {"count": 4},
            "rdma": {"enabled": True, "resource": "rdma/hca", "count": 2},
            "hugepages": {"size": "2Mi", "amount": "65538Mi"},
            "runtimeClassName": "nvidia",
        },
        "decode": {"replicas": 6, "gpu": {"count": 1}, "tolerations": [{"operator": "Exists"}], "nodeSelector": {"gpu": "yes"}},
    },
    "ssd": {
        "prefill": {"kind": "StatefulSet", "ssd": {"enabled": True, "size": "1Ti", "storageClass": "local"}},
        "decode": {"ssd": {"enabled": True}},
    },
    "keda": {**MONITORED, "prefill": ON_QUEUE, "decode": {**SCALED, "kind": "StatefulSet"}, "gateway": {"autoscaling": {"enabled": True}}},
    "hpa": {**MONITORED, "autoscaling": {"kind": "hpa"}, "prefill": ON_QUEUE, "decode": SCALED},
    "instances": {
        **MONITORED,
        "instance": {"replicas": 4, "gpu": {"count": 1}, "kind": "StatefulSet", "ssd": {"enabled": True}, "threads": 3},
    },
    "instances beside others": {
        **MONITORED,
        "instance": ON_QUEUE,
        "prefill": {"replicas": 2, "kind": "StatefulSet"},
        "decode": {"autoscaling": {"enabled": True}},
    },
    "tls": {
        **WATCHED,
        "gateway": {
            "tls": {"existingSecret": "certificate"},
            "service": {"type": "LoadBalancer", "httpPort": 443, "annotations": {"a.example/b": "c"}},
            "route": {
                "enabled": True,
                "grpc": True,
                "parentRefs": [{"name": "public", "namespace": "gateways"}],
                "hostnames": ["llm.example"],
            },
        },
    },
    "client certificates": {"gateway": {"tls": {"existingSecret": "certificate", "clientCa": True}}, "test": {"existingSecret": "client"}},
    "download": {
        "model": {
            "path": "/models/small",
            "download": {
                "enabled": True,
                "image": "registry.example/fetch:1",
                "args": ["--to", "/models/small"],
                "envFromSecrets": ["hub"],
            },
        },
        "gateway": {"files": {"persistentVolumeClaim": {"claimName": "files"}}},
    },
    "little": {
        **MONITORED,
        "secret": {"existingSecret": "ours"},
        "tls": {"enabled": False},
        "serviceAccount": {"create": False},
        "valkey": {"persistence": {"enabled": False}},
        "gateway": {"replicas": 1, "pdb": {"enabled": False}},
        "networkPolicy": {"enabled": False},
        "test": {"enabled": False},
        "podLabels": {"team": "ml"},
        "podAnnotations": {"team.example/on-call": "yes"},
        "priorityClassName": "high",
    },
    "closed": {
        "tls": {"existingAuthority": "company", "renewSeconds": 3600},
        "monitoring": {"podMonitor": {"enabled": True, "existingCertificate": "prometheus"}},
        "conductor": {"replicas": 2},
        "valkey": {
            "enabled": False,
            "url": "rediss+sentinel://:word@valkey.example:26379/main/0?ssl_ca_certs=/etc/springtide/valkey/ca.crt",
            "certificates": "of-valkey",
        },
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}}],
            "monitoring": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
        },
    },
    "ray": {"mode": "ray"},
    "ray, scaled": {
        **WATCHED,
        "mode": "ray",
        "config": {"kv": {"arena_size": "1GiB"}, "ray": {"scale_load": 0.5}},
        "prefill": {"autoscaling": {"enabled": True, "minReplicas": 2, "maxReplicas": 5}, "pdb": {"maxUnavailable": 0}},
        "decode": {"replicas": 3, "ssd": {"enabled": True, "size": "1Ti"}},
        "gateway": {"tls": {"existingSecret": "certificate", "clientCa": True}, "autoscaling": {"enabled": True}},
        "valkey": {
            "enabled": False,
            "url": "rediss://valkey.example?ssl_ca_certs=/etc/springtide/valkey/ca.crt",
            "certificates": "of-valkey",
        },
        "ray": {"head": {"nodeSelector": {"pool": "system"}, "extraEnv": [{"name": "RAY_BACKEND_LOG_LEVEL", "value": "warning"}]}},
    },
    "ray, instances": {
        "mode": "ray",
        "instance": {"autoscaling": {"enabled": True, "minReplicas": 2}, "gpu": {"count": 1}},
        "prefill": {"replicas": 1, "gpu": {"count": 2}},
    },
    "ray, cuda": {
        "mode": "ray",
        "image": {"variant": "cuda"},
        "config": {"prefill_node": {"stages": 4}, "device": "cuda"},
        "model": {"path": "/models/kimi", "volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}},
        "prefill": {
            "gpu": {"count": 4},
            "rdma": {"enabled": True, "resource": "rdma/hca", "count": 2},
            "hugepages": {"size": "2Mi", "amount": "1026Mi"},
            "runtimeClassName": "nvidia",
        },
        "decode": {"gpu": {"count": 1}, "autoscaling": {"enabled": True}},
    },
}
POOLS = ("instance", "prefill", "decode")
RAY = ("ray", "ray, scaled", "ray, instances", "ray, cuda")
FROM_OUTSIDE = {"ours", "company", "of-valkey", "prometheus", "certificate", "client", "hub", "models", "files", "registry", "default"}
"""What values name, and the chart does not make."""


@pytest.fixture(scope="module", params=MATRIX.values(), ids=MATRIX)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return rendered(request.param)


def all_objects() -> Iterator[Object]:
    for values in MATRIX.values():
        yield from rendered(values)


@pytest.mark.parametrize("version", HELM)
@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_helm_finds_nothing_to_complain_about(values: dict[str, Any], version: int) -> None:
    command = [helm(version), "lint", "--strict", CHART, "--values", "-"]
    ended = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_helm_3_and_helm_4_render_the_same(values: dict[str, Any]) -> None:
    drawn = re.compile(r"(cluster-secret|valkey-password|valkey-url|authority.pem|tls.crt|tls.key|ca.crt): \S+")
    one, other = (drawn.sub("", yaml.dump(rendered(values, version))) for version in HELM)
    assert one == other


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_knows_every_kind_and_every_field(version: str) -> None:
    found_in = list(all_objects())
    known = [found for found in found_in if not found["apiVersion"].startswith(CUSTOM)] + [as_a_pod(each) for each in of_ray(found_in)]
    unique = {json.dumps(found, sort_keys=True): found for found in known}
    assert {name_of(found): problems for found in unique.values() if (problems := kubernetes_problems(version, found))} == {}
    deployment = next(found for found in unique.values() if found["kind"] == "Deployment")
    assert kubernetes_problems(version, {**deployment, "colour": "blue"})


def of_ray(objects: list[Object]) -> list[Pods]:
    return [each for each in pods(objects) if each.group is not None]


def as_a_pod(each: Pods) -> Object:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": each.component(), **each.template["metadata"]}, "spec": each.spec}


@pytest.mark.skipif(not KUBERAY.is_dir(), reason="wants KubeRay's definitions: KUBERAY_CRDS=DIRECTORY")
def test_ray_clusters_are_as_kuberay_has_them() -> None:
    found = [each for each in all_objects() if each["kind"] == "RayCluster"]
    assert len(found) == len(RAY)
    assert [problem for each in found for problem in ray_cluster_problems(KUBERAY, each)] == []
    pod = found[0]["spec"]["headGroupSpec"]["template"]["spec"]
    for spec in (
        {**found[0]["spec"], "colour": "blue"},
        {**found[0]["spec"], "headGroupSpec": {"template": {"spec": {**pod, "colour": 1}}}},
    ):
        assert ray_cluster_problems(KUBERAY, {**found[0], "spec": spec})


@pytest.mark.skipif(not (TOOLS / "node_modules").is_dir() or shutil.which("node") is None, reason="wants node and npm")
def test_custom_resources_are_as_their_owners_have_them() -> None:
    unique = {json.dumps(found, sort_keys=True): found for found in all_objects() if found["apiVersion"].startswith(CUSTOM[:3])}
    found = list(unique.values())
    assert {each["kind"] for each in found} == {"PodMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute", "GRPCRoute"}
    problems = dict(zip(map(name_of, found), custom_resource_problems(found), strict=True))
    assert {name: problem for name, problem in problems.items() if problem} == {}
    wrong = {**found[0], "spec": {**found[0]["spec"], "colour": "blue"}}
    assert None not in custom_resource_problems([wrong, {**found[0], "kind": "Unheard"}])


def settings(objects: list[Object], name: str = "config.yaml") -> str:
    (text,) = [found["data"][name] for found in of_kind(objects, "ConfigMap") if name in found["data"]]
    return str(text)


def test_the_settings_are_those_of_a_cluster(objects: list[Object]) -> None:
    for name in ("config.yaml", "head.yaml") if of_ray(objects) else ("config.yaml",):
        ClusterConfig.model_validate(yaml.safe_load(settings(objects, name)))


def test_pods_are_within_bounds_and_without_privileges(objects: list[Object]) -> None:
    for each in pods(objects):
        security = each.spec["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] > 0 and security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert each.spec["automountServiceAccountToken"] is False
        for container in each.all_containers:
            resources = container["resources"]
            assert {"cpu", "memory"} <= resources["requests"].keys() and "memory" in resources["limits"], (each.name, container["name"])
            assert re.search(r":[\w.-]+$|@sha256:[0-9a-f]{64}$", container["image"]) and not container["image"].endswith(":latest")
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            }


def test_devices_are_requested_and_limited_alike_by_whoever_uses_them() -> None:
    by_component = {each.component(): each for each in pods(rendered(MATRIX["cuda"]))}
    store, engine = (by_component["prefill"].containers[name]["resources"] for name in ("store", "prefill"))
    for resources, devices in ((engine, {"nvidia.com/gpu": 4}), (store, {"rdma/hca": 2, "hugepages-2Mi": "65538Mi"})):
        assert devices.items() <= resources["requests"].items() and devices.items() <= resources["limits"].items()
    assert "rdma/hca" not in by_component["decode"].containers["store"]["resources"]["limits"]


@pytest.mark.parametrize(("case", "container"), [("cuda", "configuration"), ("ray, cuda", "ray")])
def test_arenas_are_of_the_huge_pages_that_are_requested(case: str, container: str) -> None:
    by_component = {each.component(): each for each in pods(rendered(MATRIX[case]))}
    for component, size in (("prefill", ["2MiB"]), ("decode", [])):
        (found,) = [each for each in by_component[component].all_containers if each["name"] == container]
        assert [each["value"] for each in found["env"] if each["name"] == "SPRINGTIDE_KV__HUGEPAGES"] == size


def test_whoever_serves_is_probed_where_it_listens(objects: list[Object]) -> None:
    for each in pods(objects):
        if each.workload["kind"] == "Pod":
            continue
        for container in each.containers.values():
            assert "readinessProbe" in container or "ports" not in container, (each.name, container["name"])
            named = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            for probe in (container[kind] for kind in ("startupProbe", "readinessProbe", "livenessProbe") if kind in container):
                if "grpc" in probe:
                    assert probe["grpc"]["port"] in named.values()
                elif "exec" not in probe:
                    assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in named
            assert "startupProbe" in container, (each.name, container["name"])
            assert "livenessProbe" in container or "ports" not in container, (each.name, container["name"])


def drain_seconds(each: Pods) -> int:
    """What the processes of the pod are told."""
    variables = (variable for container in each.preparing for variable in container["env"])
    return next((int(variable["value"]) for variable in variables if variable["name"] == "SPRINGTIDE_DRAIN_S"), 0)


def test_pods_have_longer_than_they_take_to_drain(objects: list[Object]) -> None:
    for each in pods(objects):
        if each.workload["kind"] == "Pod":
            continue
        waits = [
            container["lifecycle"]["preStop"]["sleep"]["seconds"] for container in each.containers.values() if "lifecycle" in container
        ]
        assert each.spec["terminationGracePeriodSeconds"] > max(waits, default=0) + drain_seconds(each) + 10
        assert (drain_seconds(each) > 0) == (each.component() in ("gateway", *POOLS))


def test_a_store_is_there_before_its_engine_and_goes_after_it(objects: list[Object]) -> None:
    for each in pods(objects):
        if each.component() in POOLS and each.group is None:
            assert [container["name"] for container in each.sidecars][-1] == "store"
            assert [container["name"] for container in each.spec["containers"]] == [each.component()]


def test_pods_are_replaced_when_their_settings_are_others() -> None:
    before, after = (
        {each.name: each.template for each in pods(rendered({"config": {"kv": {"arena_size": size}}})) if each.workload["kind"] != "Pod"}
        for size in ("1GiB", "2GiB")
    )
    assert {name for name in before if before[name] == after[name]} == {f"StatefulSet/{RELEASE}-springtide-valkey"}


def test_a_gateway_is_replaced_by_one_that_serves(objects: list[Object]) -> None:
    for found in of_kind(objects, "Deployment"):
        rolling = found["spec"]["strategy"]["rollingUpdate"]
        assert rolling["maxSurge"] and rolling["maxUnavailable"] == 0


def test_selectors_find_their_pods_and_no_others(objects: list[Object]) -> None:
    for found in of_kind(objects, "Deployment", "StatefulSet"):
        (each,) = selected(found["spec"]["selector"]["matchLabels"], objects)
        assert each.name == name_of(found)
    for found in of_kind(objects, "PodDisruptionBudget"):
        assert len(selected(found["spec"]["selector"]["matchLabels"], objects)) == 1
    for found in of_kind(objects, "Service"):
        (each,) = selected(found["spec"]["selector"], objects)
        assert all(port["targetPort"] in each.ports() for port in found["spec"].get("ports", [])), name_of(found)
    for each in pods(objects):
        for spread in each.spec["topologySpreadConstraints"]:
            assert selected(spread["labelSelector"]["matchLabels"], objects) == [each]


def test_network_policies_let_in_whom_ports_are_for(objects: list[Object]) -> None:
    policies = of_kind(objects, "NetworkPolicy")
    for found in policies:
        its = selected(found["spec"]["podSelector"]["matchLabels"], objects)
        assert its
        for rule in found["spec"].get("ingress", []):
            known = {port for each in its for named in each.ports().items() for port in named} | {53}
            assert all(port["port"] in known for port in rule.get("ports", [])), name_of(found)
    if policies:
        everybody = next(found for found in policies if "app.kubernetes.io/component" not in found["spec"]["podSelector"]["matchLabels"])
        assert len(selected(everybody["spec"]["podSelector"]["matchLabels"], objects)) == len(list(pods(objects)))
        assert everybody["spec"]["policyTypes"] == ["Ingress", "Egress"]


def test_what_pods_mount_is_there(objects: list[Object]) -> None:
    made = {(found["kind"], found["metadata"]["name"]): found for found in objects}
    for each in pods(objects):
        beside = each.workload["spec"].get("autoscalerOptions", {}) if each.component() == "head" else {}
        mounted = {mount["name"] for container in (*each.all_containers, beside) for mount in container.get("volumeMounts", [])}
        assert mounted == set(each.volumes), each.name
        for volume in each.volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in made
            if "secret" in volume:
                name = volume["secret"]["secretName"]
                assert ("Secret", name) in made or name in FROM_OUTSIDE
        for variable in (variable for container in each.all_containers for variable in container.get("env", [])):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                reference = variable["valueFrom"]["secretKeyRef"]
                secret = made.get(("Secret", reference["name"]))
                assert reference["name"] in FROM_OUTSIDE if secret is None else reference["key"] in secret["data"]
        account = each.spec["serviceAccountName"]
        assert ("ServiceAccount", account) in made or account in FROM_OUTSIDE


def test_the_pools_with_an_ssd_and_no_others_are_told_where_it_is() -> None:
    objects = rendered({"prefill": {"ssd": {"enabled": True}}})
    assert "ssd_dir" not in settings(objects)
    told = {
        each.component(): variable["value"]
        for each in pods(objects)
        for container in each.all_containers
        for variable in container.get("env", [])
        if variable["name"] == "SPRINGTIDE_KV__SSD_DIR"
    }
    mounted = {each.component() for each in pods(objects) if "ssd" in each.volumes}
    assert told == {"prefill": "/ssd"} and mounted == {"prefill"}


def test_paths_of_the_commands_are_mounted(objects: list[Object]) -> None:
    for each in pods(objects):
        for container in each.containers.values():
            mounts = tuple(mount["mountPath"] for mount in container.get("volumeMounts", []))
            for word in container["command"]:
                assert not word.startswith("/") or word.startswith(mounts), (each.name, word)


def test_nobody_but_who_makes_certificates_sees_the_key_that_signs(objects: list[Object]) -> None:
    for each in pods(objects):
        seen = {
            container["name"] for container in each.all_containers for mount in container["volumeMounts"] if mount["name"] == "authority"
        }
        assert seen == ({"certificates"} if "authority" in each.volumes else set())
        assert each.component() == "test" or "authority" in each.volumes or "plaintext_allowed: true" in settings(objects)


def test_what_is_scaled_is_there_and_has_no_number_of_its_own(objects: list[Object]) -> None:
    workloads = {name_of(found): found for found in of_kind(objects, "Deployment", "StatefulSet")}
    scaled = set()
    for found in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        target = found["spec"]["scaleTargetRef"]
        scaled.add(f"{target['kind']}/{target['name']}")
    assert scaled <= workloads.keys()
    assert {name for name, found in workloads.items() if "replicas" not in found["spec"]} == scaled


def of_prometheus(name: str) -> bool:
    return name in ("namespace", "job", "pod", "le")


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ({}, {"prefill": 1, "decode": 1}),
        ({"instance": {"replicas": 3}}, {"instance": 3}),
        ({"instance": {"replicas": 3}, "prefill": {"replicas": 2}}, {"instance": 3, "prefill": 2}),
        ({"instance": SCALED}, {"instance": None}),
        ({"instance": {"replicas": 1}, "decode": SCALED}, {"instance": 1, "decode": None}),
        ({"prefill": {"replicas": 4}}, {"prefill": 4, "decode": 1}),
    ],
)
def test_beside_instances_there_are_no_pods_of_one_role_unless_they_are_asked_for(
    values: dict[str, Any], counts: dict[str, int | None]
) -> None:
    deployments = {found["metadata"]["labels"]["app.kubernetes.io/component"]: found for found in of_kind(rendered(values), "Deployment")}
    assert {name: found["spec"].get("replicas") for name, found in deployments.items() if name != "gateway"} == counts
    for name in counts:
        (each,) = pods([deployments[name]])
        assert ("--prefills" in each.containers[name]["command"]) == (name == "instance")


def test_instances_follow_the_larger_load_of_both_roles_and_no_ratio() -> None:
    by_pool = {
        found["metadata"]["labels"]["app.kubernetes.io/component"]: {trigger["name"] for trigger in found["spec"]["triggers"]}
        for found in of_kind(rendered(MATRIX["instances beside others"]), "ScaledObject")
    }
    assert by_pool == {"instance": {"load", "queue", "kv", "latency"}, "decode": {"load", "kv"}}


def test_each_pool_has_its_threads() -> None:
    objects = rendered({"instance": {"replicas": 1, "threads": 3}, "prefill": {"replicas": 1, "threads": 5}})
    told = {
        each.component(): {variable["value"] for variable in preparing["env"] if variable["name"].endswith("_NODE__THREADS")}
        for each in pods(objects)
        for preparing in each.preparing
        if each.component() in POOLS
    }
    assert told == {"instance": {"3"}, "prefill": {"5"}}
    engines = [
        {variable["name"]: variable.get("value") for variable in container["env"]}
        for each in pods(objects)
        for container in each.spec["containers"]
        if each.component() in POOLS and container["name"] == each.component()
    ]
    assert {(one["OMP_NUM_THREADS"], one["GOMP_SPINCOUNT"]) for one in engines} == {("3", SPINS), ("5", SPINS)}


def test_pools_are_scaled_by_metrics_that_there_are() -> None:
    known = {sample: set(metric.labels) for sample, metric in metrics_by_sample().items()}
    objects = list(all_objects())
    triggers = [trigger for found in of_kind(objects, "ScaledObject") for trigger in found["spec"]["triggers"]]
    queries = {trigger["metadata"]["query"] for trigger in triggers}
    assert len(queries) == 10 and {trigger["name"] for trigger in triggers} == {"load", "ratio", "queue", "kv", "latency"}
    assert {trigger["metadata"]["ignoreNullValues"] for trigger in triggers} == {"false"}, "of what is not known 0 is not the load"
    for query in queries:
        for name, labels in re.findall(r"(springtide_\w+)\{([^}]*)\}", query):
            asked = set(re.findall(r'(\w+)=~?"', labels))
            assert {label for label in asked if not of_prometheus(label)} <= known[name], query
            assert {"namespace", "job"} <= asked, query
        assert set(re.findall(r"springtide_\w+", query)) <= known.keys(), query
    (monitor,) = {json.dumps(found["metadata"]["name"]) for found in of_kind(objects, "PodMonitor")}
    assert all(f'job="{NAMESPACE}/{json.loads(monitor)}"' in query for query in queries)


def test_horizontal_pod_autoscalers_go_by_what_keda_goes_by() -> None:
    keda, hpa, queries = dict[str, tuple[str, str]](), dict[str, tuple[str, str]](), []
    values = {**{name: MATRIX["keda"][name] for name in ("prefill", "decode")}, "instance": ON_QUEUE}
    for found in of_kind(rendered(values), "ScaledObject"):
        for trigger in found["spec"]["triggers"]:
            name = f"springtide_{found['metadata']['labels']['app.kubernetes.io/component']}_{trigger['name']}"
            keda[name] = trigger["metricType"], trigger["metadata"]["threshold"]
            queries.append(trigger["metadata"]["query"])
    values["autoscaling"] = {"kind": "hpa"}
    for found in of_kind(rendered(values), "HorizontalPodAutoscaler"):
        for metric in (metric["external"] for metric in found["spec"]["metrics"]):
            assert metric["metric"]["selector"] == {"matchLabels": {"namespace": NAMESPACE, "release": RELEASE}}
            (amount,) = (value for name, value in metric["target"].items() if name != "type")
            hpa[metric["metric"]["name"]] = metric["target"]["type"], amount
    assert hpa == keda
    command = [helm(4), "template", RELEASE, CHART, "--namespace", NAMESPACE, "--values", "-"]
    ended = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=True)
    assert re.findall(r"# By prometheus-adapter: (.*)", ended.stdout) == queries


def test_prometheus_finds_the_metrics_of_every_process(objects: list[Object]) -> None:
    for found in of_kind(objects, "PodMonitor"):
        scraped = {endpoint["port"] for endpoint in found["spec"]["podMetricsEndpoints"]}
        for each in selected(found["spec"]["selector"]["matchLabels"], objects):
            for container in each.containers.values():
                if "--metrics-port" in container["command"]:
                    port = int(container["command"][container["command"].index("--metrics-port") + 1])
                    assert next(named["name"] for named in container["ports"] if named["containerPort"] == port) in scraped
            assert scraped & each.ports().keys() or each.component() in ("valkey", "test")
        secure = {endpoint["scheme"] for endpoint in found["spec"]["podMetricsEndpoints"]} == {"https"}
        assert secure == ("plaintext_allowed" not in settings(objects))
        for endpoint in found["spec"]["podMetricsEndpoints"] if secure else []:
            tls = endpoint["tlsConfig"]
            for reference in (tls["ca"]["secret"], tls["cert"]["secret"], tls["keySecret"]):
                secrets = [made for made in of_kind(objects, "Secret") if made["metadata"]["name"] == reference["name"]]
                assert all(reference["key"] in made["data"] for made in secrets) if secrets else reference["name"] in FROM_OUTSIDE


def test_the_certificate_of_prometheus_is_of_the_authority_that_signs_for_the_pods(tmp_path: Path) -> None:
    made = {found["metadata"]["name"]: found["data"] for found in of_kind(rendered(MATRIX["keda"]), "Secret")}
    name = f"{RELEASE}-springtide"
    (tmp_path / "authority.pem").write_bytes(base64.b64decode(made[f"{name}-authority"]["authority.pem"]))
    authority, own = Authority.open(tmp_path), {key: base64.b64decode(text) for key, text in made[f"{name}-prometheus"].items()}
    assert own["ca.crt"] == authority.bundle
    assert authority.vouches_for(own["tls.crt"]) is not None
    for key, content in own.items():
        (tmp_path / key).write_bytes(content)
    ssl.create_default_context(cafile=tmp_path / "ca.crt").load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")


def test_routes_lead_to_the_service() -> None:
    objects = rendered(MATRIX["tls"])
    ports = {found["metadata"]["name"]: {port["port"] for port in found["spec"].get("ports", [])} for found in of_kind(objects, "Service")}
    for found in of_kind(objects, "HTTPRoute", "GRPCRoute"):
        for backend in (backend for rule in found["spec"]["rules"] for backend in rule["backendRefs"]):
            assert backend["port"] in ports[backend["name"]]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prefil": {}}, "prefil"),
        ({"prefill": {"kind": "DaemonSet"}}, "kind"),
        ({"prefill": {"hugepages": {"size": "2Mi"}}}, "amount"),
        ({"config": {"kv": {"hugepages": "2MiB"}}}, "hugepages"),
        ({"decode": {"resources": {"requests": {"cpu": "1"}}, "kind": 3}}, "kind"),
        ({"image": {"digest": "abc"}}, "digest"),
        ({"model": {"path": "/elsewhere"}}, "path"),
        ({"config": {"kv": {"arena_sise": "1GiB"}}}, "arena_sise"),
        ({"config": {"kv": {"arena_size": "much"}}}, "arena_size"),
        ({"config": {"conductor": {"policy": "chance"}}}, "policy"),
        ({"config": {"cluster": "other"}}, "cluster"),
        ({"model": {"download": {"enabled": True}}}, "image"),
        ({"gateway": {"route": {"enabled": True}}}, "parentRefs"),
        ({"valkey": {"enabled": False}}, "valkey.url"),
        ({"valkey": {"enabled": False, "url": "redis+cluster://valkey.example"}}, "url"),
        ({"prefill": {"autoscaling": {"targetKvUse": 0.5}}}, "targetKvUse"),
        ({"decode": {"autoscaling": {"queuedTokens": 1}}}, "queuedTokens"),
        ({"instance": {"autoscaling": {"followRatio": True}}}, "followRatio"),
        ({"prefill": {"replicas": 0}}, "prefill.replicas, decode.replicas: without instances a cluster has one pod of each at least"),
        ({"prefill": {"replicas": "some"}}, "replicas"),
        ({"instance": {"replicas": ""}}, "replicas"),
        ({"tls": {"existingAuthority": "ours"}, **MONITORED}, "existingCertificate"),
        ({"monitoring": {"rules": {"objective": 1}}}, "objective"),
        ({"monitoring": {"rules": {"runbooks": "https://wiki.example"}}}, "runbooks"),
        ({"monitoring": {"rules": {"grafana": "https://grafana.example/"}}}, "grafana"),
        ({"mode": "kuberay"}, "mode"),
        ({"ray": {"version": "latest"}}, "version"),
        ({"mode": "ray", "tls": {"enabled": False}}, "tls.enabled"),
        ({"mode": "ray", "config": {"ray": {"address": "local"}}}, "config.ray.address"),
        ({"mode": "ray", "config": {"ray": {"decode": {"cpus": 4}}}}, "config.ray.decode"),
        ({"mode": "ray", "config": {"prefill_node": {"stages": 2, "spread_stages": True}}}, "config.prefill_node.spread_stages"),
        ({"mode": "ray", "autoscaling": {"kind": "hpa"}}, "autoscaling.kind"),
        ({"mode": "ray", "decode": {"kind": "StatefulSet"}}, "decode.kind"),
        ({"mode": "ray", "prefill": {"maxSurge": 2}}, "prefill.maxSurge"),
        ({"mode": "ray", "prefill": {"pdb": {"maxUnavailable": "20%"}}}, "prefill.pdb.maxUnavailable"),
        ({"mode": "ray", "prefill": {"replicas": 0}}, "prefill.replicas"),
        ({"mode": "ray", "decode": {"autoscaling": {"enabled": True, "minReplicas": 65}}}, "decode.autoscaling.minReplicas"),
        ({"mode": "ray", "decode": {"autoscaling": {"enabled": True, "minReplicas": 9}}}, "decode.autoscaling.maxReplicas"),
        (
            {"mode": "ray", "instance": {"replicas": 1}, "decode": SCALED},
            "decode.autoscaling.enabled: in mode ray, where there are instances",
        ),
        ({"mode": "ray", "config": {"ray": {"instance": {"cpus": 4}}}}, "config.ray.instance"),
        ({"mode": "ray", "prefill": {"autoscaling": {"queuedTokens": 1000}}}, "prefill.autoscaling.queuedTokens"),
        ({"mode": "ray", "decode": {"autoscaling": {"targetKvUse": 0.5}}}, "decode.autoscaling.targetKvUse"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rendered(values)


def ray_cluster(name: str) -> tuple[Object, ClusterConfig]:
    """Of the matrix, and the settings of the head that places nodes there."""
    objects = rendered(MATRIX[name])
    (found,) = of_kind(objects, "RayCluster")
    return found, ClusterConfig.model_validate(yaml.safe_load(settings(objects, "head.yaml")))


def as_rays_autoscaler_sees(found: Object) -> dict[str, dict[str, Any]]:
    """The groups of a RayCluster, by name."""
    autoscaling = pytest.importorskip("ray.autoscaler._private.kuberay.autoscaling_config")
    return dict(autoscaling._derive_autoscaling_config_from_ray_cr(found)["available_node_types"])


@pytest.mark.parametrize("name", RAY)
def test_a_pod_of_ray_has_room_for_one_node_of_its_role_and_no_other(name: str) -> None:
    found, config = ray_cluster(name)
    rooms = {pool: described["resources"] for pool, described in as_rays_autoscaler_sees(found).items()}
    pools = [pool for pool in Pool if least_nodes(config, pool)]
    assert rooms.keys() == {"headgroup", *pools}
    for pool in pools:
        wanted = bundle(config, pool, has_cards=False)
        assert {name for name, room in rooms.items() if fits(wanted, room)} == {pool}
        assert not fits({each: 2 * amount for each, amount in wanted.items()}, rooms[pool])


@pytest.mark.parametrize("name", RAY)
def test_ray_has_as_many_pods_as_the_placer_may_want(name: str) -> None:
    found, config = ray_cluster(name)
    groups = {Pool(group["groupName"]): group for group in found["spec"]["workerGroupSpecs"]}
    assert groups.keys() == {pool for pool in Pool if least_nodes(config, pool)}
    for pool, group in groups.items():
        most, least = pool_config(config, pool).most, least_nodes(config, pool)
        assert (group["minReplicas"], group["maxReplicas"]) == (least, most or least)
        assert ("replicas" in group) == (most is None)
    scaled = any("replicas" not in group for group in found["spec"]["workerGroupSpecs"])
    assert found["spec"].get("enableInTreeAutoscaling", False) is scaled


@pytest.mark.parametrize("name", RAY)
def test_rays_autoscaler_has_pods_made_for_nodes_that_find_no_room(name: str) -> None:
    scheduler = pytest.importorskip("ray.autoscaler._private.resource_demand_scheduler")
    found, config = ray_cluster(name)
    groups = {Pool(group["groupName"]): group for group in found["spec"]["workerGroupSpecs"]}
    there = {"headgroup": 1, **{name: group["minReplicas"] for name, group in groups.items()}}
    scorer = partial(scheduler._default_utilization_scorer, node_availability_summary=None)
    for pool, group in groups.items():
        asked, more = [bundle(config, pool, has_cards=False)] * 3, group["maxReplicas"] - group["minReplicas"]
        made, left = scheduler.get_nodes_for(as_rays_autoscaler_sees(found), there, "headgroup", 100, asked, scorer)
        assert made == ({pool: min(3, more)} if more else {}) and len(left) == 3 - min(3, more)


def test_ray_knows_every_option_that_it_is_started_with() -> None:
    scripts = pytest.importorskip("ray.scripts.scripts")
    known = {option.removeprefix("--") for each in scripts.start.params for option in each.opts}
    for found in of_kind(list(all_objects()), "RayCluster"):
        for group in (found["spec"]["headGroupSpec"], *found["spec"]["workerGroupSpecs"]):
            assert group["rayStartParams"].keys() <= known


def test_ray_is_of_the_version_that_the_image_has() -> None:
    found, _ = ray_cluster("ray")
    pins = (REPOSITORY / "deploy/docker/requirements.txt").read_text().splitlines()
    assert f"ray=={found['spec']['rayVersion']}" in pins


def test_a_pod_of_ray_has_what_its_parts_have_in_pods_of_their_own() -> None:
    by_component = {each.component(): each.containers["ray"]["resources"] for each in of_ray(rendered(MATRIX["ray, cuda"]))}
    devices = {"nvidia.com/gpu": 4, "rdma/hca": 2, "hugepages-2Mi": "1026Mi"}
    assert by_component["prefill"] == {
        "requests": {"cpu": "3500m", "memory": "7168Mi", **devices},
        "limits": {"memory": "14336Mi", **devices},
    }
    assert by_component["decode"]["limits"] == {"memory": "14336Mi", "nvidia.com/gpu": 1}


def test_of_pods_that_kubernetes_cannot_count_so_many_stay_at_least(objects: list[Object]) -> None:
    for found in of_kind(objects, "PodDisruptionBudget"):
        (each,) = selected(found["spec"]["selector"]["matchLabels"], objects)
        assert (each.group is None) == ("maxUnavailable" in found["spec"]) == ("minAvailable" not in found["spec"])
    minimum = {
        found["metadata"]["labels"]["app.kubernetes.io/component"]: found["spec"].get("minAvailable")
        for found in of_kind(rendered(MATRIX["ray, scaled"]), "PodDisruptionBudget")
    }
    assert (minimum["prefill"], minimum["decode"]) == (2, 2)


def test_the_schema_has_the_settings_that_there_are() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"]["config"] == schema_of_config(), "python -m tests.support.chart_schema"


def test_every_value_is_in_the_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def whole(described: dict[str, Any]) -> dict[str, Any]:
        if "properties" not in described and "allOf" in described:
            pool, less = (whole(each) for each in described["allOf"])
            scaling, refused = pool["properties"]["autoscaling"], less["properties"]["autoscaling"]["properties"]
            rest = {name: inner for name, inner in scaling["properties"].items() if refused.get(name) is not False}
            return {**pool, "properties": {**pool["properties"], "autoscaling": {**scaling, "properties": rest}}}
        return dict(schema["$defs"][described["$ref"].removeprefix("#/$defs/")]) if "$ref" in described else described

    def known(value: object, described: dict[str, Any], path: str) -> Iterator[str]:
        described = whole(described)
        if isinstance(value, dict) and "properties" in described:
            assert described["additionalProperties"] is False
            for name, inner in value.items():
                assert name in described["properties"], f"{path}.{name}"
                yield from known(inner, described["properties"][name], f"{path}.{name}")
            assert {name for name in described["properties"] if name != "global"} == set(value) or path == ".config", path
        yield path

    assert len(list(known(yaml.safe_load((CHART / "values.yaml").read_text()), schema, ""))) > 100
