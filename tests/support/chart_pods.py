"""The pods of a rendered chart as processes of this machine: each pod a network namespace with an address of its own, each container a root
laid over this machine's, with the pod's volumes where the container mounts them, as the user that the pod runs as.

What stands in for Kubernetes: Services are lines of /etc/hosts, each with the latest of its pods; `tini` is a line of shell.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.chart import NAMESPACE, REPOSITORY, Object, Pods, name_of, of_kind, selected
from tests.support.netns import Plugged, Switch, Unavailable

PATIENCE_S = 120.0
TINI = '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n'
ROOT = "/mnt/root"
CODE = "/srv/springtide"
"""Where a container has this repository, which may lie below something that it mounts."""
MOUNTED = "/tmp"
"""A volume of every container's."""
TCP_PROBE = "import sys, socket; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"
HTTP_PROBE = "import ssl, sys, urllib.request as http; http.urlopen(sys.argv[1], timeout=3, context=ssl._create_unverified_context())"


class Container:
    """One that runs, or has run."""

    def __init__(self, process: subprocess.Popen[bytes], name: str, log: Path) -> None:
        self.name, self.log = name, log
        self._process = process

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        return self._process.wait(PATIENCE_S)

    @property
    def pid(self) -> int:
        """Of its first process."""
        until = time.monotonic() + PATIENCE_S
        while not (children := psutil.Process(self._process.pid).children()):
            assert self._process.poll() is None and time.monotonic() < until, f"{self.name} has ended: {self.log.read_text()[-3000:]}"
            time.sleep(0.05)
        return int(children[0].pid)

    def terminate(self) -> int:
        """Tells it to stop; returns its exit code."""
        psutil.Process(self.pid).terminate()
        return self.wait()

    def kill(self) -> None:
        """With its first process all others of its namespace end; that of `unshare` alone would leave it, for it has changed its user."""
        if self.runs:
            for process in psutil.Process(self._process.pid).children():
                process.kill()
        self._process.kill()
        self._process.wait()


