"""The pods of the chart's tests are what Kubernetes would make of them."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.chart import Object
from tests.support.chart_environment import command_line, expanded, quantity, variables
from tests.support.chart_pods import KILLED, Cluster, Pod, cluster_of
from tests.support.waiting import wait_until

POD = {
    "metadata": {"name": "a-0", "namespace": "models", "labels": {"example.com/part": "a"}},
    "spec": {"serviceAccountName": "ours"},
    "status": {"podIP": "198.18.0.5"},
}
OBJECTS = [
    {"kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"SIZE": "7", "COLOUR": "blue"}},
    {"kind": "Secret", "metadata": {"name": "hub"}, "data": {"TOKEN": base64.b64encode(b"word").decode()}},
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$(OTHER)", "$(OTHER)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A} $(A", "$A ${A} $(A"),
        ("$(A)$", "1$"),
    ],
)
def test_a_name_in_brackets_is_replaced_where_it_is_known_and_not_escaped(text: str, expected: str) -> None:
    assert expanded(text, {"A": "1", "B": "2"}) == expected


def test_a_variable_knows_those_before_it_and_wins_over_what_comes_from_whole_objects() -> None:
    container = {
        "envFrom": [{"configMapRef": {"name": "settings"}}, {"prefix": "HUB_", "secretRef": {"name": "hub"}}],
        "env": [
            {"name": "SIZE", "value": "8"},
            {"name": "BOTH", "value": "$(SIZE) $(LATER) $(HUB_TOKEN)"},
            {"name": "LATER", "value": "9"},
            {"name": "NOTHING"},
        ],
    }
    found = variables(container, POD, OBJECTS)
    assert found == {"SIZE": "8", "COLOUR": "blue", "HUB_TOKEN": "word", "BOTH": "8 $(LATER) word", "LATER": "9", "NOTHING": ""}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"fieldRef": {"fieldPath": "status.podIP"}}, "198.18.0.5"),
        ({"fieldRef": {"fieldPath": "metadata.labels['example.com/part']"}}, "a"),
        ({"fieldRef": {"fieldPath": "spec.serviceAccountName"}}, "ours"),
        ({"secretKeyRef": {"name": "hub", "key": "TOKEN"}}, "word"),
        ({"configMapKeyRef": {"name": "settings", "key": "COLOUR"}}, "blue"),
        ({"resourceFieldRef": {"resource": "limits.cpu"}}, "2"),
        ({"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1m"}}, "500"),
        ({"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}, "2048"),
        ({"secretKeyRef": {"name": "hub", "key": "OTHER", "optional": True}}, None),
        ({"configMapKeyRef": {"name": "other", "key": "OTHER", "optional": True}}, None),
    ],
)
def test_a_value_comes_from_where_it_says(source: dict[str, Any], expected: str | None) -> None:
    resources = {"limits": {"cpu": "1500m", "memory": "2Gi"}, "requests": {"cpu": 0.5}}
    container = {"env": [{"name": "A", "valueFrom": source}], "resources": resources}
    assert variables(container, POD, OBJECTS).get("A") == expected


@pytest.mark.parametrize(
    "source", [{"secretKeyRef": {"name": "hub", "key": "OTHER"}}, {"secretKeyRef": {"name": "settings", "key": "SIZE"}}]
)
def test_what_is_not_there_is_missed(source: dict[str, Any]) -> None:
    with pytest.raises(LookupError):
        variables({"env": [{"name": "A", "valueFrom": source}]}, POD, OBJECTS)


def test_the_command_is_followed_by_its_arguments() -> None:
    assert command_line({"name": "a", "command": ["get", "$(A)"], "args": ["--to", "$(B)"]}, {"A": "1", "B": "2"}) == [
        "get",
        "1",
        "--to",
        "2",
    ]
    with pytest.raises(ValueError, match="image"):
        command_line({"name": "a", "args": ["--to", "x"]}, {})


@pytest.mark.parametrize(("text", "expected"), [("500m", 0.5), ("2", 2), ("1.5Gi", 1.5 * 2**30), ("3k", 3000)])
def test_quantities_are_kubernetes_own(text: str, expected: float) -> None:
    assert quantity(text) == expected


SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
USER = {"runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10002}
wants_root = pytest.mark.skipif(os.geteuid() != 0, reason="wants root")


def container(script: str, mounts: dict[str, str], **more: Any) -> Object:
    """One that runs this script. `mounts`: volumes by where they are mounted."""
    mounted = [{"name": volume, "mountPath": path} for path, volume in mounts.items()]
    return {"name": "main", "command": ["sh", "-c"], "args": [script], "volumeMounts": mounted, "securityContext": SECURITY, **more}


def workload(*containers: Object, kind: str = "Pod", volumes: tuple[Object, ...] = (), **spec: Any) -> Object:
    template = {
        "metadata": {"labels": {"app.kubernetes.io/component": "a"}},
        "spec": {"securityContext": USER, "terminationGracePeriodSeconds": 60, "containers": containers, "volumes": volumes, **spec},
    }
    if kind == "Pod":
        return {"kind": kind, **template}
    return {"kind": kind, "metadata": {"name": "a"}, "spec": {"template": template}}


def said(pod: Pod, name: str = "main") -> list[str]:
    """What a container has said by its end."""
    assert pod.containers[name].wait() == 0, pod.containers[name].log.read_text()
    return pod.containers[name].log.read_text().split()


EMPTY: Object = {"emptyDir": {}}


@wants_root
@pytest.mark.parametrize("read_only", [True, False])
def test_a_container_writes_into_what_is_mounted_for_that_and_nowhere_else(tmp_path: Path, read_only: bool) -> None:
    places = ("/", "/etc", "/var/tmp", "/srv/springtide", "/data", "/seen", "/settings", "/secrets", "/dev/shm")
    script = f"for place in {' '.join(places)}; do touch $place/here 2>/dev/null && echo $place; done; exit 0"
    mounts = {"/tmp": "tmp", "/data": "data", "/settings": "settings", "/secrets": "secrets"}
    writing = container(script, mounts, securityContext={**SECURITY, "readOnlyRootFilesystem": read_only})
    writing["volumeMounts"].append({"name": "data", "mountPath": "/seen", "readOnly": True})
    volumes = (
        {"name": "tmp", **EMPTY},
        {"name": "data", **EMPTY},
        {"name": "settings", "configMap": {"name": "settings"}},
        {"name": "secrets", "secret": {"secretName": "hub"}},
    )
    with cluster_of([workload(writing, volumes=volumes), *OBJECTS], tmp_path) as cluster:
        cluster.start("a-0")
        assert said(cluster.pods["a-0"]) == [*(() if read_only else ("/var/tmp",)), "/data", "/dev/shm"]
    assert not Path("/var/tmp/here").exists() and not Path("/dev/shm/here").exists()


@wants_root
def test_a_container_is_its_pods_user_without_a_privilege_in_a_pod_of_its_own_name(tmp_path: Path) -> None:
    script = (
        "id -u; id -G; grep -E 'NoNewPrivs|Cap(Bnd|Eff|Prm)' /proc/self/status; getent hosts $(hostname); stat -c '%a %u %g' /secrets/TOKEN"
    )
    volumes = ({"name": "secrets", "secret": {"secretName": "hub", "defaultMode": 0o400}},)
    with cluster_of([workload(container(script, {"/secrets": "secrets"}), volumes=volumes), *OBJECTS], tmp_path) as cluster:
        cluster.start("a-0")
        none = "0" * 16
        privileges = ["CapPrm:", none, "CapEff:", none, "CapBnd:", none, "NoNewPrivs:", "1"]
        pod = cluster.pods["a-0"]
        assert said(pod) == ["10001", "10001", "10002", *privileges, pod.address, "a-0", "440", "0", "10002"]


@wants_root
def test_what_prepares_a_pod_comes_first_in_its_order_and_a_part_of_a_volume_is_seen_alone(tmp_path: Path) -> None:
    first = {
        **container("mkdir /all/part; echo $WORD > /all/part/file", {"/all": "data"}, envFrom=[{"secretRef": {"name": "hub"}}]),
        "name": "first",
    }
    first["env"] = [{"name": "WORD", "value": "a$(TOKEN)"}]
    second = {**container("cat /all/part/file; echo b >> /all/part/file", {"/all": "data"}), "name": "second"}
    main = container("cat /part/file; ls /part", {})
    main["volumeMounts"] = [{"name": "data", "mountPath": "/part", "subPath": "part", "readOnly": True}]
    made = workload(main, volumes=({"name": "data", **EMPTY},), initContainers=[first, second])
    with cluster_of([made, *OBJECTS], tmp_path) as cluster:
        cluster.start("a-0")
        assert said(cluster.pods["a-0"], "second") == ["aword"]
        assert said(cluster.pods["a-0"]) == ["aword", "b", "file"]


@wants_root
def test_what_a_pod_has_claimed_is_there_for_the_next_of_its_name_alone(tmp_path: Path) -> None:
    made = workload(
        container("cat /data/* 2>/dev/null; ls /own; echo $HOSTNAME | tee /data/name /own/name", {"/data": "data", "/own": "own"}),
        kind="StatefulSet",
        volumes=({"name": "own", **EMPTY},),
    )
    made["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "data"}}]
    with cluster_of([made], tmp_path) as cluster:
        cluster.start("a-0", "a-1")
        before = [said(cluster.pods[name]) for name in ("a-0", "a-1")]
        cluster.stop("a-0")
        cluster.start("a-0")
        assert [*before, said(cluster.pods["a-0"])] == [["a-0"], ["a-1"], ["a-0", "a-0"]]


SERVES: Object = {"ports": [{"name": "http", "containerPort": 8000}], "startupProbe": {"exec": {"command": ["test", "-e", "/run/there"]}}}
STOPS = "trap 'date +%s%N > /run/{0}; exit {1}' TERM; touch /run/there; while :; do sleep 0.1; done"


@wants_root
def test_sidecars_end_after_the_main_container_and_who_outlives_the_grace_is_killed(tmp_path: Path) -> None:
    side = container(STOPS.format("side", 4), {"/run": "run"}, **SERVES, restartPolicy="Always")
    main = container(STOPS.format("main", 3), {"/run": "run"}, **SERVES)
    volumes = ({"name": "run", "emptyDir": {"sizeLimit": "1Mi"}},)
    with cluster_of([workload(main, volumes=volumes, initContainers=[{**side, "name": "side"}])], tmp_path) as cluster:
        cluster.start("a-0")
        assert cluster.stop("a-0") == {"a-0": {"main": 3, "side": 4}}
        ended = [int((tmp_path / "0/volumes/run" / name).read_text()) for name in ("main", "side")]
        assert ended == sorted(ended)
    deaf = container("trap '' TERM; touch /run/there; while :; do sleep 0.1; done", {"/run": "run"}, **SERVES)
    with cluster_of([workload(deaf, volumes=volumes, terminationGracePeriodSeconds=0)], tmp_path / "deaf") as cluster:
        cluster.start("a-0")
        assert cluster.stop("a-0") == {"a-0": {"main": KILLED}}


@wants_root
def test_a_pod_with_more_in_a_volume_than_that_may_have_is_evicted(tmp_path: Path) -> None:
    full = container("head -c 2097152 /dev/zero > /data/file", {"/data": "data"})
    with cluster_of([workload(full, volumes=({"name": "data", "emptyDir": {"sizeLimit": "1Mi"}},))], tmp_path) as cluster:
        cluster.start("a-0")
        said(cluster.pods["a-0"])
        with pytest.raises(AssertionError, match="evicted"):
            cluster.stop("a-0")


@wants_root
def test_tini_passes_on_what_it_is_told_and_says_how_its_child_has_ended(tmp_path: Path) -> None:
    waits = {**container("touch /run/there; exec sleep 600", {"/run": "run"}, **SERVES), "command": ["tini", "--", "sh", "-c"]}
    with cluster_of([workload(waits, volumes=({"name": "run", **EMPTY},))], tmp_path) as cluster:
        cluster.start("a-0")
        assert Path(f"/proc/{cluster.pods['a-0'].containers['main'].pid}/comm").read_text() == "sleep\n"
        assert cluster.stop("a-0") == {"a-0": {"main": 128 + signal.SIGTERM}}


TELLS = """
import socket
there = socket.create_server(("", 8000))
while True:
    connection, _ = there.accept()
    connection.sendall(socket.gethostname().encode())
    connection.close()
