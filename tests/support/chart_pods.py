"""The pods of a rendered chart as processes of this machine: each pod a network namespace with an address of its own, each container a root
laid over this machine's, which it may write where it may in Kubernetes, with the pod's volumes where the container mounts them, as the user
that the pod runs as and with no privilege more.

What stands in for Kubernetes: names are lines of /etc/hosts, that of a Service without an address of its own with the latest of its pods;
`tini` is some lines of shell. Limits of processors and memory hold nobody, and network policies neither.
"""

from __future__ import annotations

import base64
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.local.logs import last_lines
from tests.support.chart import NAMESPACE, REPOSITORY, Object, Pods, name_of, of_kind, selected
from tests.support.chart_environment import command_line, contents, quantity, variables
from tests.support.chart_services import Address, Services
from tests.support.netns import Plugged, Switch, Unavailable
from tests.support.profiles import DEMO_PROFILE
from tests.support.waiting import wait_until

PATIENCE_S = 120.0
TINI = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift
trap 'kill -TERM $child' TERM
"$@" &
child=$!
wait $child
code=$?
while kill -0 $child 2>/dev/null; do
    wait $child
    code=$?
done
exit $code
"""
KILLED = 128 + signal.SIGKILL
ROOT = "/mnt/root"
CODE = "/srv/springtide"
"""Where a container has this repository, which may lie below something that it mounts."""
PROFILE = f"{CODE}/{Path(DEMO_PROFILE).relative_to(REPOSITORY)}"
"""What the demo model costs, as a container finds it."""
MOUNTED = "/tmp"
"""A volume of every container's."""
CONTENTS = {"configMap": "ConfigMap", "secret": "Secret"}
"""Volumes that are of what is in an object, which nobody writes."""
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
        """Returns its exit code."""
        return self._process.wait(PATIENCE_S)

    @property
    def pid(self) -> int:
        """Of what its command has started."""
        first = self._first
        started = first.children() if first.name() == "tini" else []
        return int(next(iter(started), first).pid)

    @property
    def _first(self) -> psutil.Process:
        def children() -> list[psutil.Process]:
            assert self.runs, f"{self.name} has ended: {self.log.read_text()[-3000:]}"
            return list(psutil.Process(self._process.pid).children())

        return wait_until(children, f"{self.name} to begin", PATIENCE_S)[0]

    def terminate(self) -> None:
        """Tells it to stop."""
        if self.runs:
            self._first.terminate()

    def ended(self, within_s: float) -> int:
        """Ends it when the time is over; returns its exit code."""
        try:
            return self._process.wait(max(within_s, 0.0))
        except subprocess.TimeoutExpired:
            self.kill()
            return KILLED

    def kill(self) -> None:
        """With its first process all others of its namespace end; that of `unshare` alone would leave it, for it has changed its user."""
        if self.runs:
            for process in psutil.Process(self._process.pid).children():
                process.kill()
        self._process.kill()
        self._process.wait()