class Pod:
    """A pod of a workload, under a name of its own."""

    def __init__(self, pods: Pods, name: str, network: Plugged, objects: Sequence[Object], hosts: str, directory: Path) -> None:
        self._pods, self._network, self._objects, self._hosts, self._directory = pods, network, objects, hosts, directory
        self.name, self.address = name, network.address
        self.containers: dict[str, Container] = {}
        directory.mkdir(parents=True)
        self._volumes = {volume: self._made(volume) for volume in pods.volumes}
        self.see(objects)

    def start(self) -> None:
        """What comes first, one after another, and then everything else; returns when everything is ready."""
        for spec in self._pods.spec.get("initContainers", []):
            container = self._run(spec)
            if spec in self._pods.sidecars:
                self._await(spec, "startupProbe")
            else:
                assert container.wait() == 0, container.log.read_text()
        for spec in self._main:
            self._run(spec)
        for spec in self._main:
            if "startupProbe" in spec:
                self._await(spec, "startupProbe")
        for spec in self._pods.containers.values():
            if "readinessProbe" in spec:
                self._await(spec, "readinessProbe")

    def lives(self, container: str) -> bool:
        """What the kubelet finds when it looks whether a container is to be ended."""
        spec = self._pods.containers[container]
        return self._probed(spec, spec["livenessProbe"])

    def execute(self, container: str, *command: str) -> subprocess.CompletedProcess[str]:
        """What `kubectl exec` does; returns when the command has ended."""
        inside = self._inside(self._pods.containers[container], command)
        return subprocess.run(inside, capture_output=True, text=True, timeout=PATIENCE_S)

    def stop(self) -> dict[str, int]:
        """Tells the main containers to stop, when those who wait before that have waited, and once they have ended the sidecars, the last
        first; returns the exit codes of those that serve."""
        time.sleep(max((spec.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0) for spec in self._main), default=0))
        codes = {spec["name"]: self.containers[spec["name"]].terminate() for spec in self._main if "ports" in spec}
        for spec in reversed(self._pods.sidecars):
            if "ports" in spec:
                codes[spec["name"]] = self.containers[spec["name"]].terminate()
        self.close()
        return codes

    def close(self) -> None:
        for container in self.containers.values():
            container.kill()

    def know(self, hosts: str) -> None:
        """What Services there are from now on."""
        self._hosts = hosts
        for container in self.containers.values():
            if container.runs:
                inside = ("nsenter", "--target", str(container.pid), "--mount", "--root", "tee", "/etc/hosts")
                subprocess.run(inside, input=hosts.encode(), stdout=subprocess.DEVNULL, check=True)

    def see(self, objects: Sequence[Object]) -> None:
        """What is in ConfigMaps and Secrets from now on, in the volumes that are of them."""
        self._objects = objects
        for volume, source in self._pods.volumes.items():
            for name, content in self._content(source):
                scratch = self._volumes[volume] / f".{name}"
                scratch.write_bytes(content)
                scratch.replace(self._volumes[volume] / name)

    def _made(self, volume: str) -> Path:
        path = self._directory / "volumes" / volume
        path.mkdir(parents=True)
        path.chmod(0o777)
        return path

    def _content(self, volume: Object) -> Iterator[tuple[str, bytes]]:
        """The files of a volume, and what is in them."""
        for kind, field, name_field in (("ConfigMap", "configMap", "name"), ("Secret", "secret", "secretName")):
            if (reference := volume.get(field)) is not None:
                there = self._of(kind, reference[name_field])["data"]
                for item in reference.get("items", [{"key": key, "path": key} for key in there]):
                    text = there[item["key"]]
                    yield item["path"], text.encode() if kind == "ConfigMap" else base64.b64decode(text)

    @property
    def _main(self) -> list[Object]:
        return list(self._pods.spec["containers"])

    def _of(self, kind: str, name: str) -> Object:
        return next(found for found in of_kind(self._objects, kind) if found["metadata"]["name"] == name)

    def _environment(self, spec: Object) -> dict[str, str]:
        fields = {"metadata.name": self.name, "status.podIP": self.address}
        environment = {"PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONPATH": CODE}
        for variable in spec.get("env", []):
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                environment[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                secret = self._of("Secret", source["secretKeyRef"]["name"])
                environment[variable["name"]] = base64.b64decode(secret["data"][source["secretKeyRef"]["key"]]).decode()
            else:
                environment[variable["name"]] = variable["value"]
        return environment

    def _run(self, spec: Object) -> Container:
        environment = self._environment(spec)
        command = [re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], word) for word in spec["command"]]
        script = [
            "set -e; mount --make-rprivate /; mount -t tmpfs tmpfs /mnt; mkdir /mnt/upper /mnt/work /mnt/root",
            f"mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work {ROOT}",
            f"for each in dev proc sys; do mount --rbind /$each {ROOT}/$each; done; chmod a+x {ROOT}/root",
            f"printf %s {shlex.quote(self._hosts)} > {ROOT}/etc/hosts; printf %s {shlex.quote(TINI)} > {ROOT}/usr/bin/tini",
            f"chmod 755 {ROOT}/usr/bin/tini; mkdir {ROOT}{CODE}; mount --bind {REPOSITORY} {ROOT}{CODE}",
        ]
        for mount in spec["volumeMounts"]:
            source, target = self._volumes[mount["name"]] / mount.get("subPath", ""), ROOT + os.path.realpath(mount["mountPath"])
            make = f"touch {target}" if source.is_file() else f"mkdir -p {target}"
            script.append(f"mkdir -p {os.path.dirname(target)}; {make}; mount --bind {source} {target}")
        script.append(f"exec /usr/sbin/chroot --userspec={self._user} {ROOT} {shlex.join(command)}")
        log = self._directory / f"{spec['name']}.log"
        unshare = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "/bin/bash", "-c", "\n".join(script))
        with log.open("wb") as output:
            process = subprocess.Popen([*self._network.prefix, *unshare], env=environment, stdout=output, stderr=subprocess.STDOUT)
        self.containers[spec["name"]] = Container(process, f"{self.name}/{spec['name']}", log)
        return self.containers[spec["name"]]

    @property
    def _user(self) -> str:
        security = self._pods.spec["securityContext"]
        return f"{security['runAsUser']}:{security['runAsGroup']}"

    def _inside(self, spec: Object, command: Sequence[str]) -> list[str]:
        """The command line of what is executed in a container that runs."""
        user, _, group = self._user.partition(":")
        environment = [f"{name}={value}" for name, value in self._environment(spec).items()]
        pid = str(self.containers[spec["name"]].pid)
        target = ("--target", pid, "--mount", "--pid", "--net", "--root", "--setuid", user, "--setgid", group)
        return ["nsenter", *target, "env", *environment, *command]

    def _await(self, spec: Object, kind: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not self._probed(spec, spec[kind]):
            container = self.containers[spec["name"]]
            assert container.runs and time.monotonic() < until, f"{container.name}: {kind}: {container.log.read_text()[-3000:]}"
            time.sleep(spec[kind].get("periodSeconds", 1) / 2)

    def _probed(self, spec: Object, probe: Object) -> bool:
        if "exec" in probe:
            command = self._inside(spec, probe["exec"]["command"])
        elif "grpc" in probe:
            with grpc.insecure_channel(f"{self.address}:{probe['grpc']['port']}") as channel:
                try:
                    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=3)
                except grpc.RpcError:
                    return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        elif "httpGet" in probe:
            asked = probe["httpGet"]
            url = f"{asked.get('scheme', 'HTTP').lower()}://{self.address}:{self._pods.ports()[asked['port']]}{asked['path']}"
            command = [sys.executable, "-c", HTTP_PROBE, url]
        else:
            command = [sys.executable, "-c", TCP_PROBE, self.address, str(self._pods.ports()[probe["tcpSocket"]["port"]])]
        return subprocess.run(command, capture_output=True).returncode == 0


