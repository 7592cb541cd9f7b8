"""What a container of a pod is started with, as Kubernetes resolves it: its environment, and the words of its command line."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

from tests.support.chart import Object, of_kind

_UNITS = {"": Fraction(1), "m": Fraction(1, 1000)}
_UNITS |= {unit: Fraction(1000 ** (power + 1)) for power, unit in enumerate(("k", "M", "G", "T", "P"))}
_UNITS |= {unit: Fraction(1024 ** (power + 1)) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"))}


def quantity(text: str) -> Fraction:
    """Of 1500m or 2Gi, in units. Raises ValueError."""
    found = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", text)
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is no quantity")
    return Fraction(found[1]) * _UNITS[found[2]]


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """With the variables in the places of $(NAME). What names none stays as it is; $$ is a dollar sign that begins no name."""
    return re.sub(r"\$(?:\$|\(([^)]*)\))", lambda found: "$" if found[1] is None else variables.get(found[1], found[0]), text)


def command_line(container: Object, variables: Mapping[str, str]) -> list[str]:
    """Raises ValueError for what only the container's image knows."""
    if not container.get("command"):
        raise ValueError(f"{container['name']}: the command is its image's")
    return [expanded(word, variables) for word in (*container["command"], *container.get("args", []))]


def variables(container: Object, pod: Object, objects: Sequence[Object]) -> dict[str, str]:
    """The environment, without its image's own. `pod`: as Kubernetes has it, with its status. Raises LookupError for what is not there."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        for kind in ("ConfigMap", "Secret"):
            if (reference := source.get(f"{kind[0].lower()}{kind[1:]}Ref")) is not None:
                there = contents(kind, reference, objects)
                found |= {f"{source.get('prefix', '')}{key}": content.decode() for key, content in there.items()}
    for variable in container.get("env", []):
        if "valueFrom" not in variable:
            found[variable["name"]] = expanded(variable.get("value", ""), found)
        elif (value := _from(variable["valueFrom"], container, pod, objects)) is not None:
            found[variable["name"]] = value
    return found


def contents(kind: str, reference: Object, objects: Sequence[Object]) -> dict[str, bytes]:
    """What is in a ConfigMap or Secret, by key; nothing, if it is not there and need not be. Raises LookupError."""
    name = reference.get("name") or reference["secretName"]
    for each in of_kind(objects, kind):
        if each["metadata"]["name"] == name:
            return {key: base64.b64decode(text) if kind == "Secret" else text.encode() for key, text in each.get("data", {}).items()}
    if reference.get("optional"):
        return {}
    raise LookupError(f"there is no {kind} {name}")


def _from(source: Object, container: Object, pod: Object, objects: Sequence[Object]) -> str | None:
    """None: there is no such value, and need not be."""
    (kind, reference) = next(iter(source.items()))
    if kind == "fieldRef":
        return _field(pod, reference["fieldPath"])
    if kind == "resourceFieldRef":
        bounds, _, resource = reference["resource"].partition(".")
        return str(math.ceil(quantity(str(container["resources"][bounds][resource])) / quantity(str(reference.get("divisor", "1")))))
    there = contents({"configMapKeyRef": "ConfigMap", "secretKeyRef": "Secret"}[kind], reference, objects)
    if reference["key"] not in there and not reference.get("optional"):
        raise LookupError(f"{reference['name']} has no {reference['key']}")
    return there[reference["key"]].decode() if reference["key"] in there else None


def _field(pod: Object, path: str) -> str:
    """Raises KeyError."""
    steps = re.findall(r"\['([^']+)'\]|([^.\[\]]+)", path)
    value = pod
    for quoted, plain in steps:
        value = value[quoted or plain]
    return str(value)