class Pod:
    """A pod of a workload, under a name of its own."""

    def __init__(self, pods: Pods, name: str, network: Plugged, objects: Sequence[Object], directory: Path, claims: Path) -> None:
        """`claims`: where volumes are that pods leave behind."""
        self._pods, self._network, self._objects, self._directory = pods, network, objects, directory
        self.name, self.address = name, network.address
        self._unready = {spec["name"] for spec in pods.containers.values()}
        """The containers for which Services send it nothing."""
        self._over = threading.Event()
        self._probing: list[threading.Thread] = []
        self.containers: dict[str, Container] = {}
        directory.mkdir(parents=True)
        self._volumes = {volume: self._made(volume, source, claims) for volume, source in pods.volumes.items()}
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
                self._probing.append(threading.Thread(target=self._keep_probing, args=(spec,), name=f"{self.name}/{spec['name']}"))
        self._unready.clear()
        for thread in self._probing:
            thread.start()

    @property
    def ready(self) -> bool:
        """Whether Services send it what they are sent."""
        return not self._over.is_set() and not self._unready

    def _keep_probing(self, spec: Object) -> None:
        """A container that was ready once may be so no more, and again."""
        name, probe, failed = spec["name"], spec["readinessProbe"], 0
        while not self._over.wait(probe.get("periodSeconds", 10)):
            try:
                failed = 0 if self._probed(spec, probe) else failed + 1
            except (AssertionError, psutil.NoSuchProcess):  # it has ended
                failed = probe.get("failureThreshold", 3)
            if failed == 0:
                self._unready.discard(name)
            elif failed >= probe.get("failureThreshold", 3):
                self._unready.add(name)

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
        first. Who is still there when the pod's grace is over is killed. Returns the exit codes of those that serve."""
        self._over.set()
        until = time.monotonic() + self._pods.spec["terminationGracePeriodSeconds"]
        time.sleep(max((spec["lifecycle"]["preStop"]["sleep"]["seconds"] for spec in self._main if "lifecycle" in spec), default=0))
        codes: dict[str, int] = {}
        for together in (self._main, *([sidecar] for sidecar in reversed(self._pods.sidecars))):
            for spec in together:
                self.containers[spec["name"]].terminate()
            for spec in together:
                code = self.containers[spec["name"]].ended(until - time.monotonic())
                codes |= {spec["name"]: code} if "ports" in spec else {}
        for volume, source in self._pods.volumes.items():
            size, most = _bytes_below(self._volumes[volume]), source.get("emptyDir", {}).get("sizeLimit")
            assert most is None or size <= quantity(most), f"{self.name} is evicted for {size} bytes in its volume {volume}"
        return codes

    def places(self, service: Object, port: Object) -> list[Address]:
        """Where what is sent to a port of a Service may arrive here."""
        if not self.ready or not service["spec"]["selector"].items() <= self._pods.labels.items():
            return []
        target = port.get("targetPort", port["port"])
        return [(self.address, target if isinstance(target, int) else self._pods.ports()[target])]

    def close(self) -> None:
        self._over.set()
        for container in self.containers.values():
            container.kill()
        for thread in self._probing:
            thread.join()

    def know(self, hosts: str) -> None:
        """What names there are from now on, beside its own."""
        (self._directory / "hosts").write_text(f"{hosts}{self.address} {self.name}\n")

    def see(self, objects: Sequence[Object]) -> None:
        """What is in ConfigMaps and Secrets from now on, in the volumes that are of them."""
        self._objects = objects
        for volume, source in self._pods.volumes.items():
            for field, kind in CONTENTS.items():
                if (reference := source.get(field)) is not None:
                    self._fill(self._volumes[volume], kind, reference)

    def _fill(self, directory: Path, kind: str, reference: Object) -> None:
        there = contents(kind, reference, self._objects)
        for item in reference.get("items", [{"key": key, "path": key} for key in there]):
            scratch = directory / f".{item['path']}"
            scratch.write_bytes(there[item["key"]])
            os.chown(scratch, 0, self._group)
            scratch.chmod(reference.get("defaultMode", 0o644) | 0o440)
            scratch.replace(directory / item["path"])

    def _made(self, volume: str, source: Object, claims: Path) -> Path:
        """Where it is: new, but for claims."""
        if "persistentVolumeClaim" in source:
            path = claims / source["persistentVolumeClaim"]["claimName"]
        elif "metadata" in source:
            path = claims / f"{volume}-{self.name}"
        else:
            assert {"emptyDir", "ephemeral", *CONTENTS} & source.keys(), f"{self.name}: what is the volume {source}?"
            path = self._directory / "volumes" / volume
        path.mkdir(parents=True, exist_ok=True)
        os.chown(path, 0, self._group)
        path.chmod(0o2777 if "emptyDir" in source else 0o2775)
        return path

    @property
    def _group(self) -> int:
        return int(self._pods.spec["securityContext"]["fsGroup"])

    @property
    def _main(self) -> list[Object]:
        return list(self._pods.spec["containers"])

    def _environment(self, spec: Object) -> dict[str, str]:
        image = {"PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONPATH": CODE, "HOSTNAME": self.name}
        return {**image, **self._variables(spec)}

    def _variables(self, spec: Object) -> dict[str, str]:
        template = self._pods.template
        metadata = {**template["metadata"], "name": self.name, "namespace": NAMESPACE}
        return variables(spec, {**template, "metadata": metadata, "status": {"podIP": self.address}}, self._objects)

    def _run(self, spec: Object) -> Container:
        command = command_line(spec, self._variables(spec))
        script = [
            f"set -e; hostname {self.name}; mount --make-rprivate /; mount -t tmpfs tmpfs /mnt; mkdir /mnt/upper /mnt/work /mnt/root",
            f"mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work {ROOT}",
            f"for each in dev proc sys; do mount --rbind /$each {ROOT}/$each; done; chmod a+x {ROOT}/root",
            f"mount -t tmpfs -o size=64m,mode=1777 tmpfs {ROOT}/dev/shm; printf %s {shlex.quote(TINI)} > {ROOT}/usr/bin/tini",
            f"chmod 755 {ROOT}/usr/bin/tini; mkdir {ROOT}{CODE}; {_bound(REPOSITORY, CODE, read_only=True)}",
            _bound(self._directory / "hosts", "/etc/hosts", read_only=True),
        ]
        for mount in spec["volumeMounts"]:
            source, target = self._volumes[mount["name"]] / mount.get("subPath", ""), os.path.realpath(mount["mountPath"])
            make = f"touch {ROOT}{target}" if source.is_file() else f"mkdir -p {ROOT}{target}"
            read_only = mount.get("readOnly", False) or bool(CONTENTS.keys() & self._pods.volumes[mount["name"]].keys())
            script.append(f"mkdir -p {ROOT}{os.path.dirname(target)}; {make}; {_bound(source, target, read_only=read_only)}")
        if spec["securityContext"].get("readOnlyRootFilesystem"):
            script.append(f"mount -o remount,bind,ro {ROOT}")
        script.append(f"exec /usr/sbin/chroot {ROOT} {shlex.join([*self._privileges(spec), *command])}")
        log = self._directory / f"{spec['name']}.log"
        own = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "/bin/bash", "-c", "\n".join(script))
        with log.open("wb") as output:
            command = [*self._network.prefix, *own]
            process = subprocess.Popen(command, env=self._environment(spec), stdout=output, stderr=subprocess.STDOUT)
        self.containers[spec["name"]] = Container(process, f"{self.name}/{spec['name']}", log)
        return self.containers[spec["name"]]

    def _privileges(self, spec: Object) -> list[str]:
        """The words before a command that is executed with those of a container."""
        security = {**self._pods.spec["securityContext"], **spec["securityContext"]}
        assert security["capabilities"] == {"drop": ["ALL"]} and not security["allowPrivilegeEscalation"]
        user = ["--reuid", str(security["runAsUser"]), "--regid", str(security["runAsGroup"]), "--groups", str(self._group)]
        return ["/usr/bin/setpriv", *user, "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]

    def _inside(self, spec: Object, command: Sequence[str]) -> list[str]:
        """The command line of what is executed in a container that runs."""
        environment = [f"{name}={value}" for name, value in self._environment(spec).items()]
        target = ("--target", str(self.containers[spec["name"]].pid), "--mount", "--uts", "--pid", "--net", "--root")
        return ["nsenter", *target, *self._privileges(spec), "env", *environment, *command]

    def _await(self, spec: Object, kind: str) -> None:
        container = self.containers[spec["name"]]

        def said() -> str:
            return container.log.read_text()[-3000:]

        def probed() -> bool:
            assert container.runs, f"{container.name} has ended: {said()}"
            return self._probed(spec, spec[kind])

        wait_until(probed, f"{container.name}: {kind}", PATIENCE_S, said, spec[kind].get("periodSeconds", 1))

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


def _bound(source: Path, target: str, *, read_only: bool) -> str:
    """The command that has a file or directory where a container sees the target, which is there."""
    bound = f"mount --bind {source} {ROOT}{target}"
    return f"{bound}; mount -o remount,bind,ro {ROOT}{target}" if read_only else bound


def _bytes_below(directory: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*"))


class Cluster:
    """The chart's pods, as many as are started; none yet, nor a Service."""

    def __init__(self, directory: Path) -> None:
        """Raises netns.Unavailable."""
        if Path(sys.prefix).is_relative_to(MOUNTED):
            raise Unavailable(f"this environment lies below {MOUNTED}, where each container has a volume of its own")
        self._objects: Sequence[Object] = []
        self._directory = directory
        self._all: list[Pod] = []
        self._switch = Switch()
        self._services = Services(self._switch, lambda service, port: [place for pod in self._all for place in pod.places(service, port)])
        self._hosts = {"localhost": "127.0.0.1"}
        self.pods: dict[str, Pod] = {}

    @property
    def here(self) -> str:
        """The address at which pods reach who is outside."""
        return self._switch.here

    def address(self, service: str) -> str:
        """Of a Service."""
        return self._hosts[service]

    def logs(self) -> str:
        """The end of what each container has said."""
        containers = [container for pod in self._all for container in pod.containers.values()]
        return "\n".join(f"--- {container.name}\n{last_lines(container.log, 15)}" for container in containers)

    def upgrade(self, objects: Sequence[Object]) -> None:
        """Services, and pods that start from now on, are of these objects; Secrets that the chart keeps are as they were."""
        there = {name_of(found): found for found in self._objects}

        def kept(found: Object) -> bool:
            return found["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep" and name_of(found) in there

        self._objects = [there[name_of(found)] if kept(found) else found for found in objects]
        for service, address in self._services.become(of_kind(self._objects, "Service")).items():
            self._name(service, address)

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
        made = [self._make(name) for name in names]
        for pod in self._all:
            pod.know(self._hosts_file)
        with ThreadPoolExecutor() as kubelets:
            list(kubelets.map(Pod.start, made))

    def _make(self, name: str) -> Pod:
        component, _, _ = name.partition("-")
        (pods,) = selected({"app.kubernetes.io/component": component}, self._objects)
        network = self._switch.plug()
        for service in of_kind(self._objects, "Service"):
            if service["spec"].get("clusterIP") == "None" and service["spec"]["selector"].items() <= pods.labels.items():
                self._name(service["metadata"]["name"], network.address)
        pod = Pod(pods, name, network, self._objects, self._directory / str(len(self._all)), self._directory / "claims")
        self._all.append(pod)
        self.pods[name] = pod
        return pod

    def _name(self, service: str, address: str) -> None:
        self._hosts |= dict.fromkeys((f"{service}.{NAMESPACE}.svc.cluster.local", service), address)

    @property
    def _hosts_file(self) -> str:
        return "".join(f"{address} {name}\n" for name, address in self._hosts.items())

    def stop(self, *names: str) -> dict[str, dict[str, int]]:
        """Tells pods to stop, all at once; returns the exit codes of each when they have."""
        with ThreadPoolExecutor() as kubelets:
            return dict(zip(names, kubelets.map(lambda name: self.pods[name].stop(), names), strict=True))

    def close(self) -> None:
        with ExitStack() as closing:
            for close in (self._switch.close, self._services.close, *(pod.close for pod in self._all)):
                closing.callback(close)


@contextmanager
def cluster_of(objects: Sequence[Object], directory: Path) -> Iterator[Cluster]:
    """A cluster in which nothing runs yet. Raises netns.Unavailable."""
    cluster = Cluster(directory)
    try:
        cluster.upgrade(objects)
        yield cluster
    finally:
        cluster.close()