class Cluster:
    """The chart's pods, as many as are started."""

    def __init__(self, objects: Sequence[Object], directory: Path) -> None:
        """Raises netns.Unavailable."""
        if Path(sys.prefix).is_relative_to(MOUNTED):
            raise Unavailable(f"this environment lies below {MOUNTED}, where each container has a volume of its own")
        self._objects, self._directory = objects, directory
        self._all: list[Pod] = []
        self._switch = Switch()
        self._hosts = {"localhost": "127.0.0.1"}
        self.pods: dict[str, Pod] = {}

    def upgrade(self, objects: Sequence[Object]) -> None:
        """Pods that start from now on are of these objects; Secrets that the chart keeps are as they were."""
        there = {name_of(found): found for found in self._objects}

        def kept(found: Object) -> bool:
            return found["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep" and name_of(found) in there

        self._objects = [there[name_of(found)] if kept(found) else found for found in objects]

    def secret(self, name: str) -> dict[str, bytes]:
        """What is in it, by key."""
        (found,) = [found for found in of_kind(self._objects, "Secret") if found["metadata"]["name"] == name]
        return {key: base64.b64decode(text) for key, text in found["data"].items()}

    def change_secret(self, name: str, key: str, content: bytes) -> None:
        """Replaces what is in it under a key; pods that run see that."""
        (found,) = [found for found in of_kind(self._objects, "Secret") if found["metadata"]["name"] == name]
        changed = {**found, "data": {**found["data"], key: base64.b64encode(content).decode()}}
        self._objects = [changed if each is found else each for each in self._objects]
        for pod in self._all:
            pod.see(self._objects)

    def start(self, *names: str) -> None:
        """Starts pods, which are called like their component and a number, side by side; returns when they are ready. One of the same name
        must have been stopped."""
        there = list(self._all)
        made = [self._make(name) for name in names]
        for pod in there:
            pod.know(self._hosts_file)
        with ThreadPoolExecutor() as kubelets:
            list(kubelets.map(Pod.start, made))

    def _make(self, name: str) -> Pod:
        component, _, _ = name.partition("-")
        (pods,) = selected({"app.kubernetes.io/component": component}, self._objects)
        network = self._switch.plug()
        for service in of_kind(self._objects, "Service"):
            if service["spec"]["selector"].items() <= pods.labels.items():
                host = service["metadata"]["name"]
                self._hosts |= dict.fromkeys((f"{host}.{NAMESPACE}.svc.cluster.local", host), network.address)
        pod = Pod(pods, name, network, self._objects, self._hosts_file, self._directory / str(len(self._all)))
        self._all.append(pod)
        self.pods[name] = pod
        return pod

    @property
    def _hosts_file(self) -> str:
        return "".join(f"{address} {name}\n" for name, address in self._hosts.items())

    def stop(self, *names: str) -> dict[str, dict[str, int]]:
        """Tells pods to stop, all at once; returns the exit codes of each when they have."""
        with ThreadPoolExecutor() as kubelets:
            return dict(zip(names, kubelets.map(lambda name: self.pods[name].stop(), names), strict=True))

    def close(self) -> None:
        for pod in self._all:
            pod.close()
        self._switch.close()


@contextmanager
def one_of_each(objects: Sequence[Object], directory: Path) -> Iterator[Cluster]:
    """A cluster with a pod of each kind. Skips the test where there can be none."""
    try:
        cluster = Cluster(objects, directory)
    except Unavailable as error:
        pytest.skip(str(error))
    try:
        cluster.start("valkey-0")
        cluster.start("conductor-0", "prefill-0", "decode-0", "gateway-0")
        yield cluster
    finally:
        cluster.close()
