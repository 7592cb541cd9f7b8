"""As much of a Kubernetes API as Helm speaks with: it discovers kinds, creates, reads, replaces, applies, selects and deletes objects, and
has its releases in Secrets. What an object may be is held against the strict schema of its kind. Nothing is done about any object."""

from __future__ import annotations

import base64
import copy
import json
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.support.chart import Object, kubernetes_problems

VERSION = "1.33"
KINDS: Mapping[str, tuple[str, ...]] = {
    "v1": ("ConfigMap", "Pod", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
    "gateway.networking.k8s.io/v1": ("GRPCRoute", "HTTPRoute"),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "monitoring.coreos.com/v1": ("PodMonitor", "PrometheusRule"),
    "ray.io/v1": ("RayCluster",),
}
CUSTOM = ("gateway.networking.k8s.io/v1", "keda.sh/v1alpha1", "monitoring.coreos.com/v1", "ray.io/v1")
MUTABLE = {
    "StatefulSet": (
        "minReadySeconds",
        "ordinals",
        "persistentVolumeClaimRetentionPolicy",
        "replicas",
        "revisionHistoryLimit",
        "template",
        "updateStrategy",
    )
}
"""The fields of a kind's spec that may be changed, where not all may."""
FIXED = {"Deployment": ("selector",)}
"""And those that may not, where most may."""
MOST_BYTES = 1 << 20
"""Of the data of a ConfigMap or a Secret."""
PROTOBUF = b"k8s\0"
"""How an object in Kubernetes' protobuf begins, as Helm writes its Secrets."""


def plural(kind: str) -> str:
    return f"{kind[:-1]}ies".lower() if kind.endswith("y") else f"{kind}s".lower()


BY_PATH = {(version, plural(kind)): kind for version, kinds in KINDS.items() for kind in kinds}


class Key(NamedTuple):
    api_version: str
    kind: str
    namespace: str
    name: str


class Refused(Exception):
    """With the status and the reason that a client is told."""

    def __init__(self, status: HTTPStatus, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.status, self.reason = status, reason


class KubernetesApi:
    """Serves on a port of loopback until `close`."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.objects: dict[Key, Object] = {}
        self._lock = threading.Lock()
        self._version = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def write_kubeconfig(self, path: Path) -> None:
        server = {"server": f"http://127.0.0.1:{self.port}"}
        context = {"cluster": "emulated", "user": "nobody"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "emulated", "cluster": server}],
            "users": [{"name": "nobody", "user": {}}],
            "contexts": [{"name": "emulated", "context": context}],
            "current-context": "emulated",
        }
        path.write_text(yaml.safe_dump(config))

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def of_kind(self, kind: str) -> dict[str, Object]:
        """The objects, by name."""
        return {key.name: found for key, found in self.objects.items() if key.kind == kind}

    def delete(self, kind: str, name: str) -> None:
        (key,) = [key for key in self.objects if (key.kind, key.name) == (kind, name)]
        del self.objects[key]

    def answer(self, method: str, path: str, query: dict[str, str], body: bytes) -> Object:
        """Raises Refused."""
        if (told := _discovered(path)) is not None:
            return told
        api_version, namespace, kind, name = _parsed(path)
        with self._lock:
            key = Key(api_version, kind, namespace, name)
            if method == "GET" and not name:
                chosen = [found for found in self.objects.values() if _key(found)[:3] == key[:3] and _is_selected(found, query)]
                metadata = {"resourceVersion": str(self._version)}
                return {"apiVersion": api_version, "kind": f"{kind}List", "metadata": metadata, "items": chosen}
            if method == "PATCH" and body.startswith(b"["):
                return self._write("PUT", key, _replaced(self.objects[key], json.loads(body)))
            if method in ("POST", "PUT", "PATCH"):
                return self._write(method, key, _decoded(body))
            if key not in self.objects:
                raise Refused(HTTPStatus.NOT_FOUND, "NotFound", f'{kind} "{name}" not found')
            return self.objects[key] if method == "GET" else self.objects.pop(key)

    def _write(self, method: str, key: Key, found: Object) -> Object:
        """A PATCH is server-side apply by the only one who writes: what that leaves out is gone."""
        found = {"apiVersion": key.api_version, "kind": key.kind, **found}
        found["metadata"] = {**found["metadata"], "namespace": key.namespace}
        key = _key(found)
        there = self.objects.get(key)
        if method == "POST" and there is not None:
            raise Refused(HTTPStatus.CONFLICT, "AlreadyExists", f'{key.kind} "{key.name}" already exists')
        if key.api_version not in CUSTOM and (problems := kubernetes_problems(VERSION, found)):
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "Invalid", f"{key.kind} {key.name}: {'; '.join(problems)}")
        if _data_bytes(found) > MOST_BYTES:
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "Invalid", f"{key.kind} {key.name}: data: Too long: at most {MOST_BYTES} bytes")
        if there is not None and (changed := _changed_for_good(there, found)):
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "Invalid", f"{key.kind} {key.name}: {', '.join(changed)}: field is immutable")
        self._version += 1
        found["metadata"] |= {"uid": (there or found)["metadata"].get("uid", f"uid-{self._version}"), "resourceVersion": str(self._version)}
        self.objects[key] = found
        return found


def _replaced(found: Object, operations: Sequence[Object]) -> Object:
    """After a JSON patch, which replaces what is there. Raises Refused."""
    found = copy.deepcopy(found)
    for operation in operations:
        *parents, leaf = operation["path"].strip("/").split("/")
        place: Any = found
        for parent in parents:
            place = place[int(parent) if isinstance(place, list) else parent]
        if operation["op"] != "replace" or leaf not in place:
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "Invalid", f"{operation['op']} {operation['path']}: it is not there")
        place[leaf] = operation["value"]
    return found


def _key(found: Object) -> Key:
    return Key(found["apiVersion"], found["kind"], found["metadata"]["namespace"], found["metadata"]["name"])


def _data_bytes(found: Object) -> int:
    if found["kind"] not in ("ConfigMap", "Secret"):
        return 0
    data = found.get("data", {}).values()
    return sum(len(base64.b64decode(text) if found["kind"] == "Secret" else text.encode()) for text in data)


def _changed_for_good(there: Object, found: Object) -> list[str]:
    """The fields that are other ones and cannot be."""
    old, new, kind = there.get("spec", {}), found.get("spec", {}), found["kind"]
    fixed = set(old) | set(new) if kind in MUTABLE else set(FIXED.get(kind, ()))
    return sorted(name for name in fixed - set(MUTABLE.get(kind, ())) if old.get(name) != new.get(name))


def _is_selected(found: Object, query: dict[str, str]) -> bool:
    wanted = dict(each.split("=") for each in query.get("labelSelector", "").replace("==", "=").split(",") if each)
    return wanted.items() <= found["metadata"].get("labels", {}).items()


def _discovered(path: str) -> Object | None:
    match path.strip("/").split("/"):
        case ["version"]:
            major, minor = VERSION.split(".")
            return {"major": major, "minor": minor, "gitVersion": f"v{VERSION}.0"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            groups = []
            for group, _, number in (version.partition("/") for version in KINDS if "/" in version):
                one = {"groupVersion": f"{group}/{number}", "version": number}
                groups.append({"name": group, "versions": [one], "preferredVersion": one})
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        case ["api", "v1"] | ["apis", _, _] as parts:
            version = "/".join(parts[1:])
            common = {"singularName": "", "namespaced": True, "verbs": ["create", "delete", "get", "list", "patch", "update"]}
            resources = [{"name": plural(kind), "kind": kind, **common} for kind in KINDS.get(version, ())]
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
    return None


def _parsed(path: str) -> tuple[str, str, str, str]:
    """Version, namespace, kind and name, which is empty where the path names none. Raises Refused."""
    match path.strip("/").split("/"):
        case ["api", "v1", "namespaces", namespace, resources, *name]:
            version = "v1"
        case ["apis", group, number, "namespaces", namespace, resources, *name]:
            version = f"{group}/{number}"
        case _:
            raise Refused(HTTPStatus.NOT_FOUND, "NotFound", path)
    kind = BY_PATH.get((version, resources))
    if kind is None:
        raise Refused(HTTPStatus.NOT_FOUND, "NotFound", path)
    return version, namespace, kind, "".join(name)


def _decoded(body: bytes) -> Object:
    return _secret(body) if body.startswith(PROTOBUF) else dict(yaml.load(body, yaml.CSafeLoader))


def _secret(body: bytes) -> Object:
    """A Secret out of Kubernetes' protobuf: in runtime.Unknown, whose second field it is."""
    (raw,) = _fields(body[len(PROTOBUF) :])[2]
    secret = _fields(raw)
    metadata = _fields(secret[1][0])
    entries = {name: dict(map(_entry, metadata.get(number, []))) for name, number in (("labels", 11), ("annotations", 12))}
    maps = {name: {key: text.decode() for key, text in found.items()} for name, found in entries.items() if found}
    data = {key: base64.b64encode(content).decode() for key, content in map(_entry, secret.get(2, []))}
    return {"metadata": {"name": metadata[1][0].decode(), **maps}, "data": data, "type": secret[3][0].decode()}


def _entry(encoded: bytes) -> tuple[str, bytes]:
    fields = _fields(encoded)
    return fields[1][0].decode(), fields.get(2, [b""])[0]


def _fields(encoded: bytes) -> dict[int, list[bytes]]:
    """The fields of a message that are bytes, by number."""
    found: dict[int, list[bytes]] = {}
    rest = iter(encoded)
    for tag in iter(lambda: _varint(rest), None):
        number, wire_type = tag >> 3, tag & 7
        length = _varint(rest)
        assert wire_type in (0, 2) and length is not None, f"a field of wire type {wire_type} is not expected here"
        if wire_type == 2:
            found.setdefault(number, []).append(bytes(next(rest) for _ in range(length)))
    return found


def _varint(encoded: Iterator[int]) -> int | None:
    """None at the end."""
    value = shift = 0
    for byte in encoded:
        value |= (byte & 127) << shift
        if byte < 128:
            return value
        shift += 7
    return None


def _handler(api: KubernetesApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else what it says waits 40 ms for who has its headers to say so

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            url = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(url.query).items()}
            status = HTTPStatus.CREATED if self.command == "POST" else HTTPStatus.OK
            try:
                said: dict[str, Any] = api.answer(self.command, url.path, query, body)
            except Refused as error:
                status = error.status
                said = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": error.reason, "message": str(error)}
                said["code"] = status
            content = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    return Handler
