"""The Helm chart, rendered: objects, and what of them refers to what."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
import yaml

from tests.support.chart_tools import TOOLS, helm

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "deploy/helm/springtide"
NAMESPACE, RELEASE = "models", "moon"
Object = dict[str, Any]
WORKLOADS = ("Deployment", "StatefulSet", "Pod")


@cache
def _rendered(version: int, values: str) -> list[Object]:
    command = [str(helm(version)), "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", "-"]
    ended = subprocess.run(command, input=values, capture_output=True, text=True)
    if ended.returncode:
        raise ValueError(ended.stderr)
    return [found for found in yaml.load_all(ended.stdout, yaml.CSafeLoader) if found]


def rendered(values: Mapping[str, Any], version: int = 4) -> list[Object]:
    """The objects, of which each caller gets the same. Raises ValueError with what Helm says."""
    return _rendered(version, json.dumps(values))


SCHEMAS = Path(kubernetes_validate.__file__).with_name("kubernetes-json-schema")


@cache
def _definitions(version: str) -> tuple[Path, jsonschema_rs.Registry]:
    (directory,) = SCHEMAS.glob(f"v{version}.*-local-strict")
    return directory, jsonschema_rs.Registry([("_definitions.json", json.loads((directory / "_definitions.json").read_text()))])


@cache
def _validator(version: str, api_version: str, kind: str) -> jsonschema_rs.Draft202012Validator:
    directory, definitions = _definitions(version)
    group, _, name = api_version.rpartition("/")
    prefix = f"{group.split('.')[0]}-" if group else ""
    schema = json.loads((directory / f"{kind.lower()}-{prefix}{name}.json").read_text())
    return jsonschema_rs.Draft202012Validator(schema, registry=definitions)


def kubernetes_problems(version: str, found: Object) -> list[str]:
    """What is wrong with an object by the strict schema of its kind. Raises OSError where this Kubernetes has no such kind."""
    validator = _validator(version, found["apiVersion"], found["kind"])
    return [f"{error.instance_path}: {error.message}" for error in validator.iter_errors(found)]


def custom_resource_problems(objects: Sequence[Object]) -> list[str | None]:
    """Of each, what is wrong with it by its schema; None where nothing is."""
    command = ["node", str(Path(__file__).with_name("custom_resources.mjs")), str(TOOLS)]
    ended = subprocess.run(command, input=json.dumps(objects), capture_output=True, text=True, check=True)
    return list(json.loads(ended.stdout))


def ray_cluster_problems(definitions: Path, found: Object) -> list[str]:
    """What is wrong with a RayCluster by KubeRay's definition, and which of its fields that does not know."""
    versions = yaml.load((definitions / "ray.io_rayclusters.yaml").read_text(), yaml.CSafeLoader)["spec"]["versions"]
    (schema,) = [each["schema"]["openAPIV3Schema"] for each in versions if f"ray.io/{each['name']}" == found["apiVersion"]]
    return [f"{error.instance_path}: {error.message}" for error in jsonschema_rs.Draft202012Validator(_closed(schema)).iter_errors(found)]


def _closed(schema: Any) -> Any:
    """The schema, with no properties but those that it names."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "number", "string"]}
    closed = {name: _closed(inner) for name, inner in schema.items()}
    if "properties" in schema:
        closed["properties"] = {name: _closed(inner) for name, inner in schema["properties"].items()}
        closed["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    return closed


def name_of(found: Object) -> str:
    return f"{found['kind']}/{found['metadata']['name']}"


@dataclass(frozen=True)
class Pods:
    """The pods of a workload, as it is to make them."""

    workload: Object
    group: Object | None = None
    """Of a RayCluster: which of its groups these are."""

    @property
    def name(self) -> str:
        return name_of(self.workload) if self.group is None else f"{name_of(self.workload)}/{self.component()}"

    @property
    def template(self) -> Object:
        if self.group is not None:
            return dict(self.group["template"])
        return self.workload if self.workload["kind"] == "Pod" else dict(self.workload["spec"]["template"])

    @property
    def spec(self) -> Object:
        return dict(self.template["spec"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def preparing(self) -> list[Object]:
        """The containers that end before the others start."""
        return [each for each in self.spec.get("initContainers", []) if each.get("restartPolicy") != "Always"]

    @property
    def sidecars(self) -> list[Object]:
        """The containers that start, one after another, before the main ones, and end after them in the opposite order."""
        return [each for each in self.spec.get("initContainers", []) if each.get("restartPolicy") == "Always"]

    @property
    def containers(self) -> dict[str, Object]:
        """By name, those that run as long as the pod does."""
        return {each["name"]: each for each in (*self.sidecars, *self.spec["containers"])}

    @property
    def all_containers(self) -> list[Object]:
        return [*self.preparing, *self.containers.values()]

    @property
    def volumes(self) -> dict[str, Object]:
        claimed = self.workload["spec"].get("volumeClaimTemplates", [])
        return {**{each["name"]: each for each in self.spec.get("volumes", [])}, **{each["metadata"]["name"]: each for each in claimed}}

    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for container in self.containers.values() for port in container.get("ports", [])}

    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]


def pods(objects: Sequence[Object]) -> Iterator[Pods]:
    for found in objects:
        if found["kind"] in WORKLOADS:
            yield Pods(found)
        elif found["kind"] == "RayCluster":
            yield from (Pods(found, group) for group in (found["spec"]["headGroupSpec"], *found["spec"]["workerGroupSpecs"]))


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [found for found in objects if found["kind"] in kinds]


def selected(labels: Mapping[str, str], objects: Sequence[Object]) -> list[Pods]:
    """The pods that have all of these labels."""
    return [each for each in pods(objects) if labels.items() <= each.labels.items()]