"""
ASKS = "import socket; print(socket.create_connection(('a', 80)).recv(99).decode())"
HTTP = {"name": "http", "containerPort": 8000}
SELECTOR = {"app.kubernetes.io/component": "a"}
SERVICE = {"kind": "Service", "metadata": {"name": "a"}, "spec": {"selector": SELECTOR, "ports": [{"port": 80, "targetPort": "http"}]}}
PROBED_OFTEN = {"periodSeconds": 0.2, "failureThreshold": 2}


def answering(cluster: Cluster, pod: str) -> set[str]:
    """Who answers what a pod asks the Service."""
    return {cluster.pods[pod].execute("main", "python", "-c", ASKS).stdout.strip() for _ in range(4)}


@wants_root
def test_a_service_sends_each_connection_to_one_of_its_pods_that_are_ready(tmp_path: Path) -> None:
    tells = container('exec python -c "$TELLS"', {}, env=[{"name": "TELLS", "value": TELLS}], ports=[HTTP])
    tells["startupProbe"] = {"tcpSocket": {"port": "http"}}
    with cluster_of([workload(tells, terminationGracePeriodSeconds=0), SERVICE], tmp_path) as cluster:
        cluster.start("a-0", "a-1")
        assert answering(cluster, "a-1") == {"a-0", "a-1"}
        cluster.stop("a-0")
        assert answering(cluster, "a-1") == {"a-1"}
        cluster.start("a-2")
        assert answering(cluster, "a-1") == {"a-1", "a-2"}


@wants_root
def test_a_service_sends_nothing_to_a_pod_that_is_ready_no_more_until_it_is_again(tmp_path: Path) -> None:
    tells = container('touch /run/there; exec python -c "$TELLS"', {"/run": "run"}, env=[{"name": "TELLS", "value": TELLS}], ports=[HTTP])
    tells |= {"startupProbe": {"tcpSocket": {"port": "http"}}, "readinessProbe": {**SERVES["startupProbe"], **PROBED_OFTEN}}
    made = workload(tells, volumes=({"name": "run", **EMPTY},), terminationGracePeriodSeconds=0)
    with cluster_of([made, SERVICE], tmp_path) as cluster:
        cluster.start("a-0", "a-1")
        assert answering(cluster, "a-1") == {"a-0", "a-1"}
        cluster.pods["a-0"].execute("main", "rm", "/run/there")
        wait_until(lambda: answering(cluster, "a-1") == {"a-1"}, "the Service to leave a-0 out")
        cluster.pods["a-0"].execute("main", "touch", "/run/there")
        wait_until(lambda: answering(cluster, "a-1") == {"a-0", "a-1"}, "the Service to take a-0 in again")
        cluster.pods["a-0"].containers["main"].kill()
        wait_until(lambda: answering(cluster, "a-1") == {"a-1"}, "the Service to leave out who has ended")


@wants_root
def test_of_a_cluster_that_cannot_be_made_nothing_is_left(tmp_path: Path) -> None:
    def there() -> set[str]:
        names = subprocess.run(("ip", "netns", "list"), capture_output=True, text=True, check=True).stdout.split()
        return {name for name in names if name.startswith(f"springtide-{os.getpid()}-")} | {each.name for each in threading.enumerate()}

    before = there()
    with pytest.raises(KeyError, match="ports"), cluster_of([{**SERVICE, "spec": {}}], tmp_path):
        pass
    assert there() == before
